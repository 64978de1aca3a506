// The product of the linear layer: x [M, K] times a weight [N, K] that was packed once, with an epilogue behind it.
//
// Packed, the weight is made of panels of 64 columns of W^T (the last one has what is left), each panel K units deep
// and contiguous: `panel[k * columns + column]`. A unit is one float, one float16, or two bfloat16 that follow each
// other along K. So the packed tensor has the size of the weight, and is read in order from end to end.
//
// A float32 sum of thousands of products in one accumulator is less accurate than what PyTorch computes. Here an
// accumulator sums one block of K, and the sums of the blocks are added: the error grows with the sizes of a block
// and of the number of blocks instead of with their product.
#pragma once

#include "gemm_tile.h"
#include "kept.h"
#include "linear_epilogue.h"

namespace opsmith {

constexpr int64_t kSum = 64;        // units of K that one accumulator sums
constexpr int64_t kBlock = 384;     // units of K of a panel, at most, that the rows share while they are in cache
constexpr int64_t kMostRows = 384;  // of x that do so, and that have sums in cache
constexpr int kStep = 8;            // units of K between two groups of prefetches
constexpr int64_t kLine = 64;       // bytes

struct Couple {  // two bfloat16
  float bits;
};

// A unit takes `steps` steps: in each, a vector of the weight's columns meets a number of x, broadcast.

struct FloatFormat {
  using Unit = float;
  using X = float;
  static constexpr int steps = 1;
  template <class Lanes>
  static Vec column(const float* p, int, Lanes lanes) { return load(p, lanes); }
  static Vec broadcast(const float* x) { return splat(*x); }
  static Vec mac(Vec x, Vec column, Vec sum) { return fma(x, column, sum); }
};

struct HalfFormat : FloatFormat {
  using Unit = float16;
  template <class Lanes>
  static Vec column(const float16* p, int, Lanes lanes) { return load(p, lanes); }
};

struct WideBFloatFormat : FloatFormat {
  using Unit = Couple;
  static constexpr int steps = 2;
  template <class Lanes>
  static Vec column(const Couple* p, int step, Lanes lanes) {
    const IVec pair = as_int(load(&p->bits, lanes));
    return as_float(step == 0 ? pair << 16 : pair & int32_t(0xffff0000));
  }
};

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
struct BFloatFormat {
  using Unit = Couple;
  using X = Couple;
  static constexpr int steps = 1;
  template <class Lanes>
  static Vec column(const Couple* p, int, Lanes lanes) { return load(&p->bits, lanes); }
  static Vec broadcast(const Couple* x) { return _mm512_set1_ps(x->bits); }
  static Vec mac(Vec x, Vec column, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)column);
  }
};
#else
using BFloatFormat = WideBFloatFormat;
#endif

template <class T>
struct FormatOf;
template <>
struct FormatOf<float> { using type = FloatFormat; };
template <>
struct FormatOf<float16> { using type = HalfFormat; };
template <>
struct FormatOf<bfloat16> { using type = BFloatFormat; };

template <class Format>
struct Tile {
  const typename Format::X* x;
  int64_t x_stride;
  const typename Format::Unit* columns;
  int64_t ldb;
  int64_t depth;   // in units
  float* sums;     // rows of kPanel
  bool first;      // else it is added to the sums
  const char* ahead;  // what the cache will need next
  int64_t lines;      // of it, at each step
};

template <class Lanes>
inline Lanes lanes_of(int count) {
  if constexpr (std::is_same_v<Lanes, Part>) {
    return Part{count};
  } else {
    return Full{};
  }
}

// M rows by N vectors, the last of them `last` lanes wide.
template <class Format, int M, int N, class Lanes>
__attribute__((noinline)) void multiply(const Tile<Format>& t, int last) {
  // Few rows leave registers for several sums that alternate: they hide latency, and each is shorter.
  constexpr int spare = ROWS * VECS / (M * N), chains = spare >= 4 ? 4 : spare >= 2 ? 2 : 1;
  const typename Format::X* x[M];
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) x[r] = t.x + r * t.x_stride;
  const auto* columns = t.columns;
  const char* ahead = t.ahead;
  const auto lanes = lanes_of<Lanes>(last);
  Vec block[M][N];  // in memory, the nearest cache's
  for (int64_t k = 0; k < t.depth;) {
    const int64_t summed = k;
    Vec sum[chains][M][N];
#pragma GCC unroll 4
    for (int u = 0; u < chains; ++u) {
#pragma GCC unroll 8
      for (int r = 0; r < M; ++r) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sum[u][r][n] = Vec{};
      }
    }
    auto add_unit = [&](int i) __attribute__((always_inline)) {
      const int u = i % chains;
#pragma GCC unroll 2
      for (int step = 0; step < Format::steps; ++step) {
        Vec column[N];
#pragma GCC unroll 8
        for (int n = 0; n < N - 1; ++n) column[n] = Format::column(columns + n * W, step, Full{});
        column[N - 1] = Format::column(columns + (N - 1) * W, step, lanes);
#pragma GCC unroll 8
        for (int r = 0; r < M; ++r) {
          const Vec a = Format::broadcast(x[r] + (k + i) * Format::steps + step);
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) sum[u][r][n] = Format::mac(a, column[n], sum[u][r][n]);
        }
      }
      columns += t.ldb;
    };
    const int64_t until = std::min(k + kSum, t.depth);
    for (; k + kStep <= until; k += kStep) {
      for (const char* const stop = ahead + t.lines * kLine; ahead < stop; ahead += kLine) {
        __builtin_prefetch(ahead, 0, 2);  // not to the nearest cache, where it would push out what is in use
      }
#pragma GCC unroll 8
      for (int i = 0; i < kStep; ++i) add_unit(i);
    }
    for (; k < until; ++k) add_unit(0);
#pragma GCC unroll 8
    for (int r = 0; r < M; ++r) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        Vec total = sum[0][r][n];
        if constexpr (chains == 2) total += sum[1][r][n];
        if constexpr (chains == 4) total = (total + sum[1][r][n]) + (sum[2][r][n] + sum[3][r][n]);
        if (summed > 0) total += block[r][n];
        block[r][n] = total;
        if (k == t.depth) {
          float* p = t.sums + r * kPanel + n * W;
          store(p, t.first ? total : load(p) + total);
        }
      }
    }
  }
  if (t.depth == 0 && t.first) {
    for (int r = 0; r < M; ++r) std::fill(t.sums + r * kPanel, t.sums + r * kPanel + N * W, 0.0f);
  }
}

template <class Format, int N, class Lanes>
inline void multiply_rows(int rows, const Tile<Format>& t, int last) {
  switch (rows) {
    case 1: return multiply<Format, 1, N, Lanes>(t, last);
    case 2: return multiply<Format, 2, N, Lanes>(t, last);
    case 3: return multiply<Format, 3, N, Lanes>(t, last);
    case 4: return multiply<Format, 4, N, Lanes>(t, last);
    case 5: return multiply<Format, 5, N, Lanes>(t, last);
    default: return multiply<Format, ROWS, N, Lanes>(t, last);
  }
}

// sums [rows, width] of one block of K, rows <= ROWS, width <= kPanel.
template <class Format>
inline void multiply_block(int rows, int64_t width, Tile<Format> t) {
  for (; width >= PANEL; width -= PANEL, t.columns += PANEL, t.sums += PANEL) {
    multiply_rows<Format, VECS, Full>(rows, t, W);
    t.lines = 0;
  }
  const int last = int((width - 1) % W + 1);
  switch (ceil_div(width, W)) {
    case 0: return;
    case 1: return multiply_rows<Format, 1, Part>(rows, t, last);
    case 2: return multiply_rows<Format, 2, Part>(rows, t, last);
    case 3: return multiply_rows<Format, std::min(3, VECS), Part>(rows, t, last);
    default: return multiply_rows<Format, VECS, Part>(rows, t, last);
  }
}

// How rows and groups of panels are shared out: as many rows at once as cache allows, so that the weight is read few
// times, but enough tasks for every thread, and no thread woken for less than it costs.
struct Split {
  int64_t row_blocks, groups, grain;
};

inline Split split_product(int64_t m, int64_t most_rows, int64_t groups, int64_t group, int64_t depth) {
  const int64_t threads = num_threads();
  int64_t blocks = ceil_div(m, most_rows);
  while (blocks * groups % threads != 0 && blocks * groups < 8 * threads && ceil_div(m, blocks + 1) >= 2 * ROWS) {
    ++blocks;
  }
  const int64_t cost = depth * group * kPanel * (ceil_div(m, blocks) + 4);
  return {blocks, groups, std::max<int64_t>(1, (int64_t{1} << 18) / std::max<int64_t>(1, cost))};
}

// Tells an epilogue that wants to know which rows and columns it gets after the next tile.
template <class Epilogue>
auto expect(const Epilogue& e, int64_t row, int rows, int64_t column, int64_t width, int)
    -> decltype(e.expect(row, rows, column, width)) {
  e.expect(row, rows, column, width);
}
template <class Epilogue>
void expect(const Epilogue&, int64_t, int, int64_t, int64_t, long) {}

// The epilogue gets rows of x with all their columns of one group of panels, `epilogue(row, rows, column, width, sums,
// panel_step)`: column `column + c` of the r-th row is at sums[c / kPanel * panel_step + r * kPanel + c % kPanel].
template <class Format, class Epilogue>
void product(const typename Format::X* x, int64_t x_stride, int64_t m, const View& packed, int64_t n, int64_t depth,
             int64_t group, const Epilogue& epilogue) {
  const auto* weight = packed.as<typename Format::Unit>();
  const int64_t most_rows = group == 1 ? kMostRows : kMostRows / 2, panel_step = most_rows * kPanel;
  const Split s = split_product(m, most_rows, ceil_div(n, group * kPanel), group, depth);
  const int64_t some = std::max(depth, kSum), length = round_up(ceil_div(some, ceil_div(some, kBlock)), kSum);
  parallel_for(s.row_blocks * s.groups, s.grain, [&](int64_t begin, int64_t end) {
    float* const sums = scratch(group * panel_step);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t block = task / s.groups, first = task % s.groups * group * kPanel;
      const int64_t last = std::min(n, first + group * kPanel);
      const int64_t row = block * m / s.row_blocks, rows = (block + 1) * m / s.row_blocks - row;
      const int64_t tiles = ceil_div(rows, ROWS);
      for (int64_t column = first; column < last; column += kPanel) {
        const int64_t width = std::min(kPanel, n - column);
        float* const panel_sums = sums + (column - first) / kPanel * panel_step;
        for (int64_t k = 0; k == 0 || k < depth; k += length) {
          const bool complete = k + length >= depth && column + kPanel >= last;
          Tile<Format> t;
          t.depth = std::min(length, depth - k);
          t.columns = weight + column * depth + k * width;
          t.ldb = width;
          t.x_stride = x_stride;
          t.first = k == 0;
          t.ahead = reinterpret_cast<const char*>(t.columns + t.depth * width);  // the weight is read in order
          const int64_t step_bytes = kStep * width * int64_t(sizeof(*weight));
          const int64_t share = std::max<int64_t>(1, step_bytes / (kLine * tiles));
          for (int64_t i = 0; i < tiles; ++i) {
            const int64_t r = i * rows / tiles;
            const int count = int((i + 1) * rows / tiles - r);
            t.x = x + (row + r) * x_stride + k * Format::steps;
            t.sums = panel_sums + r * kPanel;
            // One tile leaves the processor time to fetch ahead by itself, and it does so better.
            t.lines = tiles > 1 && i * share * kLine < step_bytes ? share : 0;
            if (complete) expect(epilogue, row + r, count, first, last - first, 0);
            multiply_block(count, width, t);
            t.ahead += share * kLine * (t.depth / kStep);
            if (complete) epilogue(row + r, count, first, last - first, sums + r * kPanel, panel_step);
          }
        }
      }
    }
  });
}

// x as rows of `columns` numbers of the format, zeros past its own.
template <class T, class X>
void expand(const View& x, X* to, int64_t columns) {
  using Element = std::conditional_t<std::is_same_v<X, Couple>, T, float>;
  const int64_t k = x.sizes[1], width = columns * int64_t(sizeof(X) / sizeof(Element));
  parallel_for(x.sizes[0], row_grain(k, 8192), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* from = x.as<T>() + r * x.strides[0];
      Element* row = reinterpret_cast<Element*>(to + r * columns);
      for_lanes(k, [&](int64_t c, auto lanes) { store(row + c, load(from + c, lanes), lanes); });
      std::fill(row + k, row + width, Element{});
    }
  });
}

// x [M, K] times the packed weight, in groups of panels that the epilogue gets together.
template <class T, class Format = typename FormatOf<T>::type, class Epilogue>
void packed_product(const View& x, const View& packed, int64_t group, const Epilogue& epilogue) {
  using X = typename Format::X;
  constexpr bool paired = std::is_same_v<X, Couple>;
  const int64_t m = x.sizes[0], k = x.sizes[1], n = packed.sizes[1];
  const int64_t depth = packed.sizes[2] / elements_per_unit(packed.dtype);
  // Rows that are apart by a multiple of a page would push each other out of the nearest cache.
  const bool collide = m >= 4 && x.strides[0] * int64_t(sizeof(T)) % 2048 == 0;
  if constexpr (std::is_same_v<T, float> || paired) {
    if (!collide && k == depth * (paired ? 2 : Format::steps) && (!paired || x.strides[0] % 2 == 0)) {
      return product<Format>(x.as<X>(), x.strides[0] / (paired ? 2 : 1), m, packed, n, depth, group, epilogue);
    }
  }
  const int64_t line = kLine / int64_t(sizeof(X)), columns = round_up(depth * Format::steps, line) + (collide ? line : 0);
  const Kept<0> wide(m * columns * int64_t(sizeof(X)));
  expand<T>(x, wide.as<X>(), columns);
  product<Format>(wide.as<X>(), columns, m, packed, n, depth, group, epilogue);
}

}  // namespace opsmith
