// Gated activations: activation 0 is the SiLU, 1 the GELU, 2 its tanh form. All [rows, n], contiguous in n.
#pragma once

#include "types.h"

namespace opsmith {

void gated(View gate, View up, int64_t activation, View y);
void gated_backward(View dy, View gate, View up, int64_t activation, View dgate, View dup);

}  // namespace opsmith
