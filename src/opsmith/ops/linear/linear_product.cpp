// The innermost part of the linear layer's product: tiles of sums in registers.
#include "linear_product.h"

namespace opsmith {
namespace {

// M rows by N vectors, the last of them `lanes` wide.
template <class Format, int M, int N, class Lanes>
__attribute__((noinline)) void multiply(const Tile<Format>& t, Lanes lanes) {
  // Few rows leave registers for several sums that alternate: they hide latency, and each is shorter.
  constexpr int spare = ROWS * VECS / (M * N), chains = spare >= 4 ? 4 : spare >= 2 ? 2 : 1;
  const typename Format::X* x[M];
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) x[r] = t.x + r * t.x_stride;
  const auto* columns = t.columns;
  const char* ahead = static_cast<const char*>(t.ahead);
  const float *scale = t.scale, *offset = t.offset, *x_sums = t.x_sums;
  const int64_t lines = t.lines;  // most tiles have none, and ask no more than that
  bool first = t.first;
  for (int64_t k = 0; k < t.depth;) {
    Vec sum[chains][M][N];
    for (int u = 0; u < chains; ++u) {
      for (int r = 0; r < M; ++r) {
        for (int n = 0; n < N; ++n) sum[u][r][n] = Vec{};
      }
    }
    auto add_unit = [&](int i, int u) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int step = 0; step < Format::steps; ++step) {
        Vec column[N];
        for (int n = 0; n < N - 1; ++n) column[n] = Format::column(columns + n * W, step, Full{});
        column[N - 1] = Format::column(columns + (N - 1) * W, step, lanes);
        for (int r = 0; r < M; ++r) {
          const Vec a = Format::broadcast(x[r] + (k + i) * Format::steps + step);
          for (int n = 0; n < N; ++n) sum[u][r][n] = Format::mac(a, column[n], sum[u][r][n]);
        }
      }
      columns += t.ldb;
    };
    auto fetch = [&]() __attribute__((always_inline)) {
      for (const char* const stop = ahead + lines * kLine; ahead < stop; ahead += kLine) {
        // In the nearest cache, what many rows need far later would push out what is in use.
        t.once ? prefetch_once(ahead) : prefetch_far(ahead);
        if (!t.once) prefetch_far(ahead - t.again);
      }
    };
    const int64_t until = std::min(k + t.chain, t.depth);
    for (; k + kStep <= until; k += kStep) {
      if constexpr (std::is_same_v<Lanes, Full>) {
#pragma GCC unroll 8
        for (int i = 0; i < kStep; ++i) {
          if (i % kFetchStep == 0 && lines) fetch();
          add_unit(i, i % chains);
        }
      } else {  // the last panel at most: not worth the time that compiling it unrolled for each width would take
#pragma GCC unroll 1
        for (int i = 0; i < kStep; i += chains) {
#pragma GCC unroll 4
          for (int u = 0; u < chains; ++u) {
            if ((i + u) % kFetchStep == 0) fetch();
            add_unit(i + u, u);
          }
        }
      }
    }
    for (; k < until; ++k) add_unit(0, 0);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec factor = scale ? load(scale + n * W) : splat(1.0f);
#pragma GCC unroll 8
      for (int r = 0; r < M; ++r) {
        Vec total = sum[0][r][n];
        if constexpr (chains == 2) total += sum[1][r][n];
        if constexpr (chains == 4) total = (total + sum[1][r][n]) + (sum[2][r][n] + sum[3][r][n]);
        float* const p = t.sums + r * kPanel + n * W;
        total = first ? total * factor : fma(total, factor, load(p));
        if (offset) total = fma(load(offset + n * W), splat(x_sums[r * t.x_groups]), total);
        store(p, total);
      }
    }
    if (scale) scale += t.ldb;
    if (offset) offset += t.ldb, ++x_sums;
    first = false;
  }
  if (t.depth == 0 && t.first) {
    for (int r = 0; r < M; ++r) std::fill(t.sums + r * kPanel, t.sums + r * kPanel + N * W, 0.0f);
  }
}

template <class Format, int M = ROWS>
inline void multiply_panel(int rows, const Tile<Format>& t) {
  if constexpr (M > 1) {
    if (rows < M) return multiply_panel<Format, M - 1>(rows, t);
  }
  multiply<Format, M, VECS>(t, Full{});
}

// The last panel, a narrow one. Rows that make no whole tile go in twos: to compile every number for every width takes too long.
template <class Format, int N>
void multiply_last(int rows, Tile<Format> t, Part last) {
  if (rows == ROWS) return multiply<Format, ROWS, N>(t, last);
  for (; rows >= 2; rows -= 2) {
    multiply<Format, 2, N>(t, last);
    t.x += 2 * t.x_stride;
    t.sums += 2 * kPanel;
    t.x_sums += 2 * t.x_groups;
    t.lines = 0;
  }
  if (rows == 1) multiply<Format, 1, N>(t, last);
}

}  // namespace

template <class Format>
void multiply_block(int rows, int64_t width, Tile<Format>& t) {
  for (; width >= PANEL; width -= PANEL, t.columns += PANEL, t.sums += PANEL) {
    multiply_panel(rows, t);
    t.fetched();
  }
  const Part last{int((width - 1) % W + 1)};
  switch (ceil_div(width, W)) {
    case 0: return;
    case 1: multiply_last<Format, 1>(rows, t, last); break;
    case 2: multiply_last<Format, 2>(rows, t, last); break;
    case 3: multiply_last<Format, std::min(3, VECS)>(rows, t, last); break;
    default: multiply_last<Format, VECS>(rows, t, last);
  }
  t.fetched();
}

template void multiply_block(int, int64_t, Tile<FloatFormat>&);
template void multiply_block(int, int64_t, Tile<HalfFormat>&);
template void multiply_block(int, int64_t, Tile<WideBFloatFormat>&);
#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
template void multiply_block(int, int64_t, Tile<BFloatFormat>&);
#endif

}  // namespace opsmith
