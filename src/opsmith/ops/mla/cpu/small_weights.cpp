// MLA pre-processing with weights in 8 or 4 bits, and activations as they are.
#include "region.h"

namespace opsmith::mla {

void with_small_weights(const PreprocessCall& call) {
  with_float_type(call.x.dtype, [&]<class T>(T*) {
    call.quant == Quant::weight_int8 ? Region<Int8Weight<T>>(call).run() : Region<Int4Weight<T>>(call).run();
  });
}

}  // namespace opsmith::mla
