// MLA pre-processing with weights as they are.
#include "region.h"

namespace opsmith::mla {

void in_floats(const PreprocessCall& call) {
  with_float_type(call.x.dtype, [&]<class T>(T*) { Region<FloatWeight<T>>(call).run(); });
}

}  // namespace opsmith::mla
