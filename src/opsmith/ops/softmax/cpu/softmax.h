// Softmax. x, mask, y [outer, L, S]; method 0 auto, 1 stable, 2 fast.
#pragma once

#include "types.h"

namespace opsmith {

void softmax(View x, View mask, double scale, bool causal, int64_t method, View y);
void softmax_backward(View dy, View y, double scale, View dx);

}  // namespace opsmith
