// What the memory safety of GELU and of its backward pass needs.
#pragma once

#include "binding.h"

namespace opsmith {

using Optional = std::optional<Tensor>;

inline void check_bias_rows(const char* op, int64_t dims, const Rows& x, const Optional& bias,
                            std::initializer_list<const Rows*> others) {
  for (const Rows* r : others) {
    STD_TORCH_CHECK(r->like(x), op, ": all tensors must have one shape and dtype");
  }
  if (!bias) return;
  STD_TORCH_CHECK(dims > 0 && bias->dim() == 1 && bias->size(0) == x.n() &&
                      (x.n() < 2 || bias->stride(0) == 1) && dtype_of(*bias) == x.dtype(),
                  op, ": bias must be a contiguous [", x.n(), "] in x's dtype");
}

}  // namespace opsmith
