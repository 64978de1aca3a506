// The gradients of LayerNorm.
#include "norm_backward.h"

namespace opsmith {

void layer_norm_backward(View dy, View dsummed, View s, View mean, View rstd, View weight, View dx,
                         View dweight, View dbias) {
  norm_backward<true>({dy, dsummed, s, mean.as<float>(), rstd.as<float>(), dx}, weight, 0.0f, dweight, dbias);
}

}  // namespace opsmith
