// The gradients of the linear layer for a few rows, or many and a small weight: dx = dy weight, dweight = dy^T x and dbias = 1^T dy.
// Each is sums of rows of its second matrix, which are read as they are, in order.
//
// Some rows of a result, as wide as the nearest cache allows, are summed there together. A step adds up products with a few rows of the
// second matrix in registers before it adds them to what is there: rounding errors grow with the number of steps.
#include "linear/linear.h"
#include "rows.h"
#include "schedules/shares.h"

namespace opsmith {
namespace {

// Rows of a result: registers hold the factors of so many for each row of a step.
constexpr int kTogether = W == 16 ? 4 : 2;
constexpr int kStep = 4;  // rows of the second matrix
constexpr int kLongStep = 8;  // the same for a result of one row
constexpr int64_t kWidth = 512;  // columns
constexpr int64_t kFactors = 256;  // of each row of a result that are taken at once
constexpr int64_t kWork = 1 << 16;  // products that are worth a thread

// The matrix that is multiplied by: element (i, s) is data[i * row + s * step].
template <class T>
struct Factors {
  const T* data;
  int64_t row, step;
};

// sums[r, :] (+)= sum over d of factors[d, r] * from[d, :]; at the end rounded into `to`, of which there are `count` rows.
template <int R, int D, class T>
inline __attribute__((always_inline)) void step(const float* factors, const T* from, int64_t stride,
                                                int64_t width, float* sums, bool first, T* to,
                                                int64_t to_stride, int64_t count) {
  Vec by[D][R];
  for (int d = 0; d < D; ++d) {
    for (int r = 0; r < R; ++r) by[d][r] = splat(factors[d * kTogether + r]);
  }
  for_lanes(width, [&](int64_t at, auto lanes) __attribute__((always_inline)) {
    Vec row[D];
#pragma GCC unroll 8
    for (int d = 0; d < D; ++d) row[d] = load(from + d * stride + at, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      Vec sum = row[0] * by[0][r];
#pragma GCC unroll 8
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
template <int R, int D, class T, class F>
void sum_rows(Factors<F> by, int64_t depth, const T* from, int64_t stride, int64_t width, T* to,
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
      const auto take = [&](auto rows) {
        constexpr int some = decltype(rows)::value;
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

// to[i, :] = sum over s of by(i, s) * from[s, :], for `count` rows and `depth` of `from`.
template <class T, class F>
void product(Factors<F> by, int64_t count, int64_t depth, const T* from, int64_t stride, int64_t columns,
             T* to, int64_t to_stride) {
  if (depth == 0) {
    for (int64_t i = 0; i < count; ++i) std::fill_n(to + i * to_stride, columns, T{});
    return;
  }
  const int64_t blocks = (count + kTogether - 1) / kTogether, panels = (columns + kWidth - 1) / kWidth;
  const int64_t work = std::min<int64_t>(count, kTogether) * depth * std::min(columns, kWidth);
  const int64_t grain = std::max<int64_t>(1, kWork / std::max<int64_t>(1, work));
  parallel_shares(panels * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task % blocks * kTogether, column = task / blocks * kWidth;
      const int64_t some = std::min<int64_t>(kTogether, count - row),
                    width = std::min(kWidth, columns - column);
      const Factors<F> of{by.data + row * by.row, by.row, by.step};
      T* const at = to + row * to_stride + column;
      if (some == 1) {
        sum_rows<1, kLongStep>(of, depth, from + column, stride, width, at, to_stride, some);
      } else {
        sum_rows<kTogether, kStep>(of, depth, from + column, stride, width, at, to_stride, some);
      }
    }
  });
}

}  // namespace

void linear_rows_backward(View dy, View x, View weight, View dx, View dweight, View dbias) {
  const int64_t m = dy.sizes[0], n = dy.sizes[1];
  with_float_type(dy.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const T* const from = dy.as<T>();
    const int64_t stride = dy.strides[0];
    if (dx.defined()) {
      product<T>(Factors<T>{from, stride, 1}, m, n, weight.as<T>(), weight.strides[0], weight.sizes[1],
                 dx.as<T>(), dx.strides[0]);
    }
    if (dweight.defined()) {
      product<T>(Factors<T>{from, 1, stride}, n, m, x.as<T>(), x.strides[0], x.sizes[1], dweight.as<T>(),
                 dweight.strides[0]);
    }
    if (dbias.defined()) {
      const float one = 1;
      product<T>(Factors<float>{&one, 0, 0}, 1, m, from, stride, n, dbias.as<T>(), n);
    }
  });
}

}  // namespace opsmith
