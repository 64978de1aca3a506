// The product of the linear layer: x [M, K] times a weight [N, K], with an epilogue behind it.
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
#include "linear_pack.h"

namespace opsmith {

constexpr int64_t kSum = 64;  // units of K that one accumulator sums
constexpr int64_t kBlock = 384;  // units of K of a panel, at most, that the rows share while they are in cache
// For so few rows memory and arithmetic take as long: the block stays in the nearest cache, and is fetched close to its use.
constexpr int64_t kFewRows = 24, kShortBlock = 64;
constexpr int64_t kMostRows = 384;  // of x that share a block, and that have sums in cache
constexpr int64_t kScales = 48;  // of a column in a block, at most
constexpr int kStep = 8;  // units of K in a turn of the loop
constexpr int kFetchStep = 2;  // units of K from one group of prefetches to the next, which would wait for it
constexpr int64_t kLine = 64;  // bytes
constexpr int64_t kAgain = 8192;  // bytes between the two times that a line is asked for, should it be dropped

struct Couple {  // two bfloat16
  float bits;
};

// A unit takes `steps` steps: in each, a vector of the weight's columns meets a number of x, broadcast.

struct FloatFormat {
  using Unit = float;
  using X = float;
  static constexpr int steps = 1;
  template <class T, class Lanes>
  static Vec column(const T* p, int, Lanes lanes) {
    return load(p, lanes);
  }
  static Vec broadcast(const float* x) { return splat(*x); }
  static Vec mac(Vec x, Vec column, Vec sum) {
#if defined(OPSMITH_AVX2)  // in unrolled loops GCC would write over a factor in place of the sum, and move registers about
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(x), "x"(column));
#else
    sum = fma(x, column, sum);
#endif
    return sum;
  }
};

struct HalfFormat : FloatFormat {
  using Unit = float16;
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
  static Vec column(const Couple* p, int, Lanes lanes) {
    return load(&p->bits, lanes);
  }
  static Vec broadcast(const Couple* x) { return _mm512_set1_ps(x->bits); }
  static Vec mac(Vec x, Vec column, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)column);
  }
};
#else
using BFloatFormat = WideBFloatFormat;
#endif

template <class T>
using FormatOf = std::conditional_t<std::is_same_v<T, float>, FloatFormat,
                                    std::conditional_t<std::is_same_v<T, float16>, HalfFormat, BFloatFormat>>;

// A weight's block: `columns` by units of K. An accumulator sums `chain` units. One sum after the other is multiplied by `scale`,
// rows of as many columns, and x's own sums [row][x_groups] by `offset`, if there are any. Beside its use `step` bytes for
// kFetchStep units are asked for, `ahead` and as many `again` bytes before.
template <class Format>
struct Block {
  const typename Format::Unit* columns;
  int64_t chain = kSum;
  const float *scale = nullptr, *offset = nullptr, *x_sums = nullptr;
  int64_t x_groups = 0;
  const void* ahead = nullptr;
  int64_t again = 0, step = 0;
};

// What some rows of x make of a block.
template <class Format>
struct Tile : Block<Format> {
  const typename Format::X* x;
  int64_t x_stride;
  int64_t ldb;
  int64_t depth;  // in units
  float* sums;  // rows of kPanel
  bool first;  // else it is added to the sums
  bool once;  // whether no other tile reads the block
  int64_t lines;  // asked for at each kFetchStep
  int64_t unfetched;  // of those of a kFetchStep, by this tile and what follows it on the block

  void fetched() {
    this->ahead = static_cast<const char*>(this->ahead) + lines * kLine * (depth / kFetchStep);
    unfetched -= lines;
    lines = std::min(lines, unfetched);
  }
};

// sums [rows, width] of one block of K, rows <= ROWS, width <= kPanel; moves `t` along. Compiled apart, once for all epilogues.
template <class Format>
void multiply_block(int rows, int64_t width, Tile<Format>& t);

// How rows and groups of panels are shared out: as many rows at once as cache allows, so that the weight is read few
// times, but enough tasks for every thread, and no thread woken for less than it costs.
struct Split {
  int64_t row_blocks, groups, grain;
};

inline Split split_product(int64_t m, int64_t most_rows, int64_t groups, int64_t group, int64_t depth) {
  const int64_t threads = num_threads();
  int64_t blocks = ceil_div(m, most_rows);
  while (blocks * groups % threads != 0 && blocks * groups < 8 * threads &&
         ceil_div(m, blocks + 1) >= 2 * ROWS) {
    ++blocks;
  }
  const int64_t cost = depth * group * kPanel * (ceil_div(m, blocks) + 4);
  return {blocks, groups, row_grain(cost, 1 << 18)};
}

// A weight that was packed: a block of a panel is where it lies, and what follows it can be asked for ahead.
template <class Format>
struct PackedWeight {
  using Unit = typename Format::Unit;
  static constexpr bool plain = false;
  const Unit* units;
  int64_t depth;

  Block<Format> block(int64_t column, int64_t width, int64_t k, int64_t count, void*) const {
    const Unit *const from = units + column * depth + k * width, *const behind = from + count * width;
    return {.columns = from,
            .ahead = reinterpret_cast<const char*>(behind) + kAgain,
            .again = kAgain,
            .step = kFetchStep * width * int64_t(sizeof(Unit))};
  }
};

// A weight as it is: a block of a panel is packed into a cache when it is needed.
template <class T, class Format>
struct PlainWeight {
  using Unit = typename Format::Unit;
  static constexpr bool plain = true;
  View weight;

  Block<Format> block(int64_t column, int64_t width, int64_t k, int64_t depth, void* to) const {
    pack_block<T>(weight, column, width, k, depth, static_cast<PackedUnit<T>*>(to));
    return {static_cast<const Unit*>(to)};
  }
};

// The epilogue gets rows of x with all their columns of one group of panels, `epilogue(row, rows, column, width, sums,
// panel_step)`: column `column + c` of the r-th row is at sums[c / kPanel * panel_step + r * kPanel + c % kPanel]. Before
// they are summed it is told which it gets next, `epilogue.expect(row, rows, column, width)`.
template <class Format, class Weight, class Epilogue>
void product(const typename Format::X* x, int64_t x_stride, int64_t m, const Weight& weight, int64_t n,
             int64_t depth, int64_t group, const Epilogue& epilogue) {
  const int64_t most_rows = group == 1 ? kMostRows : kMostRows / 2, panel_step = most_rows * kPanel;
  const Split s = split_product(m, most_rows, ceil_div(n, group * kPanel), group, depth);
  const int64_t some = std::max(depth, kSum);
  // One tile has all rows and columns of a panel.
  const bool alone = m <= ROWS && PANEL == kPanel && !asks_always();
  const int64_t most = m > kFewRows || Weight::plain ? kBlock : alone ? some : kShortBlock;
  const int64_t length = round_up(ceil_div(some, ceil_div(some, most)), kSum);
  parallel_shares(s.row_blocks * s.groups, s.grain, [&](int64_t begin, int64_t end) {
    float* const sums = scratch(group * panel_step + (Weight::plain ? (kBlock + 2 * kScales) * kPanel : 0));
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
          const int64_t units = std::min(length, depth - k);
          const Block<Format> columns = weight.block(column, width, k, units, sums + group * panel_step);
          Tile<Format> t{columns};
          t.depth = units;
          t.ldb = width;
          t.x_stride = x_stride;
          t.first = k == 0;
          if ((t.once = alone)) t.ahead = reinterpret_cast<const char*>(columns.columns) + kOnce;
          t.unfetched = ceil_div(columns.step, kLine);  // by all tiles
          t.lines = ceil_div(t.unfetched, tiles * ceil_div(width, PANEL));
          for (int64_t i = 0; i < tiles; ++i) {
            const int64_t r = i * rows / tiles;
            const int count = int((i + 1) * rows / tiles - r);
            t.x = x + (row + r) * x_stride + k * Format::steps;
            t.columns = columns.columns;
            t.x_sums = columns.x_sums + (row + r) * t.x_groups;
            t.sums = panel_sums + r * kPanel;
            if (complete) epilogue.expect(row + r, count, first, last - first);
            multiply_block(count, width, t);
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

// x [M, K] times a weight of n columns and `depth` units of K, in groups of panels that the epilogue gets together.
template <class T, class Format, class Weight, class Epilogue>
void product(const View& x, const Weight& weight, int64_t n, int64_t depth, int64_t group,
             const Epilogue& epilogue) {
  using X = typename Format::X;
  constexpr bool paired = std::is_same_v<X, Couple>;
  const int64_t m = x.sizes[0], k = x.sizes[1];
  // Rows that are apart by a multiple of a page would push each other out of the nearest cache.
  const bool collide = m >= 4 && x.strides[0] * int64_t(sizeof(T)) % 2048 == 0;
  if constexpr (std::is_same_v<T, float> || paired) {
    if (!collide && k == depth * (paired ? 2 : Format::steps) && (!paired || x.strides[0] % 2 == 0)) {
      return product<Format>(x.as<X>(), x.strides[0] / (paired ? 2 : 1), m, weight, n, depth, group,
                             epilogue);
    }
  }
  const int64_t line = kLine / int64_t(sizeof(X)),
                columns = round_up(depth * Format::steps, line) + (collide ? line : 0);
  const Kept<0> wide(m * columns * int64_t(sizeof(X)));
  expand<T>(x, wide.as<X>(), columns);
  product<Format>(wide.as<X>(), columns, m, weight, n, depth, group, epilogue);
}

template <class T, class Format = FormatOf<T>, class Epilogue>
void packed_product(const View& x, const View& packed, int64_t group, const Epilogue& epilogue) {
  const int64_t depth = packed.sizes[2] / elements_per_unit(packed.dtype);
  const PackedWeight<Format> weight{packed.as<typename Format::Unit>(), depth};
  product<T, Format>(x, weight, packed.sizes[1], depth, group, epilogue);
}

template <class T, class Epilogue>
void plain_product(const View& x, const View& weight, const Epilogue& epilogue) {
  const int64_t depth = ceil_div(weight.sizes[1], elements_per_unit(weight.dtype));
  product<T, FormatOf<T>>(x, PlainWeight<T, FormatOf<T>>{weight}, weight.sizes[0], depth, 1, epilogue);
}

}  // namespace opsmith
