// Packs a linear layer's weight into the panels that linear.cpp reads; in W by W blocks, transposed in registers.
#include "gemm_tile.h"
#include "linear/linear.h"

namespace opsmith {
namespace {

template <class T>  // two bfloat16 travel as the bits of one float
using Unit = std::conditional_t<std::is_same_v<T, bfloat16>, float, T>;

// W units of a row from unit `at` on, zeros past its k elements.
template <class T>
inline Vec units(const T* row, int64_t at, int64_t k) {
  const int64_t count = std::min<int64_t>(W, k - at);
  return count == W ? load(row + at) : load(row + at, Part{int(count)});
}
inline Vec units(const bfloat16* row, int64_t at, int64_t k) {
  Vec pairs = {};
  std::memcpy(&pairs, row + 2 * at, size_t(2 * std::min<int64_t>(2 * W, k - 2 * at)));
  return pairs;
}

template <class T>
void pack_panel(const T* from, int64_t stride, int64_t columns, int64_t k, int64_t depth, Unit<T>* to) {
  for (int64_t j = 0; j < columns; j += W) {
    const int64_t count = std::min<int64_t>(W, columns - j);
    for (int64_t d = 0; d < depth; d += W) {
      Vec v[W];
      for (int64_t i = 0; i < W; ++i) v[i] = i < count ? units(from + (j + i) * stride, d, k) : Vec{};
      transpose(v);
      for (int64_t i = 0; i < std::min<int64_t>(W, depth - d); ++i) {
        Unit<T>* p = to + (d + i) * columns + j;
        if (count == W) {
          store(p, v[i]);
        } else {
          store(p, v[i], Part{int(count)});
        }
      }
    }
  }
}

// The same where the columns of the weight's transpose lie next to each other.
void copy_panel(const float* from, int64_t stride, int64_t columns, int64_t depth, float* to) {
  for (int64_t d = 0; d < depth; ++d) {
    for_lanes(columns, [&](int64_t j, auto lanes) {
      store(to + d * columns + j, load(from + d * stride + j, lanes), lanes);
    });
  }
}

}  // namespace

void linear_pack(View weight, View packed) {
  const int64_t n = weight.sizes[0], k = weight.sizes[1];
  const int64_t depth = packed.sizes[2] / elements_per_unit(weight.dtype);
  with_float_type(weight.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(
        ceil_div(n, kLinearPanel), row_grain(kLinearPanel * k, 16384), [&](int64_t begin, int64_t end) {
          for (int64_t column = begin * kLinearPanel; column < std::min(n, end * kLinearPanel);
               column += kLinearPanel) {
            if constexpr (std::is_same_v<T, float>) {
              if (weight.strides[1] != 1) {
                copy_panel(weight.as<float>() + column, weight.strides[1], std::min(kLinearPanel, n - column),
                           k, packed.as<float>() + column * depth);
                continue;
              }
            }
            pack_panel(weight.as<T>() + column * weight.strides[0], weight.strides[0],
                       std::min(kLinearPanel, n - column), k, depth, packed.as<Unit<T>>() + column * depth);
          }
        });
  });
}

}  // namespace opsmith
