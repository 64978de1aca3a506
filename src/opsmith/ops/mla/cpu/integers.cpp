// MLA pre-processing with activations and weights in int8.
#include "region.h"

namespace opsmith::mla {

void in_integers(const PreprocessCall& call) {
  with_float_type(call.x.dtype, [&]<class T>(T*) {
    call.quant == Quant::per_token ? Region<IntegerProduct<T, true>>(call).run()
                                   : Region<IntegerProduct<T, false>>(call).run();
  });
}

}  // namespace opsmith::mla
