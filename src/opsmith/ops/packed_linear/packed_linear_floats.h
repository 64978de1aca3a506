#pragma once

#include "gemm_tile.h"
#include "packed_linear.h"

namespace opsmith {

// With the weight as floats, block by block, of float32 or of bfloat16 as x is: where that is faster, and of all rows of x where the
// weight's numbers are floats.
void packed_linear_floats(const PackedProduct& one);

// Calls f with null pointers of x's and y's types.
template <class F>
inline void with_float_types(const View& x, const View& y, const F& f) {
  with_float_type(x.dtype, [&](auto* t) {
    if (y.dtype != x.dtype) return f(t, static_cast<float*>(nullptr));
    f(t, t);
  });
}

}  // namespace opsmith
