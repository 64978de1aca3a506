// The gradient of a linear layer's weight, dy^T x, and of its bias: a product that sums over the rows, of which a model
// has many, and in which neither matrix needs to be transposed.
//
// A block of the result stays in the second-level cache. Piece by piece of kDepth rows, x is copied into panels of
// PANEL columns, one of which fits the nearest cache, and dy into strips of ROWS columns; each tile of the result takes
// the piece's sum from registers. So an accumulator sums kDepth products, and those sums are added. It sums fewer
// where that is asked for: of rows that are left of many, most of them zero, a library makes as many pieces as of all.
#include "gemm_tile.h"
#include "linear/linear.h"

namespace opsmith {
namespace {

constexpr int64_t kDepth = 128, kShort = 32;
constexpr int64_t kMostColumns = 256;  // of x, and
constexpr int64_t kMostRows = 384;  // of the result in a block
constexpr int64_t kLane = 8;  // a strip's columns with what pads them, so that copying moves whole vectors
constexpr int64_t kStrip = kDepth * kLane + 16;  // strips a power of two apart would share cache sets

struct Gradient {
  const View &dy, &x, &dweight, &dbias;
  int64_t m, n, k, chain;
  int64_t row_blocks, column_blocks, rows, columns;  // rows and columns of the largest block

  Gradient(const View& dy, const View& x, bool shortly, const View& dweight, const View& dbias)
      : dy(dy), x(x), dweight(dweight), dbias(dbias), m(dy.sizes[0]), n(dy.sizes[1]), k(x.sizes[1]),
        chain(shortly ? kShort : kDepth) {
    const int64_t threads = num_threads();
    column_blocks = ceil_div(k, kMostColumns);
    row_blocks = ceil_div(n, kMostRows);
    while (row_blocks * column_blocks % threads != 0 && row_blocks * column_blocks < 8 * threads &&
           ceil_div(n, row_blocks + 1) >= 4 * ROWS) {
      ++row_blocks;
    }
    columns = round_up(ceil_div(k, column_blocks), PANEL);
    column_blocks = ceil_div(k, columns);
    rows = round_up(ceil_div(n, row_blocks), ROWS);
    row_blocks = ceil_div(n, rows);
  }

  void run() const {
    parallel_for(row_blocks * column_blocks, row_grain(m * rows * columns, 1 << 18),
                 [&](int64_t begin, int64_t end) {
                   float* const memory = scratch(columns * kDepth + rows / ROWS * kStrip + ROWS * PANEL);
                   for (int64_t task = begin; task < end; ++task) {
                     block(task / column_blocks * rows, task % column_blocks * columns, memory);
                   }
                 });
  }

  void block(int64_t row, int64_t column, float* memory) const {
    float* const panels = memory;
    float* const strips = panels + columns * kDepth;
    float* const tile = strips + rows / ROWS * kStrip;
    const int64_t height = std::min(rows, n - row), width = std::min(columns, k - column);
    for (int64_t first = 0; first < m; first += kDepth) {
      const int64_t depth = std::min(kDepth, m - first);
      pack_columns(first, depth, column, width, panels);
      pack_strips(first, depth, row, height, strips);
      if (dbias.defined() && column == 0) add_up(first, depth, row, height);
      const int64_t next = first + depth, more = std::min(kDepth, m - next);
      const int64_t tiles = ceil_div(width, PANEL) * ceil_div(height, ROWS);
      int64_t tile_number = 0, fetched = 0;
      for (int64_t c = 0; c < width; c += PANEL) {
        for (int64_t r = 0; r < height; r += ROWS) {
          // Rows begin on pages of their own, where the processor fetches nothing ahead by itself.
          for (++tile_number; fetched * tiles < more * tile_number; ++fetched) {
            fetch(dy.as<float>() + (next + fetched) * dy.strides[0] + row, height);
            fetch(x.as<float>() + (next + fetched) * x.strides[0] + column, width);
          }
          float* const to = dweight.as<float>() + (row + r) * dweight.strides[0] + column + c;
          const int64_t some = std::min<int64_t>(ROWS, height - r),
                        lanes = std::min<int64_t>(PANEL, width - c);
          const Operand a{strips + r / ROWS * kStrip, 1, kLane};
          const float* const b = panels + c * kDepth;
          if (some == ROWS && lanes == PANEL) {
            for (int64_t i = 0; i < ROWS; ++i) {
              for (int64_t at = 0; at < PANEL; at += 16) prefetch(to + i * dweight.strides[0] + at);
            }
            multiply(depth, a, b, to, dweight.strides[0], first > 0);
            continue;
          }
          multiply(depth, a, b, tile, PANEL, false);
          for (int64_t i = 0; i < some; ++i) {
            float* const p = to + i * dweight.strides[0];
            for_lanes(lanes, [&](int64_t at, auto part) {
              const Vec sum = load(tile + i * PANEL + at);
              store(p + at, first > 0 ? load(p + at, part) + sum : sum, part);
            });
          }
        }
      }
    }
  }

  void multiply(int64_t depth, Operand a, const float* b, float* to, int64_t stride, bool add) const {
    for (int64_t i = 0; i < depth; i += chain, a.data += chain * kLane, b += chain * PANEL, add = true) {
      product_in_registers<FloatUnits, ROWS, VECS>(std::min(chain, depth - i), a, b, PANEL, to, stride, add);
    }
  }

  static void fetch(const float* p, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) prefetch_far(p + i);
  }

  void pack_columns(int64_t first, int64_t depth, int64_t column, int64_t width, float* panels) const {
    for (int64_t i = 0; i < depth; ++i) {
      const float* const from = x.as<float>() + (first + i) * x.strides[0] + column;
      for (int64_t c = 0; c < width; c += PANEL) {
        float* const to = panels + c * kDepth + i * PANEL;
        const int64_t lanes = std::min<int64_t>(PANEL, width - c);
        for_lanes(lanes, [&](int64_t at, auto part) { store(to + at, load(from + c + at, part)); });
        const int64_t written = round_up(lanes, W);
        set_lanes(to + written, 0, PANEL - written);
      }
    }
  }

  void pack_strips(int64_t first, int64_t depth, int64_t row, int64_t height, float* strips) const {
    for (int64_t i = 0; i < depth; ++i) {
      const float* const from = dy.as<float>() + (first + i) * dy.strides[0] + row;
      float* to = strips + i * kLane;
      int64_t r = 0;
      for (; r + kLane <= height; r += ROWS, to += kStrip) std::memcpy(to, from + r, kLane * sizeof(float));
      for (; r < height; r += ROWS, to += kStrip) {
        for (int64_t j = 0; j < kLane; ++j) to[j] = r + j < height ? from[r + j] : 0;
      }
    }
  }

  // The bias's gradient: sums of 8 rows are added to the piece's, and that to those before it.
  void add_up(int64_t first, int64_t depth, int64_t row, int64_t height) const {
    const int64_t stride = dy.strides[0];
    const float* const from = dy.as<float>() + first * stride + row;
    float* const to = dbias.as<float>() + row;
    for_lanes(height, [&](int64_t at, auto lanes) {
      Vec sum{};
      for (int64_t i = 0; i < depth; i += 8) {
        Vec few = load(from + i * stride + at, lanes);
        for (int64_t j = i + 1; j < std::min(i + 8, depth); ++j) few += load(from + j * stride + at, lanes);
        sum += few;
      }
      store(to + at, first > 0 ? load(to + at, lanes) + sum : sum, lanes);
    });
  }
};

}  // namespace

void linear_gradient(const View& dy, const View& x, bool shortly, const View& dweight, const View& dbias) {
  Gradient(dy, x, shortly, dweight, dbias).run();
}

}  // namespace opsmith
