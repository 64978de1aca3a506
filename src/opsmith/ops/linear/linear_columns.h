// A weight whose columns are contiguous, by a few rows of x: bound by the weight's way from memory, which is read once.
//
// A step reads a few of its rows of K side by side, and asks for those that follow.
#pragma once

#include "linear_dots.h"

namespace opsmith {
namespace few {

constexpr int kDeep = 8;  // of K in a step
constexpr int64_t
    kStrip = 512;  // columns that meet all of K before the next do: their sums stay in the nearest cache

// Adds what N of K give M rows of x to their sums, which are kStrip apart.
template <int N, int M, class T>
inline void add_step(const T* weight, int64_t stride, const T* x, int64_t x_stride, int64_t width,
                     float* sums) {
  float factor[M][N];
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) factor[m][n] = to_float(x[m * x_stride + n]);
  }
  for_lanes(width, [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    Vec row[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      prefetch_far(weight + (N + n) * stride + i);
      row[n] = load(weight + n * stride + i, lanes);
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      Vec step = row[0] * factor[m][0];
#pragma GCC unroll 8
      for (int n = 1; n < N; ++n) step = fma(row[n], splat(factor[m][n]), step);
      store(sums + m * kStrip + i, load(sums + m * kStrip + i) + step);
    }
  });
}

template <int N, int M = kMost, class T>
void add_steps(int64_t rows, const T* weight, int64_t stride, const T* x, int64_t x_stride, int64_t width,
               float* sums) {
  if constexpr (M > 1) {
    if (rows < M) return add_steps<N, M - 1>(rows, weight, stride, x, x_stride, width, sums);
  }
  add_step<N, M>(weight, stride, x, x_stride, width, sums);
}

// All of them in one loop, to [count, n] each. A weight's rows of K are `stride` apart.
template <class T>
void products_by_columns(const Rows<T>* all, int64_t some, int64_t x_stride, int64_t stride, int64_t n,
                         int64_t k, int64_t grain) {
  const int64_t strips = (n + kStrip - 1) / kStrip;
  parallel_shares(some * strips, grain, [&](int64_t begin, int64_t end) {
    float sums[kMost * kStrip];
    for (int64_t task = begin; task < end; ++task) {
      const Rows<T>& one = all[task / strips];
      const int64_t column = task % strips * kStrip, width = std::min(kStrip, n - column);
      for (int64_t row = 0; row < one.count; row += kMost) {
        const int64_t rows = std::min<int64_t>(kMost, one.count - row);
        for (int64_t first = 0; first < k; first += kBlock) {
          const int64_t last = std::min(first + kBlock, k);
          std::fill_n(sums, kMost * kStrip, 0.0f);
          const auto add = [&](auto depth, int64_t i) {
            add_steps<depth()>(rows, one.weight + i * stride + column, stride, one.x + row * x_stride + i,
                               x_stride, width, sums);
          };
          int64_t i = first;
          for (; i + kDeep <= last; i += kDeep) add(std::integral_constant<int, kDeep>{}, i);
          for (; i < last; ++i) add(std::integral_constant<int, 1>{}, i);
          for (int64_t r = 0; r < rows; ++r) {
            float* const to = one.to + (row + r) * n + column;
            for_lanes(width, [&](int64_t c, auto lanes) {
              const Vec block = load(sums + r * kStrip + c);
              store(to + c, first ? load(to + c, lanes) + block : block, lanes);
            });
          }
        }
      }
    }
  });
}

}  // namespace few
}  // namespace opsmith
