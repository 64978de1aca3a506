// Rows of x as whole numbers with a factor for each block of a row, their digits int8: what byte_dot.h multiplies.
//
// Two digits hold 15 bits and a sign, four hold 31: more than a bfloat16 or a float has. The factors are powers of two, so
// numbers down to a 128th of the largest of their block keep every bit, and smaller ones lose less than 2^-15 or 2^-31 of
// the largest. Where the weight is nibbles, the lower of two digits has a bit less, so that a nibble added to it is a byte
// still (byte_dot.h): one from -64 to 63 for the low nibbles of a step, from 0 to 127 for the high ones.
// One digit is the operator's own rounding (dynamic quantization): a factor for the whole row, the largest
// number at 127.
#pragma once

#include <cmath>

#include "byte_dot.h"
#include "nearest.h"
#include "rows.h"

namespace opsmith {

constexpr float kLeast = 1e-30f;  // a row of smaller numbers is rounded to zeros, as its inverse may be no float

// Numbers of one or two digits are summed in 32 bits, those of four by halves.
constexpr int halves(int D) { return (D + 1) / 2; }

// Rows are taken in tiles, as nearly equal as can be. The digits of a tile lie in the order in which they are used, four
// numbers of a row at a time: rows that are apart by a power of two would push each other out of the cache.
struct FixedPoint {
  int64_t rows, blocks, depth;  // depth: of a row, padded to whole steps
  int64_t block;  // numbers of a row that share a factor
  int64_t tiles;
  std::unique_ptr<int8_t[]> digits;  // [tile][depth / 4][row of the tile][D][4]
  std::unique_ptr<float[]> factor;  // [rows][blocks]
  std::unique_ptr<int32_t[]> sum;  // [rows][blocks][halves(D)], over a block
  std::unique_ptr<int32_t[]>
      pairs;  // [rows][blocks], of the products of low digits that meet the two nibbles of a byte

  FixedPoint(int64_t rows, int64_t k, int64_t depth, int64_t block, int D, int tile_rows)
      : rows(rows), blocks((k + block - 1) / block), depth(depth), block(block),
        tiles((rows + tile_rows - 1) / tile_rows) {
    digits.reset(new int8_t[size_t(rows * depth * D)]);
    factor.reset(new float[size_t(rows * blocks)]);
    sum.reset(new int32_t[size_t(rows * blocks * halves(D))]);
    pairs.reset(new int32_t[size_t(rows * blocks)]);
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

constexpr int kBits = 8;  // of a digit
constexpr int kNibbleBits = 7;  // of the lower one of two for nibbles

// Digits d of numbers k.. at `to + k / 4 * step + 4 d`, zeros up to `width`.
template <int D, bool nibbles, class T>
inline void to_digits(const T* x, int64_t n, int64_t width, float multiplier, int8_t* to, int64_t step,
                      int32_t* sum, int32_t* pairs) {
  IVec total[D] = {}, products{};
  IVec below;  // what makes the low digits of the low nibbles signed
  if constexpr (nibbles) {
    for (int j = 0; j < W; ++j) below[j] = j & 4 ? 0 : 1 << (kNibbleBits - 1);
  }
  for_lanes(n, [&](int64_t i, auto lanes) {
    const Vec v = keep(load(x + i, lanes), lanes, 0.0f) * multiplier;
    IVec whole = nearest_integers(v);
    int8_t digits[D][W];
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
      IVec digit = whole;
      if (d < D - 1) {
        if constexpr (nibbles) {
          if (W == 4) below = (IVec{} + 1 - int32_t(i / 4 % 2)) << (kNibbleBits - 1);
          const IVec rest = (whole + below) >> kNibbleBits;
          digit = whole - (rest << kNibbleBits);
          products += twice_products_of_fours(digit);
          whole = rest;
        } else {
          digit = (IVec)(whole << 24) >> 24;
          whole = (whole - digit) >> kBits;
        }
      }
      store_low_bytes(digits[d], digit);
      total[d] += digit;
    }
    for (int j = 0; j < W && i + j < width; j += 4) {
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) std::memcpy(to + (i + j) / 4 * step + 4 * d, digits[d] + j, 4);
    }
  });
  for (int64_t k = round_up(n, W); k < width; k += 4) std::memset(to + k / 4 * step, 0, 4 * D);
  for (int h = 0; h < halves(D); ++h) {
    const int32_t high = D > 1 ? reduce_add(total[2 * h + (D > 1)]) : 0;
    sum[h] = high * (1 << (nibbles ? kNibbleBits : kBits)) + reduce_add(total[2 * h]);
  }
  *pairs = reduce_add(products) / 2;
}

// The largest power of two that leaves `most` times it with so many bits.
template <int bits>
inline float power_of_two(float most) {
  constexpr float limit = float(int64_t{127} << (bits - 7));  // so that the first digit is at most 127
  const int exponent = std::max(int((float_bits(most) >> 23) & 255) - 127,
                                bits - 127);  // a float holds no power above
  const float power = bits_float(uint32_t(bits - 1 - exponent + 127) << 23);
  return most * power <= limit ? power : power / 2;
}

constexpr int64_t kWorthThreads = 8192;  // numbers

// Threads take whole tiles or, where these do not come out even, parts of K: digits of a tile's rows share cache lines.
template <int D, bool nibbles, class T>
FixedPoint fixed_point(const View& x, int64_t block, int64_t padding, int tile_rows) {
  const int64_t m = x.sizes[0], k = x.sizes[1], depth = round_up(k, padding), threads = num_threads();
  FixedPoint f(m, k, depth, block, D, tile_rows);
  const bool even = f.tiles % threads == 0 || f.tiles >= 8 * threads;
  const int64_t parts = even || m * k <= kWorthThreads ? 1 : threads;
  parallel_for(
      f.tiles * parts, row_grain(m * k / (f.tiles * parts), kWorthThreads), [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; ++task) {
          const int64_t tile = task / parts, part = task % parts, first = f.first_row(tile),
                        last = f.first_row(tile + 1);
          const int64_t step = 4 * D * (last - first);
          for (int64_t r = first; r < last; ++r) {
            int8_t* const digits = f.digits.get() + first * D * depth + (r - first) * 4 * D;
            const T* row = x.as<T>() + r * x.strides[0];
            const float most = D == 1 ? largest(row, k) : 0;
            for (int64_t b = part * f.blocks / parts; b < (part + 1) * f.blocks / parts; ++b) {
              const int64_t at = b * block, n = std::min(block, k - at), width = std::min(block, depth - at);
              float multiplier, factor;
              if constexpr (D == 1) {
                multiplier = most > kLeast ? 127.0f / most : 0.0f;
                factor = most / 127.0f;
              } else {
                const float here = largest(row + at, n);
                multiplier = power_of_two<nibbles ? kNibbleBits + 7 : kBits * D - 1>(here);
                factor = here != here ? here : 1.0f / multiplier;
              }
              const int64_t i = r * f.blocks + b;
              f.factor[size_t(i)] = factor;
              const int64_t finite = factor == factor ? n : 0;  // what is not is zeros: the factor says so
              to_digits<D, nibbles>(row + at, finite, width, multiplier, digits + at / 4 * step, step,
                                    &f.sum[size_t(i * halves(D))], &f.pairs[size_t(i)]);
            }
          }
        }
      });
  return f;
}

}  // namespace opsmith
