// MLA pre-processing with weights as they are.
#include "mla_region.h"

namespace opsmith {

void mla_in_floats(const MlaCall& call) {
  with_float_type(call.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    mla_run<MlaFloat<T>>(call);
  });
}

}  // namespace opsmith
