// Products of several rows of x with a weight that lies as PyTorch keeps it, [N, K]: the rows of x lie side by side in the lanes of
// vectors, and a word of a weight's row, four bytes along K, is broadcast and meets that word of W rows in one instruction. Beside dot
// products a sum is folded once for W rows, and a word of x serves all rows of the weight of a tile. Of fewer rows, lanes hold several words.
#pragma once

#include <cstring>

#include "gemm_tile.h"

namespace opsmith {

// What an operator adds to the sums of R rows of a weight while these pass.
struct NoExcess {
  void add(const void*, int64_t) {}
  void add_some(const void*, int64_t, int64_t) {}
  template <class Sums>
  void take(Sums&) {}
};

// Words of X times words of S, where there is an instruction for them.
template <class X, class S>
struct WordProduct {
  static constexpr bool exists = std::is_same_v<X, S> && sizeof(X) * UnitsOf<X>::per_unit == 4 &&
                                 kRoundings == 1;
  static constexpr int64_t chain = 8 * UnitsOf<X>::chain;  // bytes of K in a lane's sum, before it is added
  using Sum = Vec;
  static IVec lanes(IVec x) { return x; }
  static Vec mac(IVec x, IVec w, Vec sum) { return UnitsOf<X>::mac((Vec)x, (Vec)w, sum); }
  template <int R>
  using Excess = NoExcess;
};

// The G words at p, again and again.
template <int G>
inline IVec repeated(const void* p) {
  static_assert(G <= 2);
  typedef int64_t Pairs __attribute__((vector_size(sizeof(IVec))));
  std::conditional_t<G == 1, int32_t, int64_t> words;
  std::memcpy(&words, p, sizeof words);
  if constexpr (G == 1) return words - IVec{};
  return (IVec)(words - Pairs{});
}

// Rows of x as lanes, W / G of them in a vector with G words of each: to[words][vector]; load(row, k) has a vector of words of
// a row from its element k on, `step` of them.
template <class Product, int G = 1, class F>
void to_lanes(int64_t rows, int64_t vectors, int64_t k, int64_t step, IVec* to, const F& load) {
  constexpr int N = W / G;
  for (int64_t v = 0; v < vectors; ++v) {
    for (int64_t at = 0; at < k; at += step) {
      Vec block[N] = {};
      for (int64_t i = 0; i < std::min<int64_t>(N, rows - v * N); ++i) block[i] = load(v * N + i, at);
      transpose<G>(block);
      for (int i = 0; i < N; ++i) to[(at / step * N + i) * vectors + v] = Product::lanes((IVec)block[i]);
    }
  }
}

// out[t][r] = sum over K of x[t] w[r] for R rows of the weight.
template <class Product, int V, int R, int G = 1, class S, class Fetch, class O>
__attribute__((noinline)) void lane_tile(const IVec* x, int64_t rows, const S* w, int64_t w_stride,
                                         int64_t depth, Fetch fetch, O* out, int64_t out_stride) {
  constexpr int64_t n = 4 * G / sizeof(S), line = 64 / sizeof(S), chain = G * Product::chain / sizeof(S);
  // Steps whose sums alternate, where few would wait for each other.
  constexpr int U = W == 8 || R * V > 8 ? 1 : 2;
  static_assert(R <= W);
  using Sum = typename Product::Sum;
  Sum sum[U][R][V] = {}, total[R][V] = {};
  typename Product::template Excess<R> excess;
  const auto add = [&](Sum(&to)[R][V], const auto& words) __attribute__((always_inline)) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const IVec word = words(r);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) to[r][v] = Product::mac(x[v], word, to[r][v]);
    }
    x += V;
  };
  for (int64_t k = 0; k < depth;) {
    const int64_t end = std::min(k + chain, depth);
    while (k + line <= end) {
      fetch.template step<64, R>(w + k);
      for (const int64_t next = k + line; k < next;) {
        for (int u = 0; u < U; ++u, k += n) {
          add(sum[u],
              [&](int r) __attribute__((always_inline)) { return repeated<G>(w + r * w_stride + k); });
        }
      }
      excess.add(w + k - line, w_stride);  // in the nearest cache by now
    }
    excess.add_some(w + k, w_stride, end - k);
    for (; k < end; k += n) {
      add(sum[0], [&](int r) {
        S some[n] = {};
        std::copy_n(w + r * w_stride + k, std::min(n, end - k), some);
        return repeated<G>(some);
      });
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
#pragma GCC unroll 2
        for (int u = 0; u < U; ++u) {
          total[r][v] += sum[u][r][v];
          sum[u][r][v] = Sum{};
        }
      }
    }
  }
  excess.take(total);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    Vec block[W] = {};
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) block[r] = (Vec)total[r][v];
    transpose(block);
    constexpr int N = W / G;
    for (int64_t i = 0; i < std::min<int64_t>(N, rows - v * N); ++i) {
      Sum t = (Sum)block[i * G];
      for (int g = 1; g < G; ++g) t += (Sum)block[i * G + g];
      store(reinterpret_cast<float*>(out + (v * N + i) * out_stride), (Vec)t, Part{R});
    }
  }
}

}  // namespace opsmith
