// What the memory safety of dense and packed attention needs.
#pragma once

#include "attention.h"
#include "binding.h"

namespace opsmith {

// q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], out [B, H, L, Dv], dim = 4; or without B and with tokens before
// heads, dim = 3.
inline void check_heads(const char* op, int64_t dim, const Tensor& q, const Tensor& k, const Tensor& v,
                        const Tensor& out) {
  const DType dtype = dtype_of(q);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, op,
                  ": q must be floating-point");
  for (const Tensor* t : {&q, &k, &v, &out}) {
    STD_TORCH_CHECK(t->dim() == dim && t->scalar_type() == q.scalar_type(), op,
                    ": q, k, v and the output must have ", dim, " dimensions and one dtype");
    STD_TORCH_CHECK(t->size(dim - 1) < 2 || t->stride(dim - 1) == 1 || t->numel() == 0, op,
                    ": the last dimension must be contiguous");
  }
  const auto a = q.sizes(), b = k.sizes(), c = v.sizes(), y = out.sizes();
  const size_t last = dim - 1;
  bool fits = a[last] == b[last] && c[last] == y[last] && (dim == 3 || a[0] == b[0]);
  for (size_t d = 0; d < last; ++d) fits = fits && a[d] == y[d] && b[d] == c[d];
  STD_TORCH_CHECK(fits, op, ": q, k, v and the output do not fit each other");
  STD_TORCH_CHECK(a[1] == 0 || (b[1] > 0 && a[1] % b[1] == 0), op, ": ", a[1], " heads for ", b[1],
                  " of keys");
}

// A number or two for each of out's rows.
inline void check_row_sums(const char* op, const std::optional<Tensor>& sums, const Tensor& out) {
  if (!sums) return;
  bool fits = sums->dim() == out.dim() && dtype_of(*sums) == DType::f32 && sums->is_contiguous();
  for (int64_t d = 0; fits && d + 1 < out.dim(); ++d) fits = sums->size(d) == out.size(d);
  STD_TORCH_CHECK(fits && sums->size(out.dim() - 1) == 2, op,
                  ": row_sums must be contiguous float32 [..., 2]");
}

// A mask as [B, H, L, S], stride 0 where it is broadcast.
class Mask {
 public:
  Mask(const char* op, const std::optional<Tensor>& mask, const Tensor& q, const Tensor& k)
      : sizes_{q.size(0), q.size(1), q.size(2), k.size(2)} {
    if (!mask) return;
    const DType dtype = dtype_of(*mask);
    const int64_t dims = mask->dim();
    bool fits = dims <= 4 && (dtype == DType::boolean || dtype == DType::f32 || dtype == dtype_of(q));
    for (int64_t d = 0; fits && d < dims; ++d) {
      const int64_t size = mask->size(d), at = 4 - dims + d;
      fits = size == sizes_[at] || size == 1;
      strides_[at] = size == 1 ? 0 : mask->stride(d);
    }
    STD_TORCH_CHECK(fits && (strides_[3] == 0 || strides_[3] == 1), op,
                    ": mask must broadcast to [B, H, L, S], be bool, float32 or in q's dtype, its last "
                    "dimension contiguous");
    view_ = View{mask->data_ptr(), dtype, 4, sizes_, strides_};
  }
  Mask(const Mask&) = delete;

  const View& view() const { return view_; }

 private:
  int64_t sizes_[4], strides_[4] = {};
  View view_;
};

// What comes back is like what went in, and so are the gradients.
inline void check_gradients(const char* op, const Tensor& dout, const Tensor& out,
                            std::initializer_list<const Tensor*> inputs,
                            std::initializer_list<const Tensor*> gradients) {
  const auto alike = [](const Tensor& a, const Tensor& b) {
    const int64_t last = a.dim() - 1;
    return same_sizes(a, b) && a.scalar_type() == b.scalar_type() &&
           (a.size(last) < 2 || a.stride(last) == 1 || a.numel() == 0);
  };
  bool fits = alike(dout, out);
  for (size_t i = 0; i < inputs.size(); ++i) fits = fits && alike(*gradients.begin()[i], *inputs.begin()[i]);
  STD_TORCH_CHECK(
      fits, op,
      ": a gradient must have the sizes and dtype of what it is of, and a contiguous last dimension");
}

// The offsets of packed sequences. They are checked here too: a compiled graph has nobody else who would, and a wrong one
// would be a read out of bounds.
inline void check_starts(const char* name, const View& starts, int64_t length) {
  const int64_t n = starts.dim == 1 ? starts.sizes[0] : 0;
  STD_TORCH_CHECK(n > 0 && (starts.dtype == DType::i32 || starts.dtype == DType::i64),
                  "attention_varlen: ", name,
                  " must be int32 or int64 and hold one number more than there are sequences");
  STD_TORCH_CHECK(Sequences::at(starts, 0) == 0, "attention_varlen: ", name, " must start at 0, got ",
                  Sequences::at(starts, 0));
  for (int64_t i = 1; i < n; ++i) {
    STD_TORCH_CHECK(Sequences::at(starts, i - 1) <= Sequences::at(starts, i), "attention_varlen: ", name,
                    " must not decrease, got ", Sequences::at(starts, i - 1), " before ",
                    Sequences::at(starts, i));
  }
  STD_TORCH_CHECK(Sequences::at(starts, n - 1) == length, "attention_varlen: ", name, " must end at ", length,
                  ", the tokens there are, got ", Sequences::at(starts, n - 1));
}

inline Sequences checked(const Tensor& q, const Tensor& k, const Tensor& query_starts,
                         const Tensor& key_starts) {
  STD_TORCH_CHECK(query_starts.numel() == key_starts.numel(),
                  "attention_varlen: cu_seqlens_q and cu_seqlens_k must ", "name as many sequences, got ",
                  query_starts.numel(), " and ", key_starts.numel(), " offsets");
  check_starts("cu_seqlens_q", view_of(query_starts), q.size(0));
  check_starts("cu_seqlens_k", view_of(key_starts), k.size(0));
  return {query_starts.numel() - 1, view_of(query_starts), view_of(key_starts)};
}

}  // namespace opsmith
