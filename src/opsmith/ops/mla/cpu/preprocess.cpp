// MLA pre-processing by its form.
#include "region.h"

namespace opsmith::mla {

void preprocess(PreprocessCall call) {
  constexpr int64_t kTokens = 64;
  const int64_t all = call.x.sizes[0];
  for (; call.first < all; call.first += kTokens) {
    call.tokens = std::min(kTokens, all - call.first);
    switch (call.quant) {
      case Quant::none: in_floats(call); break;
      case Quant::per_tensor:
      case Quant::per_token: in_integers(call); break;
      case Quant::weight_int8:
      case Quant::weight_int4: with_small_weights(call); break;
    }
  }
}

}  // namespace opsmith::mla
