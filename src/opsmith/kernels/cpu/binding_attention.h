// What the memory safety of dense and packed attention needs.
#pragma once

#include "binding.h"

namespace opsmith {

// q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], out [B, H, L, Dv], dim = 4; or without B and with tokens before
// heads, dim = 3.
inline void check_heads(const char* op, int64_t dim, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out) {
  const DType dtype = dtype_of(q);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, op, ": q must be floating-point");
  for (const Tensor* t : {&q, &k, &v, &out}) {
    STD_TORCH_CHECK(t->dim() == dim && t->scalar_type() == q.scalar_type(), op, ": q, k, v and the output must have ", dim,
                    " dimensions and one dtype");
    STD_TORCH_CHECK(t->size(dim - 1) < 2 || t->stride(dim - 1) == 1 || t->numel() == 0, op,
                    ": the last dimension must be contiguous");
  }
  const auto a = q.sizes(), b = k.sizes(), c = v.sizes(), y = out.sizes();
  const size_t last = dim - 1;
  bool fits = a[last] == b[last] && c[last] == y[last] && (dim == 3 || a[0] == b[0]);
  for (size_t d = 0; d < last; ++d) fits = fits && a[d] == y[d] && b[d] == c[d];
  STD_TORCH_CHECK(fits, op, ": q, k, v and the output do not fit each other");
  STD_TORCH_CHECK(a[1] == 0 || (b[1] > 0 && a[1] % b[1] == 0), op, ": ", a[1], " heads for ", b[1], " of keys");
}

// A number or two for each of out's rows.
inline void check_row_sums(const char* op, const std::optional<Tensor>& sums, const Tensor& out) {
  if (!sums) return;
  bool fits = sums->dim() == out.dim() && dtype_of(*sums) == DType::f32 && sums->is_contiguous();
  for (int64_t d = 0; fits && d + 1 < out.dim(); ++d) fits = sums->size(d) == out.size(d);
  STD_TORCH_CHECK(fits && sums->size(out.dim() - 1) == 2, op, ": row_sums must be contiguous float32 [..., 2]");
}

}  // namespace opsmith
