// Rows of a weight as it is by a few rows of x: bound by the weight's way from memory, which is read once and in order.
//
// A sum is a vector of partial sums over K, added up at its end. One or two rows of x, where the nearest cache has room for them,
// meet one row of the weight after the other, as memory gives most without being asked; for more, a step takes a vector of K of a few
// rows, so that what it loads of x serves all of them, and asks for what follows these rows, in its order. With AVX2 a step's rows lie
// apart where its arithmetic is little: AMD's processors without AVX-512 get most of several streams that nobody asks for.
#pragma once

#include "gemm_tile.h"
#include "linear.h"
#include "schedules/shares.h"

namespace opsmith {
namespace few {

constexpr int kTogether = W == 16 ? 4 : 2;  // rows of the weight
constexpr int kSums = W == 16 ? 16 : 8;  // in registers
constexpr int64_t kNearest = 16384;  // bytes of x that stay in the nearest cache
constexpr int kMost = 4;  // rows of x; of more, the others find the panel in a cache, if it is small
constexpr int64_t kAhead = 2048;  // bytes behind a step's rows from which it asks for others
constexpr int64_t kBlock = 32 * W;  // of K that one accumulator sums, as rounding errors grow with that

// Whether memory is asked for a panel, and whether other rows of x will read it again.
enum class Asked { no, once, again };

// Sums of N rows of the weight by M of x.
template <int N, int M, Asked asked, class T>
inline __attribute__((always_inline)) void dots(const T* weight, int64_t stride, const T* x, int64_t x_stride,
                                                int64_t k, float* sums) {
  using Units = UnitsOf<T>;
  constexpr int64_t step = W * Units::per_unit, line = 64 / int64_t(sizeof(T));
  constexpr int U = std::clamp(kSums / (N * M), 1, 4);  // vectors of K, whose sums alternate
  const T* soon = weight + N * stride + kAhead / int64_t(sizeof(T));
  Vec total[M][N] = {};
  for (int64_t begin = 0; begin < k; begin += kBlock) {
    Vec sum[U][M][N] = {};
    const int64_t end = std::min(begin + kBlock, k);
    const auto add = [&](int64_t i, int64_t count, Vec(&to)[M][N]) __attribute__((always_inline)) {
      Vec row[M];
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) row[m] = load_units<Units>(x + m * x_stride + i, 0, count);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        if (n * step % line == 0) {
          if constexpr (asked == Asked::once) prefetch_once(soon + n * step);
          if constexpr (asked == Asked::again) prefetch_far(soon + n * step);
        }
        const Vec w = load_units<Units>(weight + n * stride + i, 0, count);
#pragma GCC unroll 4
        for (int m = 0; m < M; ++m) to[m][n] = Units::mac(row[m], w, to[m][n]);
      }
      soon += N * step;
    };
    int64_t i = begin;
    for (; i + U * step <= end; i += U * step) {
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) add(i + u * step, step, sum[u]);
    }
    for (; i < end; i += step) add(i, std::min(step, end - i), sum[0]);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) total[m][n] += sum[u][m][n];
      }
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) store_totals(total[m], sums + m * kLinearPanel);
}

template <int M = kMost, class T>
void panel(int64_t rows, const T* weight, int64_t stride, int64_t columns, const T* x, int64_t x_stride,
           int64_t k, Asked asked, float* sums) {
  if constexpr (M > 1) {
    if (rows < M) return panel<M - 1>(rows, weight, stride, columns, x, x_stride, k, asked, sums);
  }
  int64_t n = 0;
  const auto by = [&](auto together, auto how) {
    constexpr int N = together();
    for (; n + N <= columns; n += N, weight += N * stride)
      dots<N, M, how()>(weight, stride, x, x_stride, k, sums + n);
  };
  constexpr std::integral_constant<int, kTogether> some;
  constexpr std::integral_constant<Asked, Asked::no> no;
  if constexpr (W == 8 && M * 4 / int(sizeof(T)) <= 4) {
    constexpr int N = M <= 2 ? 4 : 2;
    const int64_t apart = columns / N;
    float found[M * kLinearPanel];
    for (; n < apart; ++n, weight += stride) {
      dots<N, M, no()>(weight, apart * stride, x, x_stride, k, found);
      for (int i = 0; i < M * N; ++i)
        sums[i / N * kLinearPanel + i % N * apart + n] = found[i / N * kLinearPanel + i % N];
    }
    n *= N, weight += (N - 1) * apart * stride;
  } else {
    if (asked == Asked::no || (M <= 2 && M * k * int64_t(sizeof(T)) > kNearest)) by(some, no);
    if constexpr (M > 2) {
      if (asked == Asked::once) by(some, std::integral_constant<Asked, Asked::once>{});
      if (asked == Asked::again) by(some, std::integral_constant<Asked, Asked::again>{});
    }
  }
  by(std::integral_constant<int, 1>{}, no);
}

// Some rows by a weight [n, k] of their own, `stride` apart.
template <class T>
struct Rows {
  const T *x, *weight;
  int64_t count;
  float* to;  // for whoever takes the sums
};

// All of them in one loop: behind(one, row, rows, column, width, sums) gets a panel of columns at a time.
template <class T, class F>
void products(const Rows<T>* all, int64_t some, int64_t x_stride, int64_t stride, int64_t n, int64_t k,
              int64_t grain, const F& behind) {
  const int64_t panels = (n + kLinearPanel - 1) / kLinearPanel;
  parallel_shares(some * panels, grain, [&](int64_t begin, int64_t end) {
    float sums[kMost * kLinearPanel];
    for (int64_t task = begin; task < end; ++task) {
      const Rows<T>& one = all[task / panels];
      const int64_t column = task % panels * kLinearPanel, width = std::min(kLinearPanel, n - column);
      for (int64_t row = 0; row < one.count; row += kMost) {
        const int64_t rows = std::min<int64_t>(kMost, one.count - row);
        const Asked first = one.count <= kMost ? Asked::once : Asked::again;
        panel(rows, one.weight + column * stride, stride, width, one.x + row * x_stride, x_stride, k,
              row > 0 ? Asked::no : first, sums);
        behind(one, row, int(rows), column, width, sums);
      }
    }
  });
}

}  // namespace few
}  // namespace opsmith
