// The linear layer on quantized weights. Shapes and dtypes are the operator's contract (ops/packed_linear).
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith {

constexpr int64_t kColumns = 32;  // of the packed weight that lie together: a panel
constexpr int64_t kLeastPanel = 16;  // columns of the last panel are a multiple of this
constexpr int64_t kDepth = 8;  // K is padded to a multiple of this

constexpr int64_t kSuper = 256;  // of K that share a number of `outer`

// weight [N up to kLeastPanel, K up to kDepth] as bytes, or half as many for bits = 4; scale [N] float, or with groups
// of K [groups, N] bfloat16 or float16 in rows of any stride, and their zeros int8 (the middle of the range without them).
// With `outer` [1 or 2, K / kSuper, N] float16, scale is int8 and multiplied by its first part; zero, if there is one, by the
// second, and the numbers begin there: bytes from -128, nibbles from 0.
struct QuantizedWeight {
  View weight, scale, zero, outer;
  int64_t bits;
  int64_t group;  // of K; 0 for one scale a column
  bool floats;  // bytes are e4m3 floats, and scale is float32 whether there are groups or not

  bool from_zero() const { return zero.defined() && !outer.defined(); }  // a whole number is taken off each
  bool from_least() const { return zero.defined() && outer.defined(); }
};

// x [M, K], y [M, N], any row stride; bias [N]. y = x weight^T + bias; `dynamic` rounds each row of x to int8 first.
void packed_linear(View x, const QuantizedWeight& weight, View bias, bool dynamic, View y);
// The same with the weight as float32, block by block: of rows of float32 where that is faster, and of all rows of x where the
// weight's numbers are floats.
void packed_linear_floats(View x, const QuantizedWeight& weight, View bias, View y);

}  // namespace opsmith
