// MLA pre-processing with activations and weights in int8.
#include "mla_region.h"

namespace opsmith {

void mla_in_integers(const MlaCall& call) {
  with_float_type(call.x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    call.quant == MlaQuant::per_token ? mla_run<MlaInteger<T, true>>(call)
                                      : mla_run<MlaInteger<T, false>>(call);
  });
}

}  // namespace opsmith
