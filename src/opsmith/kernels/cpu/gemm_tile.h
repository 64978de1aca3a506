// Small matrix products on packed operands, held in registers: what attention spends its time in.
//
// An operand is made of 32-bit units: one float, or two bfloat16 that follow each other along the summed dimension
// and that one instruction multiplies. With sizes counted in units, one kernel serves both.
//   A  rows of units, `a[row * row_stride + k * step]`: broadcast, a unit at a time
//   B  panels of PANEL columns, `b[panel * panel_stride + k * ldb + column]`: whole vectors
//   C  float, row-major
// A panel's tail and B's unused columns hold zeros, so nothing here needs a lane mask.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pair.h"

namespace opsmith {

constexpr int ROWS = 6;  // of C in registers: with VECS columns, 24 (AVX-512) or 12 accumulators
constexpr int VECS = W == 16 ? 4 : 2;
constexpr int PANEL = VECS * W;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What f makes of n, from 1 to `most`, as a constant.
template <int most, class F>
inline auto with_count(int64_t n, const F& f) {
  if constexpr (most > 1) {
    if (n < most) return with_count<most - 1>(n, f);
  }
  return f(std::integral_constant<int, most>{});
}

inline void set_lanes(float* p, float x, int64_t n) { std::fill(p, p + n, x); }

struct FloatUnits {
  using Element = float;
  static constexpr int per_unit = 1;
  // Without a fused multiply-add a sum of products rounds too often in float.
  using Sum = std::conditional_t<(kRoundings > 1), DVec, Vec>;
  // Products that one accumulator sums before it is added to C.
  static constexpr int64_t chain = kRoundings > 1 ? 512 : 32;
  static Vec broadcast(const float* unit) { return splat(*unit); }
  static Vec mac(Vec a, Vec b, Vec c) { return fma(a, b, c); }
  static DVec mac(const DVec& a, const DVec& b, const DVec& c) { return a * b + c; }
};

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
struct BFloatUnits {
  using Element = bfloat16;
  using Sum = Vec;
  static constexpr int per_unit = 2;
  static constexpr int64_t chain = 128;  // longer than a float's: bfloat16 inputs leave less to lose
  static Vec broadcast(const float* unit) { return _mm512_set1_ps(*unit); }
  static Vec mac(Vec a, Vec b, Vec c) { return (Vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b); }
};
template <class T>
using UnitsOf = std::conditional_t<std::is_same_v<T, bfloat16>, BFloatUnits, FloatUnits>;
#else
template <class T>
using UnitsOf = FloatUnits;
#endif

constexpr bool kPairUnit = UnitsOf<bfloat16>::per_unit == 2;  // an instruction multiplies pairs of bfloat16

// Whether a vector of T becomes two of floats, its even elements and its odd ones: what meets them lies in that order.
template <class T>
constexpr bool in_pairs = even_odd<T> && UnitsOf<T>::per_unit == 1;

struct Operand {  // A
  const float* data;
  int64_t row_stride;
  int64_t step;
};

// C[M, N * W] (+)= A[M, depth] B[depth, N * W], in one chain of additions. This and what follows is compiled in gemm_tile.cpp.
template <class Units, int M, int N>
void product_in_registers(int64_t depth, Operand a, const float* b, int64_t ldb, float* c, int64_t ldc,
                          bool add);

// The rows of C that `product` writes for m <= ROWS rows asked for: A must have as many readable.
inline int padded_rows(int m) { return m <= 2 ? m : m <= 4 ? 4 : ROWS; }

// C[m, vecs * W] (+)= A[m, depth] B[depth, vecs * W], m <= ROWS.
template <class Units>
void product(int m, int64_t vecs, int64_t depth, Operand a, const float* b, int64_t ldb, int64_t panel_stride,
             float* c, int64_t ldc, bool add);

// W units of a row from element `at` on, zeros past its n elements.
template <class Units, class T>
inline __attribute__((always_inline)) Vec load_units(const T* row, int64_t at, int64_t n) {
  const int64_t count = std::min<int64_t>(n - at, int64_t(W) * Units::per_unit);
  if constexpr (Units::per_unit == 2) {
#if defined(OPSMITH_AVX512)
    if (count == 2 * W) return (Vec)_mm512_loadu_si512(row + at);
    return (Vec)_mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << count) - 1), row + at);
#endif
  } else if (count == W) {
    return load(row + at);
  }
  if (count <= 0) return Vec{};
  return load(row + at, Part{int(count)});
}

// Two vectors with one bit of the lane number exchanged for which of the two it is: a step of a transposition.
template <int h, int... l>
inline void exchange(Vec& a, Vec& b, std::integer_sequence<int, l...>) {
  const Vec low = shuffle(a, b, std::integer_sequence<int, (l & h ? W + l - h : l)...>{});
  b = shuffle(a, b, std::integer_sequence<int, (l & h ? W + l : l + h)...>{});
  a = low;
}

// W / G vectors of as many groups of G words: group j of vector i becomes group i of vector j.
template <int G = 1, int h = W / G / 2>
inline __attribute__((always_inline)) void transpose(Vec* v) {
#pragma GCC unroll 16
  for (int i = 0; i < W / G; ++i) {
    if (!(i & h)) exchange<h * G>(v[i], v[i + h], std::make_integer_sequence<int, W>{});
  }
  if constexpr (h > 1) transpose<G, h / 2>(v);
}

// Lanes l and l ^ h of a added where l has no bit h, those of b where it has.
template <int h, class V>
inline V merge(V a, V b) {
  Vec low = (Vec)a, high = (Vec)b;
  exchange<h>(low, high, std::make_integer_sequence<int, W>{});
  return (V)low + (V)high;
}

// Lanes l and l ^ h of v added.
template <int h, int... l>
inline Vec swapped(Vec v, std::integer_sequence<int, l...>) {
  return shuffle(v, v, std::integer_sequence<int, (l ^ h)...>{});
}
template <int h, class V>
inline V fold(V v) {
  return v + (V)swapped<h>((Vec)v, std::make_integer_sequence<int, W>{});
}

// to[r] = the sum of the lanes of v[r], halves upon halves: R vectors take R log R steps and not R log W.
template <int R, class V, class S>
inline __attribute__((always_inline)) void store_totals(V (&v)[R], S* to) {
  static_assert(R == 1 || R == 2 || (R == 4 && W > 4));
  V all = v[0];
  if constexpr (R == 2) all = merge<W / 2>(v[0], v[1]);
  if constexpr (R == 4) all = merge<W / 4>(merge<W / 2>(v[0], v[2]), merge<W / 2>(v[1], v[3]));
  if constexpr (W / R >= 16) all = fold<8>(all);
  if constexpr (W / R >= 8) all = fold<4>(all);
  if constexpr (W / R >= 4) all = fold<2>(all);
  all = fold<1>(all);
#if defined(OPSMITH_AVX512)
  if constexpr (R == 4) {  // one after the other they take as long as a third of the shortest rows
    _mm_storeu_si128((__m128i*)to, _mm512_castsi512_si128(_mm512_maskz_compress_epi32(0x1111, (__m512i)all)));
    return;
  }
#endif
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) to[r] = all[r * (W / R)];
}

template <class Units>
inline Vec plus(Vec a, Vec b) {
  return a + b;
}

// W vectors to one: lane i is the sum of vector i's lanes.
#if defined(OPSMITH_AVX512)
template <class Units>
inline __attribute__((always_inline)) Vec fold(const Vec* v) {
  constexpr int from[W] = {0, 2, 1, 3, 8,  10, 9,  11,
                           4, 6, 5, 7, 12, 14, 13, 15};  // what the steps below leave where
  Vec sum[W];
  for (int i = 0; i < W; ++i) sum[from[i]] = v[i];
  for (int i = 0; i < 8; ++i) {
    const __m512 a = sum[i], b = sum[i + 8];
    sum[i] = plus<Units>(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = sum[i], b = sum[i + 4];
    sum[i] = plus<Units>(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    const __m512 a = sum[i], b = sum[i + 2];
    sum[i] = plus<Units>(_mm512_mask_blend_ps(0xcccc, a, b), _mm512_shuffle_ps(a, b, 0x4e));
  }
  return plus<Units>(_mm512_shuffle_ps(sum[0], sum[1], 0x88), _mm512_shuffle_ps(sum[0], sum[1], 0xdd));
}
#else
template <class Units, int h = W / 2>
inline __attribute__((always_inline)) Vec fold(Vec* v) {
  for (int i = 0; i < h; ++i) {
    exchange<h>(v[i], v[i + h], std::make_integer_sequence<int, W>{});
    v[i] = plus<Units>(v[i], v[i + h]);
  }
  if constexpr (h > 1) {
    return fold<Units, h / 2>(v);
  } else {
    return v[0];
  }
}
#endif

// B = rows^T: column j of B is row j of the source, its units along the depth. `to` has panels of PANEL columns,
// ceil(n / per_unit) * PANEL units each; columns up to a multiple of W are written, zeros past `rows`.
template <class Units, class T>
void pack_transposed(const T* from, int64_t stride, int64_t rows, int64_t n, float* to);

// B = rows: row k of B is made of the per_unit rows of the source from k * per_unit on. `to` has rows of `width`
// units, a multiple of W; zeros past `rows` and n.
template <class Units, class T>
void pack_rows(const T* from, int64_t stride, int64_t rows, int64_t n, float* to, int64_t width) {
  const int64_t rest = round_up(n, W);
  for (int64_t j = 0; j < rows; j += Units::per_unit, to += width) {
    const T* row = from + j * stride;
    for_lanes(n, [&](int64_t c, auto lanes) {
      if constexpr (Units::per_unit == 2) {
        const IVec low = (IVec)((as_int(load(row + c, lanes)) >> 16) & 0xffff);
        const IVec high = j + 1 < rows ? as_int(load(row + stride + c, lanes)) : IVec{};
        store(to + c, as_float(low | high));
      } else {
        store(to + c, load(row + c, lanes));
      }
    });
    set_lanes(to + rest, 0, width - rest);
  }
}

// A = rows: `width` elements a row, zeros past n.
template <class Units, class T>
inline void pack_row(const T* from, int64_t n, typename Units::Element* to, int64_t width) {
  for_lanes(n, [&](int64_t c, auto lanes) { store(to + c, load(from + c, lanes), lanes); });
  for (int64_t c = n; c < width; ++c) to[c] = {};
}

}  // namespace opsmith
