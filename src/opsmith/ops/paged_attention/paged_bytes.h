// Query rows against int8 keys and values as they are stored: products of bytes, exact in 32 bits, in place of a
// conversion of each byte to a float. It is q and the weights that become whole numbers, of two int8 digits each: rows of q
// once, the weights of a tile once it has them.
//
// For rows by fours, heads of whole lines, and q of 16 bits: of the largest number of a row, q is rounded to a part in
// 2^14, so a bfloat16 keeps every bit down to 1/64 of it, and a weight to a part in 2^16 of the tile's largest.
#pragma once

#include <cmath>
#include <limits>

#include "byte_dot.h"
#include "paged_rows.h"

#if defined(OPSMITH_AVX512) && defined(__AVX512VNNI__)
#define OPSMITH_PAGED_BYTES 1

namespace opsmith {

struct ByteUnits {};  // sums of bytes, in vectors of floats

template <>
inline Vec plus<ByteUnits>(Vec a, Vec b) {
  return as_float(as_int(a) + as_int(b));
}

// A row of q, [dim]: `to` has its high digits, then its low ones. q.k is `step * (sum + start)`, the sum being that of
// the digits' products with keys plus 128.
inline void digits_of(const float* q, int64_t dim, int8_t* to, float* step, int32_t* start) {
  float most = 0, check = 0;
  for (int64_t i = 0; i < dim; ++i) most = std::max(most, std::abs(q[i])), check += q[i] * 0.0f;
  int exponent = 0;
  std::frexp(most, &exponent);  // most < 2^exponent
  exponent = std::max(exponent, -100);
  const bool good = check == 0;
  const float by = good ? std::ldexp(1.0f, 14 - exponent) : 0.0f;
  *step = good ? std::ldexp(1.0f, exponent - 14) : std::numeric_limits<float>::quiet_NaN();
  int32_t total = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const int32_t x = good ? int32_t(std::lrint(q[i] * by)) : 0, high = (x + 128) >> 8;
    to[i] = int8_t(high);
    to[dim + i] = int8_t(x - high * 256);
    total += x;
  }
  *start = -128 * total;
}

// As `score_keys`, for heads of `fixed` lines. Rows of `q` are those of `digits_of`.
struct ByteRows {
  const int8_t* q;
  const float* step;
  const int32_t* start;
};

template <int fixed>
__attribute__((noinline)) void score_bytes(const Rows& rows, const ByteRows& bytes, const int8_t* const* keys,
                                           int64_t skip, int64_t tokens, float* scores) {
  constexpr int64_t dim = 64 * fixed;
  const int64_t units = rows.count / 4, all = rows.lanes / 4;
  const __m512i middle = _mm512_set1_epi8(-128);
  const int8_t* const* const end = keys + tokens;
  int64_t unit = 0;
  while (keys < end) {
    const int64_t first = 4 * unit;
    Vec sum[W];
#pragma GCC unroll 4
    for (int u = 0; u < W / 4; ++u) {
      __m512i a[4] = {};
      if (unit < units) {
        const int64_t at = rows.offset[unit];
        const uintptr_t far = uintptr_t(keys[skip]) + at;
        const int8_t* const q = bytes.q + unit * 4 * 2 * dim;
        __m512i x[fixed];
        for (int i = 0; i < fixed; ++i)
          x[i] = _mm512_xor_si512(_mm512_loadu_si512(*keys + at + 64 * i), middle);
        for (int r = 0; r < 4; ++r) {
          if (r < fixed) ask(far + 64 * r);
          for (int i = 0; i < fixed; ++i)
            a[r] = _mm512_dpbusd_epi32(a[r], x[i], _mm512_loadu_si512(q + r * 2 * dim + 64 * i));
          a[r] = _mm512_slli_epi32(a[r], 8);
          for (int i = 0; i < fixed; ++i) {
            a[r] = _mm512_dpbusd_epi32(a[r], x[i], _mm512_loadu_si512(q + r * 2 * dim + dim + 64 * i));
          }
        }
      }
      for (int r = 0; r < 4; ++r) sum[u * 4 + r] = (Vec)a[r];
      if (++unit == all) {
        unit = 0;
        ++keys;
      }
    }
    const IVec whole = as_int(fold<ByteUnits>(sum)) + load_words(bytes.start + first);
    store(scores, to_float(whole) * load(bytes.step + first));
    scores += W;
  }
}

// Weights of `tokens` tokens, `lanes` each, as digits in their place: of every four tokens first the high digits, four bytes
// a lane, then the low ones. False, and nothing done, if some weight is negative or no number, as the digits have no sign.
inline bool weights_to_digits(float* weights, int64_t tokens, int64_t lanes, float* step) {
  for (int64_t v = 0; v < lanes; v += W) {
    Vec most = {}, good = {};
    for (int64_t j = 0; j < tokens; ++j) {
      const Vec w = load(weights + j * lanes + v);
      most = max(w, most);
      good += select(w >= Vec{}, w * 0.0f, splat(1.0f));  // 0 but for the negative, infinities and NaN
    }
    if (any(~(good == Vec{}))) return false;
    store(step + v, most * (1 / 65280.0f));
  }
  for (int64_t v = 0; v < lanes; v += W) {
    const Vec s = load(step + v), by = select(s > 1e-37f, 1.0f / s, Vec{});
    for (int64_t j = 0; j < tokens; j += 4) {
      IVec high = {}, low = {};
      for (int i = 0; i < 4; ++i) {
        const IVec x = (IVec)_mm512_cvtps_epi32((__m512)(load(weights + (j + i) * lanes + v) * by));
        high |= (x >> 8) << (8 * i);
        low |= (x & 255) << (8 * i);
      }
      store(weights + j / 2 * lanes + v, as_float(high));
      store(weights + (j / 2 + 1) * lanes + v, as_float(low));
    }
  }
  return true;
}

// As `add_sixteen`, for eight tokens. Of every 64 sums of a row the fours stand in the order of `by_fours`.
template <int D>
__attribute__((noinline)) void add_eight(const int32_t* digits, const float* step, int64_t lanes,
                                         const int8_t* const* values, int64_t skip, int64_t at,
                                         int64_t head_stride, int64_t heads, int64_t units, float* sums) {
  const int8_t* from[8];
  for (int i = 0; i < 8; ++i) from[i] = values[i] + at;
  for (int64_t h = 0; h < heads; ++h, digits += 4 * units, step += 4 * units, sums += 4 * units * D) {
#pragma GCC unroll 1
    for (int64_t c = h * head_stride, in = 0; in < D; c += 64, in += 64) {
      __m512i column[2][4];
      for (int j = 0; j < 2; ++j) {
        const __m512i x0 = _mm512_loadu_si512(from[4 * j] + c), x1 = _mm512_loadu_si512(from[4 * j + 1] + c);
        const __m512i x2 = _mm512_loadu_si512(from[4 * j + 2] + c),
                      x3 = _mm512_loadu_si512(from[4 * j + 3] + c);
        const __m512i a = _mm512_unpacklo_epi8(x0, x1), b = _mm512_unpackhi_epi8(x0, x1);
        const __m512i d = _mm512_unpacklo_epi8(x2, x3), e = _mm512_unpackhi_epi8(x2, x3);
        column[j][0] = _mm512_unpacklo_epi16(a, d), column[j][1] = _mm512_unpackhi_epi16(a, d);
        column[j][2] = _mm512_unpacklo_epi16(b, e), column[j][3] = _mm512_unpackhi_epi16(b, e);
      }
      for (int64_t u = 0; u < units; ++u) {
        float* const to = sums + u * 4 * D + in;
        const int32_t* const w = digits + 4 * u;
        const float* const s = step + 4 * u;
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
          for (int i = 2 * r; u == 0 && i < 2 * (r + 1); ++i) ask(uintptr_t(values[skip + i] + at + c));
          __m512i sum[4] = {};
          for (int digit = 0; digit < 2; ++digit) {
            for (int j = 0; j < 2; ++j) {
              const __m512i x = _mm512_set1_epi32(w[(2 * j + digit) * lanes + r]);
              for (int i = 0; i < 4; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], x, column[j][i]);
            }
            if (digit == 0) {
              for (int i = 0; i < 4; ++i) sum[i] = _mm512_slli_epi32(sum[i], 8);
            }
          }
          const Vec factor = splat(s[r]);
          for (int i = 0; i < 4; ++i) {
            float* const p = to + r * D + i * W;
            store(p, fma(to_float((IVec)sum[i]), factor, load(p)));
          }
        }
      }
    }
  }
}

// Rows of sums from the order of their elements to that of `add_eight`, or back: it is the same.
inline void by_fours(float* sums, int64_t size) {
  for (int64_t c = 0; c < size; c += 4 * W) {
    __m512 v[4];
    for (int i = 0; i < 4; ++i) v[i] = _mm512_loadu_ps(sums + c + i * W);
    const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[0], v[1], 0xee);
    const __m512 d = _mm512_shuffle_f32x4(v[2], v[3], 0x44), e = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
    _mm512_storeu_ps(sums + c, _mm512_shuffle_f32x4(a, d, 0x88));
    _mm512_storeu_ps(sums + c + W, _mm512_shuffle_f32x4(a, d, 0xdd));
    _mm512_storeu_ps(sums + c + 2 * W, _mm512_shuffle_f32x4(b, e, 0x88));
    _mm512_storeu_ps(sums + c + 3 * W, _mm512_shuffle_f32x4(b, e, 0xdd));
  }
}

}  // namespace opsmith
#endif
