// Rows of a gradient that are not zero: what the binding calls.
#pragma once

#include "types.h"

namespace opsmith {

// float32. x [M, N], any row stride, M > 0; found int64 [1 + M]: how many rows are not zero, and which, in order. If none is,
// row 0 stands for them.
void nonzero_rows(const View& x, const View& found);

}  // namespace opsmith
