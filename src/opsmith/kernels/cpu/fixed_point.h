// Rows of x as whole numbers with a factor for each block of a row, in the digits that byte_dot.h multiplies.
//
// 15 bits and a sign are more than a bfloat16 has, and 31 more than a float: two and four digits of 8 bits, or one and two of
// 16. The factors are powers of two, so numbers down to a 128th of the largest of their block keep every bit, and smaller ones
// lose less than 2^-15 or 2^-31 of the largest. `dynamic` is the operator's own rounding: a factor for the whole row, the largest number at 127.
#pragma once

#include <cmath>

#include "byte_dot.h"
#include "nearest.h"

namespace opsmith {

constexpr float kLeast = 1e-30f;  // a row of smaller numbers is rounded to zeros, as its inverse may be no float

constexpr int kDigitBits = 8 * sizeof(Digit);
constexpr int digits_of(int bits) { return bits / kDigitBits; }
// Digits are summed in 32 bits where two of 8 bits make one of 16, and those of more than 16 bits by halves.
constexpr int halves(int D) { return (D * kDigitBits + 15) / 16; }

// Rows are taken in tiles, as nearly equal as can be. The digits of a tile lie in the order in which they are used, four
// numbers of a row at a time: rows that are apart by a power of two would push each other out of the cache.
struct FixedPoint {
  int64_t rows, blocks, depth;  // depth: of a row, padded to whole steps
  int64_t block;  // numbers of a row that share a factor
  int64_t tiles;
  std::unique_ptr<Digit[]> digits;  // [tile][depth / 4][row of the tile][D][4]
  std::unique_ptr<float[]> factor;  // [rows][blocks]
  std::unique_ptr<int32_t[]> sum;  // [rows][blocks][halves(D)], over a block

  FixedPoint(int64_t rows, int64_t k, int64_t depth, int64_t block, int D, int tile_rows)
      : rows(rows), blocks((k + block - 1) / block), depth(depth), block(block),
        tiles((rows + tile_rows - 1) / tile_rows) {
    digits.reset(new Digit[size_t(rows * depth * D)]);
    factor.reset(new float[size_t(rows * blocks)]);
    sum.reset(new int32_t[size_t(rows * blocks * halves(D))]);
  }

  int64_t first_row(int64_t tile) const { return tile * rows / tiles; }
};

// The largest magnitude; NaN where a number is not finite.
template <class T>
inline float largest_finite(const T* x, int64_t n) {
  const float most = largest(x, n);
  return std::isfinite(most) ? most : NAN;
}

// Digits d of numbers k.. at `to + k / 4 * step + 4 d`, zeros up to `width`.
template <int D, class T>
inline void to_digits(const T* x, int64_t n, int64_t width, float multiplier, Digit* to, int64_t step,
                      int32_t* sum) {
  IVec total[D] = {};
  for_lanes(n, [&](int64_t i, auto lanes) {
    IVec whole = nearest_integers(keep(load(x + i, lanes), lanes, 0.0f) * multiplier);
#pragma GCC unroll 4
    for (int d = 0; d < D; ++d) {
      IVec digit = whole;
      if (d < D - 1) {
        const IVec rest = (whole + (1 << (kDigitBits - 1))) >>
                          kDigitBits;  // so that the lower digit is signed
        digit = whole - (rest << kDigitBits);
        whole = rest;
      }
      store_fours(to + i / 4 * step + 4 * d, step, digit, width - i);
      total[d] += digit;
    }
  });
  for (int64_t k = round_up(n, W); k < width; k += 4) {
    std::memset(to + k / 4 * step, 0, sizeof(Digit) * 4 * D);
  }
  constexpr int H = halves(D);
  for (int h = 0; h < H; ++h) {
    const int32_t high = D > H ? reduce_add(total[D / H * h + (D > H)]) : 0;
    sum[h] = high * (1 << kDigitBits) + reduce_add(total[D / H * h]);
  }
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
template <int D, bool dynamic, class T>
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
            Digit* const digits = f.digits.get() + first * D * depth + (r - first) * 4 * D;
            const T* row = x.as<T>() + r * x.strides[0];
            const float most = dynamic ? largest_finite(row, k) : 0;
            for (int64_t b = part * f.blocks / parts; b < (part + 1) * f.blocks / parts; ++b) {
              const int64_t at = b * block, n = std::min(block, k - at), width = std::min(block, depth - at);
              float multiplier, factor;
              if constexpr (dynamic) {
                multiplier = most > kLeast ? 127.0f / most : 0.0f;
                factor = most / 127.0f;
              } else {
                const float here = largest_finite(row + at, n);
                multiplier = power_of_two<kDigitBits * D - 1>(here);
                factor = here != here ? here : 1.0f / multiplier;
              }
              const int64_t i = r * f.blocks + b;
              f.factor[size_t(i)] = factor;
              const int64_t finite = factor == factor ? n : 0;  // what is not is zeros: the factor says so
              to_digits<D>(row + at, finite, width, multiplier, digits + at / 4 * step, step,
                           &f.sum[size_t(i * halves(D))]);
            }
          }
        }
      });
  return f;
}

}  // namespace opsmith
