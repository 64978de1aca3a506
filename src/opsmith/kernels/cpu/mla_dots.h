// Products of a few rows with a weight that lies as PyTorch keeps it, [N, K]: every row of the weight is read once, from
// end to end, and meets all tokens while it is in registers. Nothing is packed, so nothing is held twice.
#pragma once

#include "gemm_tile.h"

namespace opsmith {

constexpr int kDotTokens = 6;  // of a tile: with 4 rows of the weight, 24 accumulators
constexpr int kDotRows = 4;

// What x is stored as beside a weight of S, how much of K one step takes, and what a step does.
template <class T, class S>
struct Dots {
  using X = float;
  using Sum = Vec;
  static constexpr int64_t step = W;
  template <class Lanes>
  static Vec weight(const S* p, Lanes k) { return load(p, k); }
  static Vec row(const float* p) { return load(p); }
  static Vec mac(Vec x, Vec w, Vec sum) { return fma(x, w, sum); }
  static float total(Vec sum) { return reduce_add(sum); }
};

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
template <>
struct Dots<bfloat16, bfloat16> {
  using X = bfloat16;
  using Sum = Vec;
  static constexpr int64_t step = 2 * W;
  static __m512bh weight(const bfloat16* p, Full) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh weight(const bfloat16* p, int64_t left) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << left) - 1), p);
  }
  static __m512bh row(const bfloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Vec mac(__m512bh x, __m512bh w, Vec sum) { return (Vec)_mm512_dpbf16_ps((__m512)sum, x, w); }
  static float total(Vec sum) { return reduce_add(sum); }
};
#endif

// Integers: x in [-128, 127], sums exact in int32.
struct IntegerDots {
  using X = int8_t;
#if defined(OPSMITH_AVX512) && defined(__AVX512VNNI__)
  static constexpr int64_t step = 64;
#else
  static constexpr int64_t step = 16;
#endif
};

// out[m][r] = sum over K of x[m] w[r]. x is padded with zeros to whole steps, w is not. While these rows are read, those
// at `next` are asked for, so that memory is busy in the sums' last steps too; nullptr: nothing is.
template <class T, class S, int M, int R>
__attribute__((noinline)) void dot_tile(const typename Dots<T, S>::X* x, int64_t x_stride, const S* w, int64_t w_stride,
                                        int64_t depth, const S* next, float* out, int64_t out_stride) {
  using D = Dots<T, S>;
  typename D::Sum sum[M][R];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[m][r] = Vec{};
  }
  const int64_t ahead = next == nullptr ? 0 : next - w;
  int64_t k = 0;
  for (; k + D::step <= depth; k += D::step) {
    decltype(D::weight(w, Full{})) column[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const S* p = w + r * w_stride + k;
      prefetch_far(p + ahead);
      column[r] = D::weight(p, Full{});
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto v = D::row(x + m * x_stride + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[m][r] = D::mac(v, column[r], sum[m][r]);
    }
  }
  if (k < depth) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const S* p = w + r * w_stride + k;
      decltype(D::weight(p, Full{})) column;
      if constexpr (D::step == W) {
        column = D::weight(p, Part{int(depth - k)});
      } else {
        column = D::weight(p, depth - k);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) sum[m][r] = D::mac(D::row(x + m * x_stride + k), column, sum[m][r]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) out[m * out_stride + r] = D::total(sum[m][r]);
  }
}

// The same in integers; what comes out is exact.
template <int M, int R>
__attribute__((noinline)) void integer_tile(const int8_t* x, int64_t x_stride, const int8_t* w, int64_t w_stride,
                                            int64_t depth, const int8_t* next, int32_t* out, int64_t out_stride) {
#if defined(OPSMITH_AVX512) && defined(__AVX512VNNI__)
  // The instruction wants one unsigned factor: x + 128, of which 128 times the sum of the weights is taken again.
  const __m512i sign = _mm512_set1_epi8(int8_t(0x80)), ones = _mm512_set1_epi8(1);
  __m512i sum[M][R], weights[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    weights[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) sum[m][r] = _mm512_setzero_si512();
  }
  auto step = [&](int64_t k, auto load_weight) __attribute__((always_inline)) {
    __m512i column[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      column[r] = load_weight(w + r * w_stride + k);
      weights[r] = _mm512_dpbusd_epi32(weights[r], ones, column[r]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const __m512i v = _mm512_xor_si512(_mm512_loadu_si512(x + m * x_stride + k), sign);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[m][r] = _mm512_dpbusd_epi32(sum[m][r], v, column[r]);
    }
  };
  int64_t k = 0;
  const int64_t ahead = next == nullptr ? 0 : next - w;
  for (; k + 64 <= depth; k += 64) {
    step(k, [ahead](const int8_t* p) __attribute__((always_inline)) {
      prefetch_far(p + ahead);
      return _mm512_loadu_si512(p);
    });
  }
  if (k < depth) {
    const __mmask64 left = (__mmask64{1} << (depth - k)) - 1;
    step(k, [left](const int8_t* p) __attribute__((always_inline)) { return _mm512_maskz_loadu_epi8(left, p); });
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const int32_t extra = 128 * _mm512_reduce_add_epi32(weights[r]);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) out[m * out_stride + r] = _mm512_reduce_add_epi32(sum[m][r]) - extra;
  }
#else
  (void)next;  // the compiler's own loop has the hardware ask
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) {
      int32_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += int32_t(x[m * x_stride + k]) * int32_t(w[r * w_stride + k]);
      out[m * out_stride + r] = sum;
    }
  }
#endif
}

// Calls tile<M, R> for `tokens` <= kDotTokens and R = kDotRows or 1.
template <class F>
inline void with_tile(int64_t tokens, int64_t rows, F&& f) {
  auto of_rows = [&](auto m) {
    if (rows == kDotRows) return f(m, std::integral_constant<int, kDotRows>{});
    f(m, std::integral_constant<int, 1>{});
  };
  switch (tokens) {
    case 1: return of_rows(std::integral_constant<int, 1>{});
    case 2: return of_rows(std::integral_constant<int, 2>{});
    case 3: return of_rows(std::integral_constant<int, 3>{});
    case 4: return of_rows(std::integral_constant<int, 4>{});
    case 5: return of_rows(std::integral_constant<int, 5>{});
    default: return of_rows(std::integral_constant<int, kDotTokens>{});
  }
}

// out [tokens, rows] of rows of the weight, before those at `upcoming`; `tile(m, r, x, w, next, out)` computes one.
template <class X, class S, class O, class Tile>
inline void dot_rows(const X* x, int64_t x_stride, int64_t tokens, const S* w, int64_t w_stride, int64_t rows,
                     const S* upcoming, O* out, int64_t out_stride, const Tile& tile) {
  const int64_t tiles = ceil_div(tokens, kDotTokens);
  for (int64_t r = 0; r < rows;) {
    const int64_t count = rows - r >= kDotRows ? kDotRows : 1;
    const S* const after = r + count < rows ? w + (r + count) * w_stride : upcoming;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t t = i * tokens / tiles, some = (i + 1) * tokens / tiles - t;
      with_tile(some, count, [&](auto m, auto n) {
        tile(m, n, x + t * x_stride, w + r * w_stride, i == 0 ? after : nullptr, out + t * out_stride + r);
      });
    }
    r += count;
  }
}

}  // namespace opsmith
