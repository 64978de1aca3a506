// The sum of e^z over a row without a look at its maximum first: what a loss needs of the softmax.
//
// Terms are taken relative to a pivot, the maximum of the row's first piece, so that the sum is at least 1 and what
// is too small for a float beside it does not matter. A later piece that rises far above the pivot shows in its own
// sum, moves the pivot to its maximum, and is summed again while it is in the nearest cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "rows.h"
#include "simd.h"

namespace opsmith {

// e^x within 2 units in the last place or so, exactly 1 at 0; 0 far below, infinity far above, NaN at NaN.
inline Vec exp_of(Vec x) {
  const Vec t = x * log2_e;
#if defined(OPSMITH_AVX512)
  const Vec n = t;  // scalef takes the floor itself, and both know what to do with infinities
  const Vec r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  const Vec bounded = max(-150.0f, min(129.0f, t));
  const Vec nearest_integer = round_to_integer(bounded);
  const Vec n = select(nearest_integer > bounded, nearest_integer - 1.0f, nearest_integer);
  const Vec r = bounded - n;
#endif
  Vec p = fma(r, 0.00186714169f, 0.00901700556f);
  p = fma(p, r, 0.0557999313f);
  p = fma(p, r, 0.240164444f);
  p = fma(p, r, 0.693151295f);
  p = fma(p, r, 1.0f);
  return scale_exponent(p, n);
}

// What is known of a row, or of the part of it that has been read.
struct ExpSum {
  static constexpr float lowest = -std::numeric_limits<float>::max();  // -inf - -inf would be NaN
  float pivot = lowest;
  double total = 0;   // of e^(z - pivot)
  double values = 0;  // of z, where asked for

  double log_total() const { return std::log(total); }
};

constexpr int64_t kPiece = 1024;        // elements summed before the sum is added to the row's
constexpr float kFarAbove = 1024.0f;    // a piece's sum beyond which the pivot moves
constexpr int64_t kPrefetchBytes = 1536;

template <class T>
inline Vec piece_sum(const T* x, int64_t n, float pivot) {
  Vec part[4] = {};
  for_lanes_unrolled<4>(n, [&](int64_t i, int u, auto k) {
    if (u * W * int(sizeof(T)) % 64 == 0) prefetch(reinterpret_cast<const char*>(x + i) + kPrefetchBytes);
    part[u] += exp_of(keep(load(x + i, k) - pivot, k, -std::numeric_limits<float>::infinity()));
  });
  return (part[0] + part[1]) + (part[2] + part[3]);
}

template <class T>
inline float piece_max(const T* x, int64_t n) {
  Vec highest[2] = {splat(ExpSum::lowest), splat(ExpSum::lowest)};
  for_lanes_unrolled<2>(n, [&](int64_t i, int u, auto k) {
    highest[u] = max(highest[u], keep(load(x + i, k), k, ExpSum::lowest));
  });
  return reduce_max(max(highest[0], highest[1]));
}

// Adds x[0..n) to what is known of its row.
template <class T, bool with_values>
inline void add_to_sum(ExpSum& s, const T* x, int64_t n) {
  for (int64_t first = 0; first < n; first += kPiece) {
    const T* const piece = x + first;
    const int64_t size = std::min(kPiece, n - first);
    double sum = s.pivot == ExpSum::lowest ? std::numeric_limits<double>::infinity()
                                           : reduce_add(to_double(piece_sum(piece, size, s.pivot)));
    if (!(sum <= kFarAbove)) {
      const float higher = std::max(s.pivot, piece_max(piece, size));
      s.total *= std::exp(double(s.pivot) - double(higher));
      s.pivot = higher;
      sum = reduce_add(to_double(piece_sum(piece, size, s.pivot)));
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
