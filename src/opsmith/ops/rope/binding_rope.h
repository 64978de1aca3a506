// What the memory safety of everything that rotates needs.
#pragma once

#include "binding.h"
#include "rope.h"

namespace opsmith {

inline bool dense_rows(const Tensor& t) {
  return t.size(t.dim() - 1) < 2 || t.stride(t.dim() - 1) == 1 || t.numel() == 0;
}

inline void check_heads(const Tensor& t, const Tensor& like, bool same_heads) {
  bool fits = t.dim() == like.dim() && t.scalar_type() == like.scalar_type() && dense_rows(t);
  for (int64_t d = 0; fits && d < t.dim(); ++d) fits = t.size(d) == like.size(d) || (d == 1 && !same_heads);
  STD_TORCH_CHECK(fits, "rope: tensors must have one dtype, x's sizes and a contiguous last dimension");
}

// What reads of the table depend on: its width, its rows, and the positions that choose among them.
inline void check_table(const Tensor& cos, const Tensor& sin, const Optional& positions, const Tensor& x,
                        int64_t dims) {
  const int64_t size = x.size(x.dim() - 1), batch = x.dim() == 4 ? x.size(0) : 1,
                tokens = x.size(x.dim() == 4 ? 2 : 0);
  STD_TORCH_CHECK(dims >= 0 && dims % 2 == 0 && dims <= size, "rope: ", dims,
                  " dimensions cannot be rotated of ", size);
  const DType dtype = dtype_of(cos);
  const bool fits = dtype == DType::f32 || (dtype == dtype_of(x) && dtype != DType::i8) ||
                    (dtype_of(x) == DType::i8 && (dtype == DType::bf16 || dtype == DType::f16));
  STD_TORCH_CHECK(fits && dtype_of(sin) == dtype,
                  "rope: cos and sin must both be float32, or both in x's dtype");
  STD_TORCH_CHECK(
      (cos.dim() == 2 || cos.dim() == 3) && sin.dim() == cos.dim() && dense_rows(cos) && dense_rows(sin),
      "rope: cos and sin must be [L, D] or [B, L, D] with a contiguous last dimension");
  for (int64_t d = 0; d < cos.dim(); ++d) {
    STD_TORCH_CHECK(cos.size(d) == sin.size(d), "rope: cos and sin must have one shape");
  }
  const int64_t width = cos.size(cos.dim() - 1), rows = cos.size(cos.dim() - 2),
                tables = cos.dim() == 3 ? cos.size(0) : 1;
  STD_TORCH_CHECK(width == dims || width == dims / 2, "rope: cos must be ", dims, " or ", dims / 2,
                  " wide, not ", width);
  STD_TORCH_CHECK(tables == 1 || tables == batch, "rope: ", tables, " tables for a batch of ", batch);
  if (!positions) {
    STD_TORCH_CHECK(rows >= tokens, "rope: a table of ", rows, " rows for ", tokens, " tokens");
    return;
  }
  const int64_t d = positions->dim();
  STD_TORCH_CHECK(d == 1 || d == 2, "rope: positions must be [L] or [B, L]");
  STD_TORCH_CHECK(
      positions->size(d - 1) == tokens && (d == 1 || positions->size(0) == 1 || positions->size(0) == batch),
      "rope: positions must be one for each token");
  const View view = view_of(*positions);
  STD_TORCH_CHECK(is_id(view.dtype), "rope: positions must be int32 or int64");
  for (int64_t b = 0; b < (d == 2 ? positions->size(0) : 1); ++b) {
    for (int64_t l = 0; l < tokens; ++l) {
      const int64_t p = position_at(view, b, l);
      STD_TORCH_CHECK(0 <= p && p < rows, "rope: positions must lie in [0, ", rows,
                      "), the rows of the table; got ", p, " for token ", b * tokens + l);
    }
  }
}

inline void check_float(const Tensor& x) {
  STD_TORCH_CHECK(is_floating(dtype_of(x)), "rope: x must be floating-point");
}

}  // namespace opsmith
