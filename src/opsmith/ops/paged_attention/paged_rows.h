// Query rows against keys and values that lie where they lie: a list of pointers, one for each key.
//
// Nothing is packed: each key serves a handful of query rows, and packing it would take longer than that. Scores stand
// flat, all rows of a token and then those of the next one, `rows` lanes a token: a multiple of W, or a power of 2
// below it, so that a vector holds some rows of one token or all rows of some tokens.
#pragma once

#include <utility>

#include "gemm_tile.h"

namespace opsmith {

constexpr int64_t kPagedTile = 128;  // keys at a time, at most: a multiple of 2 * W

// What is read of a key or value at once, in vectors of floats.
template <class T>
constexpr int kVectors = in_pairs<T> ? 2 : UnitsOf<T>::per_unit;

// A loop asks for what it reads of a token in the token `skip` further on: in the order in which it will read, and as evenly.
// Addresses to ask for are numbers: behind a row or the last token lies nothing, which no pointer may be given.
inline void ask(uintptr_t address) { prefetch_far(reinterpret_cast<const void*>(address)); }

// The query rows that meet a token: `lanes` of them, rows that only fill up a vector included. R rows that share a key
// head are a unit; `offset` says where its head begins in a token's row.
struct Rows {
  const float* q;
  int64_t depth;  // of a row, in units of the product
  int64_t lanes;
  int64_t count;  // of rows, without those that fill up
  const int64_t* offset;
};

constexpr int kUnit = W / 2 < 4 ? W / 2 : 4;  // rows of a head that are multiplied at once, at most

// Scores of `tokens` tokens, a multiple of what a vector of scores holds, one token after the other: the processor fetches
// ahead what is read in order. A head has `fixed` vectors, if that is not 0: loops of a known length take a quarter less time.
template <class Units, int R, int fixed, class T>
__attribute__((noinline)) void score_keys(const Rows& rows, const T* const* keys, int64_t skip,
                                          int64_t tokens, int64_t dim, float* scores) {
  constexpr int64_t step = W * kVectors<T>, line = 64 / int64_t(sizeof(T));
  const int64_t whole = fixed ? fixed * step : dim / step * step;
  const int64_t depth = fixed ? fixed * step / Units::per_unit : rows.depth;
  const int64_t units = rows.count / R, all = rows.lanes / R;
  const T* const* const end = keys + tokens;
  int64_t unit = 0;
  while (keys < end) {
    Vec sum[W];
#pragma GCC unroll 8
    for (int u = 0; u < W / R; ++u) {
      Vec a[R] = {};
      if (unit < units) {
        const int64_t at = rows.offset[unit];
        const T* const key = *keys + at;
        const uintptr_t far = uintptr_t(keys[skip]) + at * sizeof(T);
        const float* q = rows.q + unit * R * depth;
        const auto ask_for = [&](int64_t c) {
          if (step >= line || c % line == 0) ask(far + c * sizeof(T));
        };
        const auto add = [&](int64_t c, int64_t until) {
          if constexpr (in_pairs<T>) {
            const Pair x = load_pair(key + c, until - c);
            for (int r = 0; r < R; ++r) a[r] = Units::mac(load(q + r * depth + c), x.a, a[r]);
            for (int r = 0; r < R; ++r) a[r] = Units::mac(load(q + r * depth + c + W), x.b, a[r]);
          } else {
            const Vec x = load_units<Units>(key, c, until);
            for (int r = 0; r < R; ++r) a[r] = Units::mac(load(q + r * depth + c / Units::per_unit), x, a[r]);
          }
        };
        if constexpr (fixed) {
#pragma GCC unroll 8
          for (int64_t c = 0; c < fixed * step; c += step) ask_for(c), add(c, c + step);
        } else {
          for (int64_t c = 0; c < whole; c += step) ask_for(c), add(c, c + step);
          if (whole < dim) add(whole, dim);
        }
      }
      for (int r = 0; r < R; ++r) sum[u * R + r] = a[r];
      if (++unit == all) {
        unit = 0;
        ++keys;
      }
    }
    store(scores, fold<Units>(sum));
    scores += W;
  }
}

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
// The same for heads of 4 rows with `fixed` vectors each, four tokens at a time: a vector of a query, once loaded, meets all four, where
// loads took longer than products. They are every fourth of sixteen: large tokens are then on four pages, and memory serves several
// pages sooner than one after the other.
constexpr int64_t kSixteen = 16;
template <int fixed>
__attribute__((noinline)) void score_fours(const Rows& rows, const bfloat16* const* keys, int64_t skip,
                                           int64_t tokens, float* scores) {
  constexpr int R = 4, N = 4, apart = kSixteen / N;
  const auto every_fourth = [&](const bfloat16* const* keys, float* scores) {
    for (int64_t row = 0; row < rows.count; row += R) {
      Vec sum[W] = {};  // of each token's rows
      const int64_t at = rows.offset[row / R];
#pragma GCC unroll 4
      for (int c = 0; c < fixed; ++c) {
        Vec key[N];
        for (int t = 0; t < N; ++t) {
          ask(uintptr_t(keys[skip + t * apart] + at + 2 * W * c));
          key[t] = (Vec)_mm512_loadu_si512(keys[t * apart] + at + 2 * W * c);
        }
        for (int r = 0; r < R; ++r) {
          const Vec q = load(rows.q + ((row + r) * fixed + c) * W);
          for (int t = 0; t < N; ++t) sum[t * R + r] = BFloatUnits::mac(q, key[t], sum[t * R + r]);
        }
      }
      const __m512 all = (__m512)fold<BFloatUnits>(sum);
      float* const to = scores + row;
      _mm_storeu_ps(to, _mm512_castps512_ps128(all));
      _mm_storeu_ps(to + apart * rows.lanes, _mm512_extractf32x4_ps(all, 1));
      _mm_storeu_ps(to + 2 * apart * rows.lanes, _mm512_extractf32x4_ps(all, 2));
      _mm_storeu_ps(to + 3 * apart * rows.lanes, _mm512_extractf32x4_ps(all, 3));
    }
  };
  for (int64_t j = 0; j < tokens; j += kSixteen) {
    for (int64_t i = j; i < j + apart; ++i) every_fourth(keys + i, scores + i * rows.lanes);
  }
}
#endif

// Weights of tokens as `add_values` takes them: those of a token, or of the two that a unit holds: of each 2 * apart
// tokens the i-th and the one `apart` further on, apart being how many tokens a vector of scores holds.
struct Weights {
  const float* data;
  int64_t lanes;  // of a token or pair
  int64_t apart;
};

// sums[r * width + ...] += weights[r] . values, for R rows of weights and `count` times N groups of values: a group is what
// one vector of Units holds of a row. Sums of a group of pairs are kept in the order of `in_order`.
template <class Units, int R, int N, bool tail, class T>
__attribute__((noinline)) void add_values(Weights weights, const T* const* values, int64_t skip, int64_t at,
                                          int64_t tokens, int64_t count, int64_t left, float* sums,
                                          int64_t width) {
  constexpr int pair = Units::per_unit, vectors = N * kVectors<T>, step = W * kVectors<T>;
  constexpr int line = 64 / int(sizeof(T)), lines = std::max(1, N * step / line);  // of a token
  for (int64_t g = 0; g < count; ++g, at += N * step, sums += N * step) {
    Vec sum[R][vectors] = {};
#pragma GCC unroll 2
    for (int64_t j = 0; j < tokens / pair; ++j) {
      const T* const* const first = values + (pair == 1 ? j : j + (j & -weights.apart));
      const T* const* const second = first + (pair == 1 ? 0 : weights.apart);
      const T *const value = *first + at, *const other = *second + at;
      const float* const w = weights.data + j * weights.lanes;
      Vec column[vectors];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const int64_t until = tail ? left : (n + 1) * step;
        if constexpr (in_pairs<T>) {
          const Pair some = load_pair(value + n * step, until - n * step);
          column[2 * n] = some.a;
          column[2 * n + 1] = some.b;
        } else if constexpr (pair == 2) {
#if defined(OPSMITH_AVX512)
          const __m512i a = (__m512i)load_units<Units>(value, n * step, until);
          const __m512i b = (__m512i)load_units<Units>(other, n * step, until);
          column[2 * n] = (Vec)_mm512_unpacklo_epi16(a, b);
          column[2 * n + 1] = (Vec)_mm512_unpackhi_epi16(a, b);
#endif
        } else {
          column[n] = load_units<Units>(value, n * step, until);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
        for (int i = pair * lines * r / R; i < pair * lines * (r + 1) / R; ++i) {
          ask(uintptr_t((i < lines ? first : second)[skip]) + (at + i % lines * line) * sizeof(T));
        }
        const Vec x = Units::broadcast(w + r);
        for (int i = 0; i < vectors; ++i) sum[r][i] = Units::mac(x, column[i], sum[r][i]);
      }
    }
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < vectors; ++n) {
        float* p = sums + r * width + n * W;
        store(p, load(p) + sum[r][n]);
      }
    }
  }
}

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
// The same for sixteen tokens and all heads, where a head has 4 * `units` rows and D values: so few that memory is read nearly as it
// lies, and so many that the values come from the second-level cache and not the sums, which are as large as eight tokens.
template <int D>
__attribute__((noinline)) void add_sixteen(const float* weights, int64_t lanes, const bfloat16* const* values,
                                           int64_t skip, int64_t at, int64_t head_stride, int64_t heads,
                                           int64_t units, float* sums) {
  constexpr int pairs = kSixteen / 2;
  for (int64_t h = 0; h < heads; ++h, at += head_stride, weights += 4 * units, sums += 4 * units * D) {
#pragma GCC unroll 1
    for (int64_t c = 0; c < D; c += 2 * W) {
      __m512i column[pairs][2];
#pragma GCC unroll 8
      for (int j = 0; j < pairs; ++j) {
        const __m512i a = _mm512_loadu_si512(values[2 * j] + at + c),
                      b = _mm512_loadu_si512(values[2 * j + 1] + at + c);
        column[j][0] = _mm512_unpacklo_epi16(a, b);
        column[j][1] = _mm512_unpackhi_epi16(a, b);
      }
      for (int64_t u = 0; u < units; ++u) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
          for (int i = 4 * r; u == 0 && i < 4 * (r + 1); ++i) ask(uintptr_t(values[skip + i] + at + c));
          float* const to = sums + (4 * u + r) * D + c;
          Vec sum[2] = {load(to), load(to + W)};
#pragma GCC unroll 8
          for (int j = 0; j < pairs; ++j) {
            const Vec x = splat(weights[j * lanes + 4 * u + r]);
            sum[0] = BFloatUnits::mac(x, (Vec)column[j][0], sum[0]);
            sum[1] = BFloatUnits::mac(x, (Vec)column[j][1], sum[1]);
          }
          store(to, sum[0]);
          store(to + W, sum[1]);
        }
      }
    }
  }
}
#endif

// A row of sums as `add_values` leaves it, in the order of the values' elements.
template <class Units, class T>
inline void in_order(float* sums, int64_t width) {
  if constexpr (in_pairs<T>) {
    even_beside_odd(sums, width);
  } else if constexpr (Units::per_unit == 2) {
#if defined(OPSMITH_AVX512)
    for (int64_t c = 0; c < width; c += 2 * W) store_in_order(sums + c, load(sums + c), load(sums + c + W));
#endif
  }
}

// The product with all `dim` values of a head.
template <class Units, int R, class T>
inline void add_all_values(Weights weights, const T* const* values, int64_t skip, int64_t head,
                           int64_t tokens, int64_t dim, float* sums, int64_t width) {
  constexpr int step = W * kVectors<T>, most = (W == 16 ? 16 : 8) / (R * kVectors<T>);
  int64_t c = 0;
  const auto groups = [&](auto n) {
    constexpr int N = decltype(n)::value;
    if constexpr (N <= most) {
      if (const int64_t count = (dim - c) / (N * step)) {
        add_values<Units, R, N, false, T>(weights, values, skip, head + c, tokens, count, 0, sums + c, width);
        c += count * N * step;
      }
    }
  };
  groups(std::integral_constant<int, 8>{});
  groups(std::integral_constant<int, 4>{});
  groups(std::integral_constant<int, 2>{});
  groups(std::integral_constant<int, 1>{});
  if (c < dim) {
    add_values<Units, R, 1, true, T>(weights, values, skip, head + c, tokens, 1, dim - c, sums + c, width);
  }
}

}  // namespace opsmith
