// RMSNorm. x, residual, y, summed [rows, n]; weight [n]; rstd [rows] float32.
#pragma once

#include "types.h"

namespace opsmith {

void rms_norm(View x, View residual, View weight, double eps, double offset, bool round_first, View y,
              View summed, View rstd);
void rms_norm_backward(View dy, View dsummed, View s, View rstd, View weight, double offset, View dx,
                       View dweight);

// q int8. Without `s` [rows] float32, one scale and offset for the whole tensor.
void rms_norm_quant(View x, View weight, View bias, float eps, float scale, float offset, View q, View s);

}  // namespace opsmith
