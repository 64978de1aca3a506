// From torch's stable tensors to what kernels take. Only binding*.cpp may include this.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "types.h"

namespace opsmith {

using torch::stable::Tensor;

inline DType dtype_of(const Tensor& t) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Bool: return DType::boolean;
    case ScalarType::Int: return DType::i32;
    case ScalarType::Long: return DType::i64;
    default:
      STD_TORCH_CHECK(false, "opsmith: kernels take float32, bfloat16, float16, bool, int32 and int64, not ",
                      torch::headeronly::toString(t.scalar_type()), "; convert the tensor first");
  }
}

inline View view_of(const Tensor& t) {
  return View{t.data_ptr(), dtype_of(t), t.dim(), t.sizes().data(), t.strides().data()};
}

inline View view_of(const std::optional<Tensor>& t) { return t ? view_of(*t) : View{}; }

}  // namespace opsmith
