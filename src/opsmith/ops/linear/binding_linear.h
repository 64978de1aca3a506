// What the memory safety of everything that multiplies rows by a weight needs.
#pragma once

#include "binding.h"
#include "linear/linear.h"

namespace opsmith {

inline void check_bias(const char* op, const char* name, const Optional& t, int64_t n, DType dtype) {
  check_vector(op, name, t, n, false);
  STD_TORCH_CHECK(!t || dtype_of(*t) == dtype, op, ": ", name, " must be in x's dtype");
}

// A weight [N, K] as linear_pack leaves it, in this dtype or bfloat16.
inline void check_packed(const char* op, const Tensor& packed, DType dtype, int64_t n, int64_t k) {
  const int64_t unit = elements_per_unit(dtype_of(packed)), depth = (k + unit - 1) / unit * unit;
  STD_TORCH_CHECK(
      packed.dim() == 3 && packed.size(0) == 1 && packed.size(1) == n && packed.size(2) == depth &&
          packed.is_contiguous() && (dtype_of(packed) == dtype || dtype_of(packed) == DType::bf16),
      op, ": the packed weight must be a contiguous [1, ", n, ", ", depth, "] in x's dtype or bfloat16");
}

}  // namespace opsmith
