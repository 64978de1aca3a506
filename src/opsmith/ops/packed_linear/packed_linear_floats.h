#pragma once

#include "packed_linear.h"

namespace opsmith {

// With the weight as float32, block by block: of rows of float32 where that is faster, and of all rows of x where the
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
