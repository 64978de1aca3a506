// MLA pre-processing with weights in 8 or 4 bits, and activations as they are.
#include "mla_region.h"

namespace opsmith {

void mla_with_small_weights(const MlaCall& call) {
  with_float_type(call.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    call.quant == MlaQuant::weight_int8 ? mla_run<MlaWeightInt8<T>>(call) : mla_run<MlaWeightInt4<T>>(call);
  });
}

}  // namespace opsmith
