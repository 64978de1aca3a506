// MLA pre-processing by its form.
#include "region.h"

namespace opsmith::mla {

void preprocess(const PreprocessCall& call) {
  if (call.x.sizes[0] == 0) return;
  switch (call.quant) {
    case Quant::none: return in_floats(call);
    case Quant::per_tensor:
    case Quant::per_token: return in_integers(call);
    case Quant::weight_int8:
    case Quant::weight_int4: return with_small_weights(call);
  }
}

}  // namespace opsmith::mla
