// The linear layer on packed weights. Shapes and dtypes are the operator's contract (ops/linear).
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith {

constexpr int64_t kLinearPanel = 64;  // columns of the packed weight that lie together

enum class Activation { none, gelu, gelu_tanh, relu, silu };

// Elements of a weight that a unit of the packed form holds along K: bfloat16 are packed in pairs.
inline int64_t elements_per_unit(DType dtype) { return dtype == DType::bf16 ? 2 : 1; }

// weight [N, K], one of its strides 1; packed [1, N, K rounded up to whole units], contiguous.
void linear_pack(View weight, View packed);

// The packed weight in x's dtype or bfloat16.
// x [M, K], residual and y [M, N], any row stride; bias [N]. y = activation(x weight^T + bias) + residual.
void linear_packed(View x, View packed, View bias, View residual, Activation activation, View y);

// The same for a few rows of x and a weight [N, K] in x's dtype, any row stride.
void linear_rows(View x, View weight, View bias, View residual, Activation activation, View y);

// Its gradients, those that are defined: dy [M, N], x [M, K], weight [N, K], all in one dtype, any row stride; dbias [N].
void linear_rows_backward(View dy, View x, View weight, View dx, View dweight, View dbias);

// The same for a weight [N, K] as it is, in x's dtype, one of its strides 1. `before`, undefined or with y's strides, gets what
// the activation is given.
void linear_unpacked(View x, View weight, View bias, View residual, Activation activation, View y,
                     View before);

// float32. dy [M, N], x [M, K], dweight [N, K], any row stride; dbias [N] or undefined; no size is 0.
// dweight = dy^T x, summed in shorter chains where `shortly`; dbias = the sum of dy's rows.
void linear_gradient(const View& dy, const View& x, bool shortly, const View& dweight, const View& dbias);

}  // namespace opsmith
