// Sums of rows of a matrix whose columns are contiguous, by a few rows of factors: it is read as it lies, once and in order.
//
// Some rows of a result, as wide as the nearest cache allows, are summed there together. A step adds up products with a few rows of the
// matrix in registers before it adds them to what is there, and asks for the next rows: rounding errors grow with the steps.
#pragma once

#include "linear_dots.h"

namespace opsmith {
namespace columns {

// Rows of a result: registers hold the factors of so many for each row of a step.
constexpr int kTogether = W == 16 ? 4 : 2;
constexpr int kStep = 4;  // rows of the matrix
constexpr int kLongStep = 8;  // the same for a result of one row
constexpr int64_t kWidth = 512;  // columns
constexpr int64_t kFactors = 256;  // of each row of a result that are taken at once

// The matrix that is multiplied by: element (i, s) is data[i * row + s * step].
template <class T>
struct Factors {
  const T* data;
  int64_t row, step;
};

// sums[r, :] (+)= sum over d of factors[d, r] * from[d, :]; at the end rounded into `to`, of which there are `count` rows.
template <int R, int D, class T, class To>
inline __attribute__((always_inline)) void step(const float* factors, const T* from, int64_t stride,
                                                int64_t width, float* sums, bool first, To* to,
                                                int64_t to_stride, int64_t count) {
  Vec by[D][R];
  for (int d = 0; d < D; ++d) {
    for (int r = 0; r < R; ++r) by[d][r] = splat(factors[d * kTogether + r]);
  }
  for_lanes(width, [&](int64_t at, auto lanes) __attribute__((always_inline)) {
    Vec row[D];
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) row[d] = load(from + d * stride + at, lanes);
    for (int r = 0; r < R; ++r) {
      Vec sum = row[0] * by[0][r];
      for (int d = 1; d < D; ++d) sum = fma(row[d], by[d][r], sum);
      if (!first) sum += load(sums + r * kWidth + at);
      if (!to) {
        store(sums + r * kWidth + at, sum);
      } else if (r < count) {
        store(to + r * to_stride + at, sum, lanes);
      }
    }
  });
}

// Up to kTogether rows `to`, of up to kWidth columns.
template <int R, int D, class T, class To, class F>
void sum_some(Factors<F> by, int64_t depth, const T* from, int64_t stride, int64_t width, To* to,
              int64_t to_stride, int64_t count) {
  alignas(64) float sums[R * kWidth];
  float factors[kFactors * kTogether];
  for (int64_t begin = 0; begin < depth; begin += kFactors) {
    const int64_t end = std::min(depth, begin + kFactors);
    for (int64_t s = begin; s < end; ++s) {
      for (int64_t r = 0; r < R; ++r) {
        factors[(s - begin) * kTogether + r] = r < count ? to_float(by.data[r * by.row + s * by.step]) : 0;
      }
    }
    for (int64_t s = begin; s < end;) {
      const auto take = [&]<int some>(std::integral_constant<int, some>) {
        step<R, some>(factors + (s - begin) * kTogether, from + s * stride, stride, width, sums, s == 0,
                      s + some == depth ? to : nullptr, to_stride, count);
        s += some;
      };
      if (end - s >= D) {
        take(std::integral_constant<int, D>{});
      } else if (end - s >= 2) {
        take(std::integral_constant<int, 2>{});
      } else {
        take(std::integral_constant<int, 1>{});
      }
    }
  }
}

// to[i, :] = sum over s of by(i, s) * from[s, :], for up to kTogether rows `to` of up to kWidth columns.
template <class T, class To, class F>
void sum_rows(Factors<F> by, int64_t depth, const T* from, int64_t stride, int64_t width, To* to,
              int64_t to_stride, int64_t count) {
  if (count == 1) {
    sum_some<1, kLongStep>(by, depth, from, stride, width, to, to_stride, count);
  } else {
    sum_some<kTogether, kStep>(by, depth, from, stride, width, to, to_stride, count);
  }
}

// Some rows by a weight of their own each, whose rows of K are `stride` apart, all in one loop: to [count, n].
template <class T>
void products(const few::Rows<T>* all, int64_t some, int64_t x_stride, int64_t stride, int64_t n, int64_t k,
              int64_t grain) {
  const int64_t panels = (n + kWidth - 1) / kWidth;
  parallel_shares(some * panels, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const few::Rows<T>& one = all[task / panels];
      const int64_t column = task % panels * kWidth, width = std::min(kWidth, n - column);
      for (int64_t row = 0; row < one.count; row += kTogether) {
        sum_rows(Factors<T>{one.x + row * x_stride, x_stride, 1}, k, one.weight + column, stride, width,
                 one.to + row * n + column, n, std::min<int64_t>(kTogether, one.count - row));
      }
    }
  });
}

}  // namespace columns
}  // namespace opsmith
