// The kernels: one function per native operator. Shapes and dtypes are the operator's contract (see its card in
// ops/); the binding checks what memory safety needs before it calls.
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith {

// x, residual, y, summed [rows, n]; weight, bias [n]; mean, rstd [rows] float32.
void layer_norm(View x, View residual, View weight, View bias, double eps, View y, View summed, View mean, View rstd);
void layer_norm_backward(View dy, View dsummed, View s, View mean, View rstd, View weight, View dx, View dweight,
                         View dbias);

// x, mask, y [outer, L, S]; method 0 auto, 1 stable, 2 fast.
void softmax(View x, View mask, double scale, bool causal, int64_t method, View y);
void softmax_backward(View dy, View y, double scale, View dx);

}  // namespace opsmith
