// What the bindings of MLA's operators check alike.
#pragma once

#include "binding.h"
#include "mla.h"

namespace opsmith {

using Optional = std::optional<Tensor>;

inline bool dense(const Tensor& t) {
  return t.dim() > 0 && (t.size(t.dim() - 1) < 2 || t.stride(t.dim() - 1) == 1);
}

inline void check_float(const char* name, DType dtype) {
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "mla: ", name,
                  " must be floating-point");
}

inline void check_vector(const char* name, const Optional& t, int64_t n) {
  if (!t) return;
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == n && dense(*t), "mla: ", name,
                  " must be a contiguous vector of ", n);
}

inline void check_float_vector(const char* name, const Optional& t, int64_t n) {
  if (!t) return;
  check_vector(name, t, n);
  check_float(name, dtype_of(*t));
}

inline void check_dtype(const char* name, const Tensor& t, DType dtype) {
  STD_TORCH_CHECK(dtype_of(t) == dtype, "mla: ", name, " has another dtype than this form takes");
}

inline void check_table(const Optional& cos, const Optional& sin, int64_t tokens, int64_t rope) {
  STD_TORCH_CHECK(bool(cos) == bool(sin), "mla: cos and sin belong together");
  if (!cos) return;
  for (const Tensor* t : {&*cos, &*sin}) {
    STD_TORCH_CHECK(t->dim() == 2 && t->size(0) == tokens && (t->size(1) == rope || 2 * t->size(1) == rope) &&
                        t->size(1) == cos->size(1) && rope % 2 == 0 && dense(*t),
                    "mla: cos and sin must be [", tokens, ", ", rope, "] with a contiguous last dimension");
    check_float("cos and sin", dtype_of(*t));
  }
}

// The scales of int8 queries, one for each head.
inline void check_head_scales(const Optional& q_nope_scale, int64_t heads) {
  if (!q_nope_scale) return;
  check_vector("q_nope_scale", q_nope_scale, heads);
  check_dtype("q_nope_scale", *q_nope_scale, DType::f32);
}

// The finished queries: two tensors, or one whose rows hold both parts, as a joint cache has them.
class Queries {
 public:
  Queries(const char* op, const Tensor& q_out, const Optional& q_rope, const Optional& q_nope_scale,
          DType dtype, int64_t tokens, int64_t heads, int64_t kv_lora, int64_t rope)
      : sizes_{{tokens, heads, kv_lora}, {tokens, heads, rope}}, latent_(view_of(q_out)),
        rope_(q_rope ? view_of(*q_rope) : latent_) {
    check_dtype("q_out", q_out, q_nope_scale ? DType::i8 : dtype);
    STD_TORCH_CHECK(q_rope || !q_nope_scale, op, ": int8 queries and their rope part are two tensors");
    const auto fits = [&](const Tensor& t, int64_t width) {
      return t.dim() == 3 && t.size(0) == tokens && t.size(1) == heads && t.size(2) == width &&
             (width == 0 || dense(t));
    };
    if (q_rope) {
      check_dtype("q_rope", *q_rope, dtype);
      STD_TORCH_CHECK(fits(q_out, kv_lora) && fits(*q_rope, rope), op,
                      ": q_out must be [T, H, kv_lora] and q_rope [T, H, rope]");
    } else {
      STD_TORCH_CHECK(fits(q_out, kv_lora + rope), op,
                      ": q_out without q_rope must be [T, H, kv_lora + rope]");
      latent_.sizes = sizes_[0];
      rope_.sizes = sizes_[1];
      rope_.data = static_cast<char*>(rope_.data) + kv_lora * (dtype == DType::f32 ? 4 : 2);
    }
    check_head_scales(q_nope_scale, heads);
  }
  Queries(const Queries&) = delete;

  const View& latent() const { return latent_; }
  const View& rope() const { return rope_; }

 private:
  int64_t sizes_[2][3];
  View latent_, rope_;
};

}  // namespace opsmith
