// The linear layer on packed weights. Shapes and dtypes are the operator's contract (ops/linear.py).
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith {

constexpr int64_t kLinearPanel = 64;  // columns of the packed weight that lie together

enum class Activation { none, gelu, gelu_tanh, relu, silu };

// Elements of a weight that a unit of the packed form holds along K: bfloat16 are packed in pairs.
inline int64_t elements_per_unit(DType dtype) { return dtype == DType::bf16 ? 2 : 1; }

// weight [N, K], any row stride; packed [1, N, K rounded up to whole units], contiguous.
void linear_pack(View weight, View packed);

// The packed weight in x's dtype or bfloat16.
// x [M, K], residual and y [M, N], any row stride; bias [N]. y = activation(x weight^T + bias) + residual.
void linear_packed(View x, View packed, View bias, View residual, Activation activation, View y);

}  // namespace opsmith
