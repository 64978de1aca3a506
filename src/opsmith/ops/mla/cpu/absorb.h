// q_out = q_nope @ wuk of one head: the weight [nope, kv_lora] is read once, in the order in which it lies, some rows at a
// time, which all tokens meet while they are in the nearest cache.
#pragma once

#include "dots.h"
#include "latent_rows.h"
#include "pair.h"

namespace opsmith::mla {

constexpr int64_t kAbsorbRows = 16;

// The next rows, asked for a column at a time, some of the columns by each tile.
struct AbsorbFetch {
  const char* at;
  int64_t begin, end;  // of the bytes of a row
  void operator()(int64_t byte, int64_t row_bytes, int64_t rows) const {
    if (byte < begin || byte >= end || byte % 64 != 0) return;
    for (int64_t n = 0; n < rows; ++n) prefetch_far(at + n * row_bytes + byte);
  }
};

// out[m][c] (+)= sum over n of q[m][n] w[n][c]; sums of pairs keep their order until the last rows.
template <class T, int M>
void absorb_tile(const float* q, int64_t q_stride, const T* w, int64_t columns, int64_t rows,
                 const AbsorbFetch& fetch, bool first, bool last, float* out) {
  const auto block = [&](int64_t c, auto k) {
    decltype(load(out, k)) sum[M];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sum[m] = first ? decltype(load(out, k)){} : load(out + m * columns + c, k);
    fetch(c * int64_t(sizeof(T)), columns * int64_t(sizeof(T)), rows);
    for (int64_t n = 0; n < rows; ++n) {
      const auto column = load(w + n * columns + c, k);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m] = fma(column, q[m * q_stride + n], sum[m]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      if constexpr (std::is_same_v<decltype(k), Both>) {
        if (last) sum[m] = interleave(sum[m]);
      }
      store(out + m * columns + c, sum[m], k);
    }
  };
  if (in_pairs<T> && columns % (2 * W) == 0) {
    for (int64_t c = 0; c < columns; c += 2 * W) block(c, Both{});
  } else {
    for_lanes(columns, block);
  }
}

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
// The same two rows at a time: an instruction multiplies pairs that lie one below the other, once they are interleaved.
// That leaves the sums of 32 columns in another order, in which they stay until the last rows. N blocks of 32 columns.
template <int M, int N>
inline void absorb_pairs(const bfloat16* q, int64_t q_stride, const bfloat16* w, int64_t columns,
                         int64_t rows, const Ahead* next, int64_t at, bool first, bool last, float* out) {
  Vec low[M][N], high[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      low[m][j] = first ? Vec{} : load(out + m * columns + 2 * W * j);
      high[m][j] = first ? Vec{} : load(out + m * columns + 2 * W * j + W);
    }
  }
  for (int64_t n = 0; n < rows; n += 2) {
    const char* const asked = next ? (*next)(at + n * columns * 2) : nullptr;
    __m512bh even[N], odd[N];
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      const bfloat16* const p = w + n * columns + 2 * W * j;
      if (asked) {
        prefetch_far(asked + 4 * W * j);
        prefetch_far(asked + columns * 2 + 4 * W * j);
      }
      const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + columns);
      even[j] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      odd[j] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      float pair;
      std::memcpy(&pair, q + m * q_stride + n, sizeof pair);
      const __m512bh x = (__m512bh)_mm512_set1_ps(pair);
#pragma GCC unroll 2
      for (int j = 0; j < N; ++j) {
        low[m][j] = (Vec)_mm512_dpbf16_ps((__m512)low[m][j], x, even[j]);
        high[m][j] = (Vec)_mm512_dpbf16_ps((__m512)high[m][j], x, odd[j]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
    for (int j = 0; j < N; ++j) {
      float* const to = out + m * columns + 2 * W * j;
      if (last) {
        store_in_order(to, low[m][j], high[m][j]);
      } else {
        store(to, low[m][j]);
        store(to + W, high[m][j]);
      }
    }
  }
}

// Sums of few tokens are added to in memory, so that the weight is read nearly as it lies; those of more would come and go
// for longer than the products take, and stay in registers for as many rows.
constexpr int64_t kFewTokens = 4, kDeepRows = 128;

// R rows for one token, over all columns, its sums in memory. Meanwhile as many bytes are asked for, and a byte of each line of
// `next`, which were, is loaded: what it loads the processor cannot drop, as it may what it is only asked for.
template <int R>
inline void absorb_rows(const bfloat16* x, const bfloat16* w, const char* next, const char* asked,
                        int64_t columns, float* out) {
  __m512bh pair[R / 2];
#pragma GCC unroll 2
  for (int j = 0; j < R / 2; ++j) {
    float two;
    std::memcpy(&two, x + 2 * j, sizeof two);
    pair[j] = (__m512bh)_mm512_set1_ps(two);
  }
  for (int64_t c = 0; c < columns; c += 2 * W) {
#pragma GCC unroll 4
    for (int j = 0; j < R; ++j, asked += 64) {
      prefetch_far(asked);
      if (next) (void)*static_cast<const volatile char*>(next + (j + R * (c / (2 * W))) * 64);
    }
    Vec low = load(out + c), high = load(out + c + W);
#pragma GCC unroll 2
    for (int j = 0; j < R / 2; ++j) {
      const bfloat16* const p = w + 2 * j * columns + c;
      const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + columns);
      low = (Vec)_mm512_dpbf16_ps((__m512)low, pair[j], (__m512bh)_mm512_unpacklo_epi16(a, b));
      high = (Vec)_mm512_dpbf16_ps((__m512)high, pair[j], (__m512bh)_mm512_unpackhi_epi16(a, b));
    }
    store(out + c, low);
    store(out + c + W, high);
  }
}

// For one token, whose products take a fraction of the time that the weight takes to come: in the order in which it lies.
inline void absorb_one(const float* q, const bfloat16* w, int64_t rows, int64_t columns, const Ahead& ahead,
                       float* out) {
  constexpr int R = 4;
  const int64_t row_bytes = columns * int64_t(sizeof(bfloat16));
  std::fill_n(out, columns, 0.0f);
  for (int64_t n = 0; n < rows; n += R, w += R * columns) {
    bfloat16 x[R];
    const int64_t left = rows - n;
    for (int64_t i = 0; i < std::min<int64_t>(R, left); ++i) x[i] = from_float<bfloat16>(q[n + i]);
    const char* const next = left >= 2 * R ? reinterpret_cast<const char*>(w + R * columns) : nullptr;
    const char* const asked = ahead((n + 2 * R) * row_bytes);
    if (left >= R) {
      absorb_rows<R>(x, w, next, asked, columns, out);
    } else {
      absorb_rows<2>(x, w, next, asked, columns, out);
    }
  }
  for (int64_t c = 0; c < columns; c += 2 * W) store_in_order(out + c, load(out + c), load(out + c + W));
}

inline void absorb_in_pairs(const float* q, int64_t q_stride, int64_t tokens, const bfloat16* w, int64_t rows,
                            int64_t columns, const Ahead& ahead, float* out) {
  const int64_t tiles = ceil_div(tokens, kDotTokens), group = tokens <= kFewTokens ? kAbsorbRows : kDeepRows;
  for (int64_t n = 0; n < rows; n += group) {
    const int64_t some = std::min(group, rows - n);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t t = i * tokens / tiles;
      with_tile((i + 1) * tokens / tiles - t, 1, [&](auto m, auto) {
        bfloat16 x[m() * kDeepRows];
        for (int j = 0; j < m(); ++j) {
          for_lanes(some, [&](int64_t k, auto l) {
            store(x + j * kDeepRows + k, load(q + (t + j) * q_stride + n + k, l), l);
          });
        }
        auto block = [&](auto blocks, int64_t c) {
          absorb_pairs<m(), blocks()>(x, kDeepRows, w + n * columns + c, columns, some,
                                      i == 0 ? &ahead : nullptr, (n * columns + c) * 2 + kAheadBytes, n == 0,
                                      n + some == rows, out + t * columns + c);
        };
        int64_t c = 0;
        for (; c + 4 * W <= columns; c += 4 * W) block(std::integral_constant<int, 2>{}, c);
        if (c < columns) block(std::integral_constant<int, 1>{}, c);
      });
    }
  }
}
#endif

// out [tokens, columns] of q [tokens, rows], whose numbers are T's; the weight is the first bytes of `ahead`.
template <class T>
void absorb(const float* q, int64_t q_stride, int64_t tokens, const T* w, int64_t rows, int64_t columns,
            const Ahead& ahead, float* out) {
#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, bfloat16>) {
    const bool pairs = columns % (2 * W) == 0 && rows % 2 == 0;
    if (pairs && tokens == 1) return absorb_one(q, w, rows, columns, ahead, out);
    if (pairs) return absorb_in_pairs(q, q_stride, tokens, w, rows, columns, ahead, out);
  }
#endif
  const int64_t row_bytes = columns * int64_t(sizeof(T)), tiles = ceil_div(tokens, kDotTokens);
  for (int64_t n = 0; n < rows; n += kAbsorbRows) {
    const int64_t some = std::min(kAbsorbRows, rows - n), at = n * row_bytes;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t t = i * tokens / tiles;
      const AbsorbFetch fetch{ahead(at + kAheadBytes), i * row_bytes / tiles, (i + 1) * row_bytes / tiles};
      with_tile((i + 1) * tokens / tiles - t, 1, [&](auto m, auto) {
        absorb_tile<T, m()>(q + t * q_stride + n, q_stride, w + n * columns, columns, some, fetch, n == 0,
                            n + some == rows, out + t * columns);
      });
    }
  }
}

// Whether the queries of a call that reads so many bytes of weights are written past the cache.
template <class T>
bool streams(const View& q_out, int64_t tokens, int64_t read) {
  const int64_t unit = 2 * W, *const size = q_out.sizes, *const stride = q_out.strides;
  const bool whole = q_out.dtype != DType::i8 && size[2] % unit == 0 && can_stream_both(q_out.as<T>());
  const bool lines = stride[0] * int64_t(sizeof(T)) % 64 == 0 && stride[1] * int64_t(sizeof(T)) % 64 == 0;
  return whole && lines && outlives_cache(read + tokens * size[1] * size[2] * int64_t(sizeof(T)), 1);
}

// Of some tokens, q [tokens, nope + rope], whose numbers are T's. `then` is read after this head's weight, or null;
// `table` holds 2 rope floats, `out` tokens * kv_lora.
template <class T>
void finish_head(const Queries& c, int64_t h, int64_t first, int64_t tokens, const float* q, const char* then,
                 float* table, float* out) {
  const int64_t nope = c.wuk.sizes[1], kv_lora = c.wuk.sizes[2], rope = c.q_rope.sizes[2], head = nope + rope;
  for (int64_t t = 0; rope > 0 && t < tokens; ++t) {
    table_row(c.rotation, first + t, rope, table);
    T* const to = c.q_rope.as<T>() + (first + t) * c.q_rope.strides[0] + h * c.q_rope.strides[1];
    rotate(q + t * head + nope, rope, c.rotation, table, to);
  }
  const T* const weight = c.wuk.as<T>() + h * c.wuk.strides[0];
  const char* const base = reinterpret_cast<const char*>(weight);
  absorb(q, head, tokens, weight, nope, kv_lora,
         {base, nope * kv_lora * int64_t(sizeof(T)), then ? then : base}, out);
  const int64_t at = first * c.q_out.strides[0] + h * c.q_out.strides[1];
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t to = at + t * c.q_out.strides[0];
    const float* const from = out + t * kv_lora;
    if (c.q_nope_scale.defined()) {
      const float scale = c.q_nope_scale.as<float>()[h];
      for_lanes(kv_lora, [&](int64_t i, auto k) {
        store_q8(c.q_out.as<int8_t>() + to + i, round_to<T>(load(from + i, k)) * scale, k);
      });
    } else if (c.streaming) {
      for (int64_t i = 0; i < kv_lora; i += 2 * W) {
        put_in_order(c.q_out.as<T>() + to + i, Pair{load(from + i), load(from + i + W)}, true);
      }
    } else {
      for_lanes(kv_lora, [&](int64_t i, auto k) { store(c.q_out.as<T>() + to + i, load(from + i, k), k); });
    }
  }
}

}  // namespace opsmith::mla
