// Products of many tokens, side by side in the lanes of vectors. Of bytes x is the unsigned factor: the weight is used as it lies.
#pragma once

#include "dots.h"
#include "lane_tile.h"

namespace opsmith {

#if defined(OPSMITH_AVX512) && defined(__AVX512VNNI__)
template <>
struct WordProduct<int8_t, int8_t> {
  static constexpr bool exists = true;
  static constexpr int64_t chain = int64_t{1} << 40;  // exact
  using Sum = IVec;
  static IVec lanes(IVec x) { return x ^ int32_t(0x80808080); }  // unsigned: plus 128,
  static Sum mac(IVec x, IVec w, Sum sum) { return dot(sum, bytes_of(x), four_of(w)); }

  // of which 128 times the sum of a row is taken again: summed a line of each row at a time.
  template <int R>
  struct Excess {
    IVec sum[R] = {};
    void add(const int8_t* w, int64_t w_stride) {
      const Bytes ones = bytes_of(0x01010101 - IVec{});
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) sum[r] = dot(sum[r], ones, four_of(load_words(w + r * w_stride)));
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

namespace mla {

constexpr int kLaneSums = 24;  // of a tile: registers are left for a word of all tokens and one of the weight
constexpr int kLaneVectors = 4;  // at most, of a word of all tokens
constexpr int kLaneRows = 12;  // at most: rows that are half a page apart share few lines of the nearest cache

// Vectors that hold a word of all tokens; 0 where too many of their lanes would be empty, or registers are few.
inline int64_t lane_vectors(int64_t tokens) {
  const int64_t vectors = W == 16 ? ceil_div(tokens, W) : 0;
  if (vectors == 1) return tokens >= 13 ? 1 : 0;
  return vectors <= kLaneVectors && 12 * tokens >= 11 * W * vectors ? vectors : 0;
}

// What `dot_rows` computes, of as many rows as fill tiles, and their number; x null: of none. The rows that come are asked for
// in the order in which they lie.
template <class Product, class S, class O>
int64_t lane_rows(const IVec* x, int64_t tokens, const S* w, int64_t w_stride, int64_t rows, int64_t depth,
                  const Ahead& ahead, O* out, int64_t out_stride) {
  if constexpr (Product::exists && W == 16) {
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
    const int64_t vectors = x ? lane_vectors(tokens) : 0;
    if (vectors > 0) return with_count<kLaneVectors>(vectors, tiles);
  }
  return 0;
}

}  // namespace mla
}  // namespace opsmith
