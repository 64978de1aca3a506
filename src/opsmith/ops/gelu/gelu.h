// GELU of x + bias, tensors [rows, n] contiguous in n, bias [n] or undefined.
#pragma once

#include "types.h"

namespace opsmith {

void gelu(View x, View bias, bool tanh, View y);
// dbias [n], defined only where bias is: the sums of dx over the rows.
void gelu_backward(View dy, View x, View bias, bool tanh, View dx, View dbias);

}  // namespace opsmith
