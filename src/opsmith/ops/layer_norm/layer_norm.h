// LayerNorm. x, residual, y, summed [rows, n]; weight, bias [n]; mean, rstd [rows] float32.
#pragma once

#include "types.h"

namespace opsmith {

void layer_norm(View x, View residual, View weight, View bias, double eps, View y, View summed, View mean,
                View rstd);
void layer_norm_backward(View dy, View dsummed, View s, View mean, View rstd, View weight, View dx,
                         View dweight, View dbias);

}  // namespace opsmith
