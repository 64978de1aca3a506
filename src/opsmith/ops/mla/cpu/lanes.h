// Products of many tokens, which lie side by side in the lanes of vectors: a word of a weight's row, four bytes along K, is
// broadcast and meets that word of 16 tokens in one instruction. Beside the dot products of dots.h no sum has to be folded,
// a tile takes more rows, and of a product of bytes x is the unsigned factor, so that the weight is used as it lies.
#pragma once

#include "dots.h"

namespace opsmith::mla {

constexpr int kLaneSums = 24;  // of a tile: registers are left for a word of all tokens and one of the weight
constexpr int kLaneRows = 12;  // at most: rows that are half a page apart share few lines of the nearest cache

// Words of X times words of S, where there is an instruction for them.
template <class X, class S>
struct WordProduct {
  static constexpr bool exists = false;
};

#if defined(OPSMITH_AVX512) && defined(__AVX512VNNI__)
template <>
struct WordProduct<int8_t, int8_t> {
  static constexpr bool exists = true;
  using Sum = IVec;
  static IVec lanes(IVec x) { return x ^ int32_t(0x80808080); }  // unsigned: plus 128,
  static Sum mac(IVec x, IVec w, Sum sum) { return dot4(sum, bytes_of(x), four_of(w)); }

  // of which 128 times the sum of a row is taken again: summed a line of each row at a time.
  template <int R>
  struct Excess {
    IVec sum[R] = {};
    void add(const int8_t* w, int64_t w_stride) {
      const Bytes ones = bytes_of(0x01010101 - IVec{});
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) sum[r] = dot4(sum[r], ones, four_of(load_words(w + r * w_stride)));
    }
    void add_some(const int8_t* w, int64_t w_stride, int64_t count) {
      for (int r = 0; r < R; ++r) {
        for (int64_t k = 0; k < count; ++k) sum[r][0] += w[r * w_stride + k];
      }
    }
    template <int V>
    void take(Sum (&from)[R][V]) {
      constexpr int G = R % 4 == 0 ? 4 : 2;
      int32_t total[R];
      for (int r = 0; r < R; r += G) store_totals(reinterpret_cast<IVec(&)[G]>(sum[r]), total + r);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) from[r][v] -= int32_t(128u * uint32_t(total[r]));
      }
    }
  };
};
#endif

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
template <>
struct WordProduct<bfloat16, bfloat16> {
  static constexpr bool exists = true;
  using Sum = Vec;
  static IVec lanes(IVec x) { return x; }
  static Sum mac(IVec x, IVec w, Sum sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
  }
  template <int R>
  struct Excess {
    void add(const bfloat16*, int64_t) {}
    void add_some(const bfloat16*, int64_t, int64_t) {}
    template <int V>
    void take(Sum (&)[R][V]) {}
  };
};
#endif

// Vectors that hold a word of all tokens; 0 where too many of their lanes would be empty.
inline int64_t lane_vectors(int64_t tokens) {
  const int64_t vectors = ceil_div(tokens, W);
  if (vectors == 1) return tokens >= 13 ? 1 : 0;
  return vectors <= 4 && 12 * tokens >= 11 * W * vectors ? vectors : 0;
}

// Rows of x, whole vectors of them, as lanes: to[word][vector].
template <class Product, class X>
void to_lanes(const X* x, int64_t stride, int64_t tokens, int64_t vectors, IVec* to) {
  constexpr int64_t step = W * 4 / sizeof(X);
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t k = 0; k < stride; k += step) {
      Vec block[W] = {};
      for (int64_t i = 0; i < std::min<int64_t>(W, tokens - v * W); ++i) {
        block[i] = (Vec)load_words(x + (v * W + i) * stride + k);
      }
      transpose(block);
      for (int i = 0; i < W; ++i) to[(k / step * W + i) * vectors + v] = Product::lanes((IVec)block[i]);
    }
  }
}

// out[t][r] = sum over K of x[t] w[r] for R rows.
template <class Product, int V, int R, class S, class O>
__attribute__((noinline)) void lane_tile(const IVec* x, int64_t tokens, const S* w, int64_t w_stride,
                                         int64_t depth, Fetch fetch, O* out, int64_t out_stride) {
  constexpr int64_t n = 4 / sizeof(S), line = 64 / sizeof(S);
  typename Product::Sum sum[R][V] = {};
  typename Product::template Excess<R> excess;
  auto add = [&](int64_t k, int64_t some) __attribute__((always_inline)) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t word = 0;
      std::memcpy(&word, w + r * w_stride + k, size_t(some) * sizeof(S));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[r][v] = Product::mac(x[v], word - IVec{}, sum[r][v]);
    }
    x += V;
  };
  int64_t k = 0;
  while (k + line <= depth) {
    fetch.template step<64, R>(w + k);
    for (const int64_t end = k + line; k < end; k += n) add(k, n);
    excess.add(w + k - line, w_stride);  // in the nearest cache by now
  }
  excess.add_some(w + k, w_stride, depth - k);
  for (; k < depth; k += n) add(k, std::min(n, depth - k));
  excess.take(sum);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Vec block[W] = {};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) block[r] = (Vec)sum[r][v];
    transpose(block);
    for (int64_t i = 0; i < std::min<int64_t>(W, tokens - v * W); ++i) {
      store(reinterpret_cast<float*>(out + (v * W + i) * out_stride), block[i], Part{R});
    }
  }
}

// What `dot_rows` computes, of as many rows as fill tiles, and their number; x null: of none. The rows that come are asked for
// in the order in which they lie.
template <class Product, class S, class O>
int64_t lane_rows(const IVec* x, int64_t tokens, const S* w, int64_t w_stride, int64_t rows, int64_t depth,
                  const Ahead& ahead, O* out, int64_t out_stride) {
  if constexpr (Product::exists) {
    auto tiles = [&](auto v) {
      constexpr int V = v(), R = std::min(kLaneRows, kLaneSums / V);
      const int64_t row_bytes = w_stride * int64_t(sizeof(S));
      int64_t r = 0;
      for (; r + R <= rows; r += R) {
        const Fetch fetch{ahead(r * row_bytes + std::max(kAheadBytes, 2 * R * row_bytes)), R, kAgainBytes};
        lane_tile<Product, V, R>(x, tokens, w + r * w_stride, w_stride, depth, fetch, out + r, out_stride);
      }
      return r;
    };
    switch (x ? lane_vectors(tokens) : 0) {
      case 1: return tiles(std::integral_constant<int, 1>{});
      case 2: return tiles(std::integral_constant<int, 2>{});
      case 3: return tiles(std::integral_constant<int, 3>{});
      case 4: return tiles(std::integral_constant<int, 4>{});
    }
  }
  return 0;
}

}  // namespace opsmith::mla
