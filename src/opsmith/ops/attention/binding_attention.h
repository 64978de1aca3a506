// What the memory safety of attention needs, dense and packed.
#pragma once

#include "attention.h"
#include "binding.h"

namespace opsmith {

// [B, heads, L, D]; [tokens, heads, D], which is one batch of packed sequences; [B, heads, D] as [B, 1, heads, D]; or
// [B, heads, L, D] as [B, L, heads, D].
enum class Layout { dense, packed, one_token, tokens_first };

// A tensor as one of four dimensions, the last of which is contiguous.
struct Heads {
  int64_t sizes[4], strides[4];
  View view;

  Heads(const char* op, const Tensor& t, Layout layout, DType dtype) {
    static constexpr int64_t from[4][4] = {{0, 1, 2, 3}, {-1, 1, 0, 2}, {0, -1, 1, 2}, {0, 2, 1, 3}};
    const int64_t dims = layout == Layout::packed || layout == Layout::one_token ? 3 : 4;
    STD_TORCH_CHECK(t.dim() == dims && dtype_of(t) == dtype, op, ": tensors must have ", dims,
                    " dimensions and one dtype");
    for (int64_t d = 0; d < 4; ++d) {
      const int64_t at = from[int(layout)][d];
      sizes[d] = at < 0 ? 1 : t.size(at);
      strides[d] = at < 0 ? 0 : t.stride(at);
    }
    STD_TORCH_CHECK(sizes[3] < 2 || strides[3] == 1 || t.numel() == 0, op,
                    ": the last dimension must be contiguous");
    view = {t.data_ptr(), dtype, 4, sizes, strides};
  }
  Heads(const Heads&) = delete;

  bool like(const Heads& other, int64_t dims) const { return std::equal(sizes, sizes + dims, other.sizes); }
};

inline void check_groups(const char* op, int64_t heads, int64_t kv_heads) {
  STD_TORCH_CHECK(heads == 0 || (kv_heads > 0 && heads % kv_heads == 0), op, ": ", heads, " heads for ",
                  kv_heads, " of keys");
}

// A mask as [B, H, L, S], stride 0 where it is broadcast.
class Mask {
 public:
  Mask(const char* op, const Optional& mask, const Heads& q, const Heads& k)
      : sizes_{q.sizes[0], q.sizes[1], q.sizes[2], k.sizes[2]} {
    if (!mask) return;
    const DType dtype = dtype_of(*mask);
    const int64_t dims = mask->dim();
    bool fits = dims <= 4 && (dtype == DType::boolean || dtype == DType::f32 || dtype == q.view.dtype);
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

// The offsets of packed sequences. They are checked here too: a compiled graph has nobody else who would, and a wrong one
// would be a read out of bounds.
inline View starts_of(const char* name, const Tensor& t, int64_t length) {
  const char* const op = "attention_varlen: ";
  const View starts = view_of(t);
  const int64_t n = starts.dim == 1 ? starts.sizes[0] : 0;
  STD_TORCH_CHECK(n > 0 && is_id(starts.dtype), op, name,
                  " must be int32 or int64 and hold one number more than there are sequences");
  const auto at = [&](int64_t i) { return integer_at(starts, i * starts.strides[0]); };
  STD_TORCH_CHECK(at(0) == 0, op, name, " must start at 0, got ", at(0));
  for (int64_t i = 1; i < n; ++i) {
    STD_TORCH_CHECK(at(i - 1) <= at(i), op, name, " must not decrease, got ", at(i - 1), " before ", at(i));
  }
  STD_TORCH_CHECK(at(n - 1) == length, op, name, " must end at ", length, ", the tokens there are, got ",
                  at(n - 1));
  return starts;
}

// A number for each query head, or none.
inline View of_heads(const char* op, const char* name, const Optional& t, int64_t heads, DType dtype) {
  if (!t) return {};
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == heads && is_floating(dtype_of(*t)) &&
                      (dtype_of(*t) == DType::f32 || dtype_of(*t) == dtype),
                  op, ": ", name, " must be a number for each of ", heads, " heads, float32 or in q's dtype");
  return view_of(*t);
}

// The tensors of a call, which must outlive it.
struct Attended {
  const char* op;
  Layout layout;
  DType dtype;
  Heads q, k, v, out;
  std::optional<Heads> row_sums;
  Mask mask;
  View sinks, alibi;
  Sequences sequences;

  Attended(const char* name, const Tensor& q_, const Tensor& k_, const Tensor& v_, const Optional& mask_,
           const Optional& query_starts, const Optional& key_starts, const Optional& sinks_,
           const Optional& alibi_, const Tensor& out_, const Optional& row_sums_)
      : op(name), layout(query_starts ? Layout::packed : Layout::dense), dtype(dtype_of(q_)),
        q(op, q_, layout, dtype), k(op, k_, layout, dtype), v(op, v_, layout, dtype),
        out(op, out_, layout, dtype), mask(op, mask_, q, k),
        sinks(of_heads(op, "sinks", sinks_, q.sizes[1], dtype)),
        alibi(of_heads(op, "alibi", alibi_, q.sizes[1], dtype)) {
    STD_TORCH_CHECK(is_floating(dtype), op, ": q must be floating-point");
    STD_TORCH_CHECK(q.like(out, 3) && k.like(v, 3) && q.sizes[0] == k.sizes[0] && q.sizes[3] == k.sizes[3] &&
                        v.sizes[3] == out.sizes[3],
                    op, ": q, k, v and the output do not fit each other");
    check_groups(op, q.sizes[1], k.sizes[1]);
    if (row_sums_) {
      row_sums.emplace(op, *row_sums_, layout, DType::f32);
      STD_TORCH_CHECK(row_sums->like(out, 3) && row_sums->sizes[3] == 2, op, ": row_sums must be [..., 2]");
    }
    STD_TORCH_CHECK(bool(query_starts) == bool(key_starts) && !(query_starts && mask_), op,
                    ": cu_seqlens_q and cu_seqlens_k belong together, and to no mask");
    if (!query_starts) return;
    STD_TORCH_CHECK(query_starts->numel() == key_starts->numel(),
                    "attention_varlen: cu_seqlens_q and cu_seqlens_k must name as many sequences, got ",
                    query_starts->numel(), " and ", key_starts->numel(), " offsets");
    sequences = {starts_of("cu_seqlens_q", *query_starts, q.sizes[2]),
                 starts_of("cu_seqlens_k", *key_starts, k.sizes[2])};
  }

  AttentionCall call(double scale, bool causal, int64_t window, double softcap) const {
    return {q.view,    k.view,
            v.view,    mask.view(),
            sequences, {float(scale), causal, window, float(softcap), sinks, alibi},
            out.view,  row_sums ? row_sums->view : View{}};
  }
};

}  // namespace opsmith
