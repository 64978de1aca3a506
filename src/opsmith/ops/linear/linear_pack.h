// A block of a linear layer's weight as linear_product.h reads it: in W by W squares, transposed in registers.
#pragma once

#include <cstring>

#include "gemm_tile.h"
#include "linear.h"

namespace opsmith {

constexpr int64_t kPackAhead = 1024;  // bytes of a row from what is packed to what is fetched

template <class T>  // two bfloat16 travel as the bits of one float
using PackedUnit = std::conditional_t<std::is_same_v<T, bfloat16>, float, T>;

// W units of a row from unit `at` on, zeros past its k elements.
template <class T>
inline Vec units(const T* row, int64_t at, int64_t k) {
  const int64_t count = std::min<int64_t>(W, k - at);
  return count == W ? load(row + at) : load(row + at, Part{int(count)});
}
inline Vec units(const bfloat16* row, int64_t at, int64_t k) {
  Vec pairs = {};
  const int64_t rest = k - 2 * at;
  if (rest >= 2 * W) {
    std::memcpy(&pairs, row + 2 * at, sizeof(pairs));
  } else {
    std::memcpy(&pairs, row + 2 * at, size_t(2 * rest));
  }
  return pairs;
}

// Of `columns` rows of a weight [N, K] from `column` on, `depth` units of K from unit k on: unit by unit those of all of them.
template <class T>
void pack_block(const View& weight, int64_t column, int64_t columns, int64_t k, int64_t depth,
                PackedUnit<T>* to) {
  const int64_t stride = weight.strides[0], step = weight.strides[1];
  if (step != 1) {  // the columns of its transpose lie next to each other already
    for (int64_t d = 0; d < depth; ++d) {
      PackedUnit<T>* row = to + d * columns;
      if constexpr (std::is_same_v<T, bfloat16>) {
        const int64_t at = 2 * (k + d);
        const bfloat16* from = weight.as<bfloat16>() + column + at * step;
        for_lanes(columns, [&](int64_t j, auto lanes) {
          IVec pair = as_int(load(from + j, lanes)) >> 16 & 0xffff;
          if (at + 1 < weight.sizes[1]) pair |= as_int(load(from + step + j, lanes)) & int32_t(0xffff0000);
          store(row + j, as_float(pair), lanes);
        });
      } else {
        const T* from = weight.as<T>() + column + (k + d) * step;
        for_lanes(columns, [&](int64_t j, auto lanes) { store(row + j, load(from + j, lanes), lanes); });
      }
    }
    return;
  }
  constexpr int64_t per_unit = std::is_same_v<T, bfloat16> ? 2 : 1;
  const T* from = weight.as<T>() + column * stride;
  for (int64_t j = 0; j < columns; j += W) {
    const int64_t count = std::min<int64_t>(W, columns - j);
    for (int64_t d = 0; d < depth; d += W) {
      Vec v[W];
      for (int64_t i = 0; i < W; ++i) {
        const T* row = from + (j + i) * stride;
        prefetch_far(reinterpret_cast<const char*>(row + (k + d) * per_unit) + kPackAhead);
        v[i] = i < count ? units(row, k + d, weight.sizes[1]) : Vec{};
      }
      transpose(v);
      for (int64_t i = 0; i < std::min<int64_t>(W, depth - d); ++i) {
        PackedUnit<T>* p = to + (d + i) * columns + j;
        if (count == W) {
          store(p, v[i]);
        } else {
          store(p, v[i], Part{int(count)});
        }
      }
    }
  }
}

}  // namespace opsmith
