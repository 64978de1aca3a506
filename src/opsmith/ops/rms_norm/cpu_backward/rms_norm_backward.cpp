// The gradients of RMSNorm.
#include "norm_backward.h"

namespace opsmith {

void rms_norm_backward(View dy, View dsummed, View s, View rstd, View weight, double offset, View dx,
                       View dweight) {
  norm_backward<false>({dy, dsummed, s, nullptr, rstd.as<float>(), dx}, weight, float(offset), dweight,
                       View{});
}

}  // namespace opsmith
