// What the bindings of MLA's operators check alike.
#pragma once

#include "binding.h"
#include "mla.h"

namespace opsmith {

using Optional = std::optional<Tensor>;

inline bool dense(const Tensor& t) { return t.dim() > 0 && (t.size(t.dim() - 1) < 2 || t.stride(t.dim() - 1) == 1); }

inline void check_vector(const char* name, const Optional& t, int64_t n) {
  if (!t) return;
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == n && dense(*t), "mla: ", name, " must be a contiguous vector of ", n);
}

inline void check_float_vector(const char* name, const Optional& t, int64_t n) {
  if (!t) return;
  check_vector(name, t, n);
  const DType dtype = dtype_of(*t);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "mla: ", name, " must be floating-point");
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
    const DType dtype = dtype_of(*t);
    STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "mla: cos and sin must be floating-point");
  }
}

inline float number(const char* name, const Optional& t) {
  STD_TORCH_CHECK(t && t->numel() == 1 && dtype_of(*t) == DType::f32, "mla: ", name, " must be one float32");
  return *static_cast<const float*>(t->data_ptr());
}

}  // namespace opsmith
