// The linear layer on quantized weights for rows of float32, where no instruction multiplies bytes and adds them up: four digits
// take twelve of them, and a float one. A chunk of a panel becomes float32 once, and all rows multiply it there.
#include "byte_dot.h"
#include "gemm_tile.h"
#include "packed_linear.h"
#include "schedules/shares.h"

namespace opsmith {
namespace {

constexpr int64_t kChunk = 256;  // of K of a panel, as floats in the second-level cache
constexpr int64_t kMostRows = 384;  // of x that share it

// x, and rows up to whole tiles. A row with a number that is not finite gives NaN wherever it is used.
std::unique_ptr<float[]> whole_tiles(View x) {
  const int64_t rows = x.sizes[0], k = x.sizes[1], padded = round_up(rows, ROWS);
  std::unique_ptr<float[]> to(new float[size_t(padded * k)]);
  std::fill(to.get() + rows * k, to.get() + padded * k, 0.0f);
  parallel_for(rows, row_grain(k, 16384), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* const from = x.as<float>() + r * x.strides[0];
      float* const row = to.get() + r * k;
      Vec odd{};
      for_lanes(k, [&](int64_t i, auto lanes) {
        const Vec v = keep(load(from + i, lanes), lanes, 0.0f);
        odd += v * 0.0f;
        store(row + i, v, lanes);
      });
      if (const float sum = reduce_add(odd); sum != 0) row[0] = sum;
    }
  });
  return to;
}

// [depth, width] of a panel from `k` on as floats: (number - middle) scale.
void dequantize(const PackedWeight& p, int64_t first, int64_t width, int64_t columns, int64_t k,
                int64_t depth, int64_t whole, float* to) {
  const bool nibbles = p.bits == 4;
  const uint8_t* const panel = p.weight.as<uint8_t>() + (first * whole + k * width) * p.bits / 8;
  for (int64_t c = 0; c < width; c += W) {
    const int64_t some = std::min<int64_t>(W, columns - c);
    auto of_columns = [&](auto* from) {
      return some >= W ? load(from + c) : some > 0 ? load(from + c, Part{int(some)}) : Vec{};
    };
    Vec scale = p.group ? Vec{} : of_columns(p.scale.as<float>() + first);
    Vec middle = splat(nibbles ? 8.0f : 128.0f);
    for (int64_t d = 0; d < depth; d += 4) {
      if (p.group && (k + d) % p.group == 0) {
        const int64_t g = (k + d) / p.group;
        scale = of_columns(p.scale.as<bfloat16>() + g * p.scale.strides[0] + first);
        if (p.zero.defined()) middle = of_columns(p.zero.as<int8_t>() + g * p.zero.strides[0] + first);
      }
      // A step of bytes is four of K, of nibbles eight: the low ones come first.
      const int64_t step = nibbles ? d / 8 : d / 4;
      const IVec word = load_words(panel + step * 4 * width + c * 4);
      for (int j = 0; j < 4 && d + j < depth; ++j) {
        const IVec number = nibbles ? (word >> (8 * j + d % 8)) & 15 : (word >> (8 * j)) & 255;
        store(to + (d + j) * width + c, (to_float(number) - middle) * scale);
      }
    }
  }
}

}  // namespace

void packed_linear_floats(View x, const PackedWeight& p, View bias, View y) {
  const int64_t m = x.sizes[0], k = x.sizes[1], n = y.sizes[1], whole = round_up(k, kDepth);
  const auto rows = whole_tiles(x);
  const int64_t panels = ceil_div(n, kColumns), tiles = ceil_div(m, ROWS), threads = num_threads();
  int64_t row_blocks = ceil_div(m, kMostRows);
  while (row_blocks * panels % threads != 0 && row_blocks * panels < 8 * threads &&
         tiles >= 2 * (row_blocks + 1)) {
    ++row_blocks;
  }
  const int64_t most = ceil_div(tiles, row_blocks) * ROWS;
  parallel_shares(row_blocks * panels, 1, [&](int64_t begin, int64_t end) {
    float* const sums = scratch(most * kColumns + kChunk * kColumns);
    float* const weight = sums + most * kColumns;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task % panels * kColumns, block = task / panels;
      const int64_t columns = std::min(kColumns, n - first), width = round_up(columns, kLeastPanel);
      const int64_t row = block * tiles / row_blocks * ROWS;
      const int64_t rows_end = std::min(m, (block + 1) * tiles / row_blocks * ROWS);
      std::fill(sums, sums + round_up(rows_end - row, ROWS) * kColumns, 0.0f);
      for (int64_t at = 0; at < k; at += kChunk) {
        const int64_t depth = std::min(kChunk, k - at);
        dequantize(p, first, width, columns, at, depth, whole, weight);
        for (int64_t r = row; r < rows_end; r += ROWS) {
          product<FloatUnits>(int(std::min<int64_t>(ROWS, rows_end - r)), width / W, depth,
                              {rows.get() + r * k + at, k, 1}, weight, width, PANEL,
                              sums + (r - row) * kColumns, kColumns, true);
        }
      }
      const float* const b = bias.as<float>();
      for (int64_t r = row; r < rows_end; ++r) {
        for_lanes(columns, [&](int64_t c, auto lanes) {
          const Vec v = load(sums + (r - row) * kColumns + c, lanes);
          store(y.as<float>() + r * y.strides[0] + first + c, b ? v + load(b + first + c, lanes) : v, lanes);
        });
      }
    }
  });
}

}  // namespace opsmith
