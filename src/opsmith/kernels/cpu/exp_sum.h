// The sum of e^z over a row without a look at its maximum first: what a loss needs of the softmax.
//
// Terms are taken relative to a pivot, the maximum of the row's first piece, so that the sum is at least 1 and what
// is too small for a float beside it does not matter. A later piece that rises far above the pivot shows in its own
// sum, moves the pivot to its maximum, and is summed again while it is in the nearest cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "pair.h"

namespace opsmith {

// e^x within 2 units in the last place or so, exactly 1 at 0; 0 far below, infinity far above, NaN at NaN.
inline Vec exp_from_pivot(Vec x) {
  const auto [n, r] = whole_and_rest<true>(x * log2_e);
  Vec p = fma(r, 0.00186714169f, 0.00901700556f);
  p = fma(p, r, 0.0557999313f);
  p = fma(p, r, 0.240164444f);
  p = fma(p, r, 0.693151295f);
  p = fma(p, r, 1.0f);
  return scale_exponent<true>(p, n);
}

// What is known of a row, or of the part of it that has been read.
struct ExpSum {
  static constexpr int64_t piece = 1024;  // elements summed before the sum is added to the row's
  static constexpr float lowest = -std::numeric_limits<float>::max();  // -inf - -inf would be NaN
  float pivot = lowest;
  double total = 0;  // of e^(z - pivot)
  double values = 0;  // of z, where asked for

  double log_total() const { return std::log(total); }
};

constexpr float kFarAbove = 1024.0f;  // a piece's sum beyond which the pivot moves
constexpr int64_t kPrefetchBytes = 1536;

// Calls f(vector, number 0..3) for all of x, four vectors at a time in the order of pairs, while the next lines come.
template <class T, class F>
inline __attribute__((always_inline)) void for_values(const T* x, int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + 4 * W <= n; i += 4 * W) {
    for (size_t line = 0; line < 4 * W * sizeof(T); line += 64) {
      prefetch(reinterpret_cast<const char*>(x + i) + line + kPrefetchBytes);
    }
    const Pair low = load(x + i, Both{}), high = load(x + i + 2 * W, Both{});
    f(low.a, 0);
    f(low.b, 1);
    f(high.a, 2);
    f(high.b, 3);
  }
  for_lanes(n - i, [&](int64_t j, auto k) {
    f(keep(load(x + i + j, k), k, -std::numeric_limits<float>::infinity()), int(j / W));
  });
}

template <class T>
inline double piece_sum(const T* x, int64_t n, float pivot) {
  Vec part[4] = {};
  for_values(x, n,
             [&](Vec v, int u) __attribute__((always_inline)) { part[u] += exp_from_pivot(v - pivot); });
  return reduce_add(to_double((part[0] + part[1]) + (part[2] + part[3])));
}

template <class T>
inline float piece_max(const T* x, int64_t n) {
  Vec highest[2] = {splat(ExpSum::lowest), splat(ExpSum::lowest)};
  for_lanes_unrolled<2>(n, [&](int64_t i, int u, auto k) {
    highest[u] = max(highest[u], keep(load(x + i, k), k, ExpSum::lowest));
  });
  return reduce_max(max(highest[0], highest[1]));
}

#if defined(OPSMITH_AVX512)

// e^z for |z| < 85, to 7e-5 of itself, and without bias: 2^(k/32), from a table, times a line in the rest r. From z + 1
// the line comes with the product that takes k's share off, as a + r with a = 46 / 32 ln 2, nearly 1: its slope is 0.4%
// too steep, and the table holds the other factors.
struct NearExp {
  static constexpr float step = 0.0216608494f;  // ln 2 / 32
  static constexpr float shift = 12582912.0f + 4096.0f;  // 1.5 * 2^23: integers land in the low bits, above 0
  Vec low, high;  // bits that those of the shifted k complete

  NearExp() {
    float table[2 * W];
    for (int j = 0; j < 2 * W; ++j) {
      const double line = 46 * std::log(2.0) / 32;
      const float power = float(std::exp2(j / 32.0) * std::exp(line - 1) / line * (1 + 1.955e-5));
      uint32_t bits;
      std::memcpy(&bits, &power, 4);
      bits -= (4096u + uint32_t(j)) << 18;
      std::memcpy(table + j, &bits, 4);
    }
    low = load(table);
    high = load(table + W);
  }
  // sum + e^z, given z + 1. Where z is out of range, so are bits of `seen`.
  Vec add(Vec sum, Vec z_and_one, __m512i& seen) const {
    const Vec y = fma(z_and_one, 32 * log2_e, shift - 46.0f);
    const __m512i k = (__m512i)y;
    seen = _mm512_ternarylogic_epi32(seen, k, _mm512_set1_epi32(0x4b400000),
                                     0xf6);  // seen | (k ^ 0x4b400000)
    const Vec line = fma(y - shift, -step, z_and_one);
    const __m512i rest = _mm512_permutex2var_epi32((__m512i)low, k, (__m512i)high);
    return fma((Vec)_mm512_add_epi32(rest, _mm512_slli_epi32(k, 18)), line, sum);
  }
  static bool in_range(__m512i seen) { return _mm512_cmpgt_epu32_mask(seen, _mm512_set1_epi32(8191)) == 0; }
};

// The same for a whole piece, or infinity where that is out of range. `z` is the target's value, or -infinity.
template <class T>
inline double near_piece_sum(const T* x, float pivot, float z) {
  static const NearExp near;
  const NearExp e = near;
  const float below = pivot - 1.0f;
  Vec part[4] = {};
  __m512i seen[2] = {};
  for_values(x, ExpSum::piece, [&](Vec v, int u) __attribute__((always_inline)) {
    part[u] = e.add(part[u], v - below, seen[u % 2]);
  });
  if (!NearExp::in_range(_mm512_or_si512(seen[0], seen[1]))) return std::numeric_limits<double>::infinity();
  double sum = reduce_add(to_double((part[0] + part[1]) + (part[2] + part[3])));
  if (z > ExpSum::lowest)
    sum += double(exp_from_pivot(splat(z - pivot))[0]) - double(e.add(Vec{}, splat(z - below), seen[0])[0]);
  return sum;
}

#endif

// Adds x[0..n) to what is known of its row. Of a coarse sum the target is element `at`, if that is in [0, n).
template <class T, bool with_values, bool coarse>
inline void add_to_sum(ExpSum& s, const T* x, int64_t n, int64_t at) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (int64_t first = 0; first < n; first += ExpSum::piece) {
    const T* const piece = x + first;
    const int64_t size = std::min(ExpSum::piece, n - first);
    double sum = infinity;
    if (s.pivot != ExpSum::lowest) {
#if defined(OPSMITH_AVX512)
      const bool here = first <= at && at < first + size;
      if (coarse && size == ExpSum::piece)
        sum = near_piece_sum(piece, s.pivot, here ? to_float(x[at]) : ExpSum::lowest);
#endif
      if (!(sum <= kFarAbove)) sum = piece_sum(piece, size, s.pivot);
    }
    if (!(sum <= kFarAbove)) {
      const float higher = std::max(s.pivot, piece_max(piece, size));
      s.total *= std::exp(double(s.pivot) - double(higher));
      s.pivot = higher;
      sum = piece_sum(piece, size, s.pivot);
    }
    s.total += sum;
    if constexpr (with_values) {
      Vec part[2] = {};
      for_lanes_unrolled<2>(size, [&](int64_t i, int u, auto k) { part[u] += load(piece + i, k); });
      s.values += reduce_add(to_double(part[0]) + to_double(part[1]));
    }
  }
}

}  // namespace opsmith
