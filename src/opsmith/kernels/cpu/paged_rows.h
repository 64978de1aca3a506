// Query rows against keys and values that lie where they lie: a list of pointers, one for each key.
//
// Nothing is packed: each key serves a handful of query rows, and packing it would take longer than that.
#pragma once

#include <utility>

#include "gemm_tile.h"

namespace opsmith {

constexpr int64_t kPagedTile = 128;  // keys at a time, at most: a multiple of W

// Asks for rows of memory in the order in which they lie, as many bytes at a time as are used meanwhile: the processor's
// own prefetcher, which this sets going, fetches too little ahead of arithmetic as dense as this.
struct Ahead {
  const char* const* rows = nullptr;
  int64_t left = 0;    // rows
  int64_t offset = 0;  // of the first byte wanted of each
  int64_t bytes = 0;
  int64_t at = 0, due = 0;

  void ask(int64_t more) {
    for (due += more; due > 0 && left > 0; due -= 64) {
      prefetch_far(*rows + offset + at);
      if ((at += 64) >= bytes) ++rows, --left, at = 0;
    }
  }
};

// W vectors to one: lane i is the sum of vector i's lanes.
template <int h = W / 2>
inline __attribute__((always_inline)) void fold(Vec* v) {
#pragma GCC unroll 8
  for (int i = 0; i < h; ++i) {
    exchange<h>(v[i], v[i + h], std::make_integer_sequence<int, W>{});
    v[i] += v[i + h];
  }
  if constexpr (h > 1) fold<h / 2>(v);
}

// scores[r * kPagedTile + j] = q[r] . key j, for R rows of q, `depth` units each. Keys come W / R at a time: pointers
// must be readable up to a multiple of that.
template <class Units, int R, class T>
__attribute__((noinline)) void score_keys(const float* q, int64_t depth, const T* const* keys, Ahead& ahead, int64_t head, int64_t tokens,
                                          int64_t dim, float* scores) {
  constexpr int together = W / R, step = W * Units::per_unit;
  const int64_t whole = dim / step * step;
  for (int64_t j = 0; j < tokens; j += together) {
    const T* row[together];
    for (int t = 0; t < together; ++t) row[t] = keys[j + t] + head;
    Vec sum[W] = {};
    for (int64_t c = 0; c < whole; c += step) {
      ahead.ask(together * step * int64_t(sizeof(T)));
      Vec x[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) x[r] = load(q + r * depth + c / Units::per_unit);
#pragma GCC unroll 16
      for (int t = 0; t < together; ++t) {
        const Vec y = load_units<Units>(row[t], c, c + step);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r * together + t] = Units::mac(x[r], y, sum[r * together + t]);
      }
    }
    if (whole < dim) {
      for (int t = 0; t < together; ++t) {
        const Vec y = load_units<Units>(row[t], whole, dim);
        for (int r = 0; r < R; ++r) {
          sum[r * together + t] = Units::mac(load(q + r * depth + whole / Units::per_unit), y, sum[r * together + t]);
        }
      }
    }
    fold(sum);
    float lanes[W];
    store(lanes, sum[0]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) std::memcpy(scores + r * kPagedTile + j, lanes + r * together, together * sizeof(float));
  }
}

// sums[r * width + ...] += weights[r] . values, for R rows of weights and N groups of values: a group is what one vector
// of Units holds of a row. Sums of a group of pairs are kept in the order of `in_order`.
template <class Units, int R, int N, bool tail, class T>
__attribute__((noinline)) void add_values(const typename Units::Element* weights, const T* const* values, Ahead& ahead, int64_t at,
                                          int64_t tokens, int64_t left, float* sums, int64_t width) {
  constexpr int pair = Units::per_unit, step = W * pair;
  Vec sum[R][N * pair] = {};
  for (int64_t j = 0; j < tokens; j += pair) {
    ahead.ask(pair * N * step * int64_t(sizeof(T)));
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      Vec column[pair];
      const int64_t until = tail ? left : (n + 1) * step;
      if constexpr (pair == 2) {
#if defined(OPSMITH_AVX512)
        const __m512i a = (__m512i)load_units<Units>(values[j] + at, n * step, until);
        const __m512i b = (__m512i)load_units<Units>(values[j + 1] + at, n * step, until);
        column[0] = (Vec)_mm512_unpacklo_epi16(a, b);
        column[1] = (Vec)_mm512_unpackhi_epi16(a, b);
#endif
      } else {
        column[0] = load_units<Units>(values[j] + at, n * step, until);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const Vec w = Units::broadcast(reinterpret_cast<const float*>(weights + r * kPagedTile + j));
#pragma GCC unroll 2
        for (int i = 0; i < pair; ++i) sum[r][n * pair + i] = Units::mac(w, column[i], sum[r][n * pair + i]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < N * pair; ++n) {
      float* p = sums + r * width + n * W;
      store(p, load(p) + sum[r][n]);
    }
  }
}

// A row of sums as `add_values` leaves it, in the order of the values' elements.
template <class Units>
inline void in_order(float* sums, int64_t width) {
  if constexpr (Units::per_unit == 2) {
#if defined(OPSMITH_AVX512)
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t c = 0; c < width; c += 2 * W) {
      const Vec a = load(sums + c), b = load(sums + c + W);
      store(sums + c, (Vec)_mm512_permutex2var_ps((__m512)a, first, (__m512)b));
      store(sums + c + W, (Vec)_mm512_permutex2var_ps((__m512)a, second, (__m512)b));
    }
#endif
  }
}

// The product with all `dim` values of a head.
template <class Units, int R, class T>
inline void add_all_values(const typename Units::Element* weights, const T* const* values, Ahead& ahead, int64_t head, int64_t tokens,
                           int64_t dim, float* sums, int64_t width) {
  constexpr int pair = Units::per_unit, step = W * pair, most = (W == 16 ? 16 : 8) / (R * pair);
  int64_t c = 0;
  const auto groups = [&](auto n) {
    constexpr int N = decltype(n)::value;
    if constexpr (N <= most) {
      for (; c + N * step <= dim; c += N * step) {
        add_values<Units, R, N, false, T>(weights, values, ahead, head + c, tokens, 0, sums + c, width);
      }
    }
  };
  groups(std::integral_constant<int, 8>{});
  groups(std::integral_constant<int, 4>{});
  groups(std::integral_constant<int, 2>{});
  groups(std::integral_constant<int, 1>{});
  if (c < dim) {
    add_values<Units, R, 1, true, T>(weights, values, ahead, head + c, tokens, dim - c, sums + c, width);
  }
}

}  // namespace opsmith
