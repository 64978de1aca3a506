// Rows of x as whole numbers with a factor for each block of a row, their digits int8: what byte_dot.h multiplies.
//
// Two digits hold 15 bits and a sign, four hold 31: more than a bfloat16 or a float has. The factors are powers of two, so
// numbers down to a 128th of the largest of their block keep every bit, and smaller ones lose less than 2^-15 or 2^-31 of
// the largest. One digit is the operator's own rounding (dynamic quantization): a factor for the whole row, the largest
// number at 127.
#pragma once

#include <cmath>

#include "byte_dot.h"
#include "nearest.h"
#include "rows.h"

namespace opsmith {

constexpr float kLeast = 1e-30f;  // a row of smaller numbers is rounded to zeros, as its inverse may be no float

// Rows are taken in tiles, as nearly equal as can be. The digits of a tile lie in the order in which they are used, four
// numbers of a row at a time: rows that are apart by a power of two would push each other out of the cache.
struct FixedPoint {
  int64_t rows, blocks, depth;  // depth: of a row, padded to whole steps
  int64_t block;                // numbers of a row that share a factor
  int64_t tiles;
  std::unique_ptr<int8_t[]> digits;  // [tile][depth / 4][row of the tile][D][4]
  std::unique_ptr<float[]> factor;   // [rows][blocks]
  std::unique_ptr<int32_t[]> sum;    // [rows][blocks][D], of each digit over a block

  FixedPoint(int64_t rows, int64_t k, int64_t depth, int64_t block, int D, int tile_rows)
      : rows(rows), blocks((k + block - 1) / block), depth(depth), block(block), tiles((rows + tile_rows - 1) / tile_rows) {
    digits.reset(new int8_t[size_t(rows * depth * D)]);
    factor.reset(new float[size_t(rows * blocks)]);
    sum.reset(new int32_t[size_t(rows * blocks * D)]);
  }

  int64_t first_row(int64_t tile) const { return tile * rows / tiles; }
};

// The largest magnitude; NaN where a number is not finite.
template <class T>
inline float largest(const T* x, int64_t n) {
  Vec most{};
  IVec odd{};
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Vec v = abs(keep(load(x + i, lanes), lanes, 0.0f));
    most = max(v, most);
    odd |= IVec(!(v <= 3.4028234e38f));
  });
  return any(odd) ? NAN : reduce_max(most);
}

// Digits d of numbers k.. at `to + k / 4 * step + 4 d`, zeros up to `width`.
template <int D, class T>
inline void to_digits(const T* x, int64_t n, int64_t width, float multiplier, int8_t* to, int64_t step, int32_t* sum) {
  IVec total[D] = {};
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Vec v = keep(load(x + i, lanes), lanes, 0.0f) * multiplier;
    IVec whole = nearest_integers(v);
    int8_t digits[D][W];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
      const IVec digit = d == D - 1 ? whole : (IVec)(whole << 24) >> 24;
      store_low_bytes(digits[d], digit);
      total[d] += digit;
      whole = (whole - digit) >> 8;
    }
    for (int j = 0; j < W && i + j < width; j += 4) {
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) std::memcpy(to + (i + j) / 4 * step + 4 * d, digits[d] + j, 4);
    }
  });
  for (int64_t k = round_up(n, W); k < width; k += 4) std::memset(to + k / 4 * step, 0, 4 * D);
  for (int d = 0; d < D; ++d) sum[d] = reduce_add(total[d]);
}

// The largest power of two that leaves `most` times it with D digits.
template <int D>
inline float power_of_two(float most) {
  constexpr int bits = 8 * D - 1;
  constexpr float limit = float(int64_t{127} << (bits - 7));  // so that the first digit is at most 127
  const int exponent = std::max(int((float_bits(most) >> 23) & 255) - 127, bits - 127);  // a float holds no power above
  const float power = bits_float(uint32_t(bits - 1 - exponent + 127) << 23);
  return most * power <= limit ? power : power / 2;
}

template <int D, class T>
FixedPoint fixed_point(const View& x, int64_t block, int64_t padding, int tile_rows) {
  const int64_t m = x.sizes[0], k = x.sizes[1], depth = round_up(k, padding);
  FixedPoint f(m, k, depth, block, D, tile_rows);
  parallel_for(m, row_grain(k, 32768), [&](int64_t begin, int64_t end) {
    int64_t tile = begin * f.tiles / m;
    for (int64_t r = begin; r < end; ++r) {
      while (f.first_row(tile + 1) <= r) ++tile;
      const int64_t first = f.first_row(tile), step = 4 * D * (f.first_row(tile + 1) - first);
      int8_t* const digits = f.digits.get() + first * D * depth + (r - first) * 4 * D;
      const T* row = x.as<T>() + r * x.strides[0];
      const float most = D == 1 ? largest(row, k) : 0;
      for (int64_t b = 0; b < f.blocks; ++b) {
        const int64_t at = b * block, n = std::min(block, k - at), width = std::min(block, depth - at);
        float multiplier, factor;
        if constexpr (D == 1) {
          multiplier = most > kLeast ? 127.0f / most : 0.0f;
          factor = most / 127.0f;
        } else {
          const float here = largest(row + at, n);
          multiplier = power_of_two<D>(here);
          factor = here != here ? here : 1.0f / multiplier;
        }
        f.factor[size_t(r * f.blocks + b)] = factor;
        to_digits<D>(row + at, n, width, multiplier, digits + at / 4 * step, step, f.sum.get() + (r * f.blocks + b) * D);
      }
    }
  });
  return f;
}

}  // namespace opsmith
