// The linear layer on quantized weights. Shapes and dtypes are the operator's contract (ops/packed_linear).
#pragma once

#include <cstdint>
#include <vector>

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

  // Nibbles are e2m1 floats, and scale is uint8 [groups, N]: 127 more than the exponent of a power of two.
  bool small_floats() const { return bits == 4 && scale.dtype == DType::i8 && !outer.defined(); }
  bool from_zero() const { return zero.defined() && !outer.defined(); }  // a whole number is taken off each
  bool from_least() const { return zero.defined() && outer.defined(); }
};

// Rows by a weight: x [M, K], y [M, N] in x's dtype or float32, any row stride; bias [N] in y's. y = x weight^T + bias.
struct PackedProduct {
  View x;
  QuantizedWeight weight;
  View bias, y;
};

// All of them in one parallel loop, their dtypes and formats the same; `dynamic` rounds each row of x to int8 first.
void packed_linear(std::vector<PackedProduct> products, bool dynamic);

}  // namespace opsmith
