// Products of a few rows with a weight that lies as PyTorch keeps it, [N, K]: every row of the weight is read once, from
// end to end, and meets all tokens while it is in registers. Nothing is packed, so nothing is held twice.
//
// One token leaves the processor time to fetch ahead by itself, which it does as fast as memory is, but for a single stream:
// its rows are read one after the other. With more, the products keep it from seeing the next loads, and lines are asked for;
// what it is asked for while its queue is full it drops, so that it is asked twice. That queue is also what x goes through if
// it lies farther than in the nearest cache: the K of few tokens is taken in pieces of which x stays there.
#pragma once

#include <array>

#include "byte_dot.h"
#include "gemm_tile.h"

namespace opsmith::mla {

// Of a tile: with kDotRows of the weight, as many sums as there are registers.
constexpr int kDotTokens = W == 16 ? 6 : 4;
constexpr int kDotRows = W == 16 ? 4 : 2;
constexpr int kFewRows = 2;  // where all tokens are in one tile: as many places of memory to fetch from
constexpr int kOneRows = W == 8 ? 4 : kFewRows;  // and where one token leaves the registers to them
constexpr int64_t kAheadBytes = 48 << 10;  // from what is used to what is asked for,
constexpr int64_t kAgainBytes = 24 << 10;  // and to what is asked for again
constexpr int64_t kStreamBytes = 3 << 10;  // the same for a single stream, of which a hint is enough
constexpr int64_t kNearBytes = 24 << 10;  // of the nearest cache
constexpr int64_t kPieceBytes = 16 << 10;  // of x there, beside a weight that streams through

// What will be read, for asking ahead of time: `size` bytes from `base` on, then those from `then` on.
struct Ahead {
  const char* base;
  int64_t size;
  const char* then;
  const char* operator()(int64_t at) const { return at < size ? base + at : then + (at - size); }
  Ahead after(int64_t bytes) const { return {base + bytes, size - bytes, then}; }
};

// What a tile asks for: at each of its steps `lines` pieces of memory that follow each other.
struct Fetch {
  const char* at;
  int lines;
  int64_t again;  // and those so many bytes before them once more
  template <int bytes, int R>
  void step(const void*) {
    for (int i = 0; i < lines; ++i, at += bytes) {
      prefetch_far(at);
      if (again) prefetch_far(at - again);
    }
  }
};

// The same of R rows that lie side by side, and once more of rows that are used sooner.
struct FetchRows {
  const char *far, *near;
  int64_t row_bytes;
  template <int bytes, int R>
  void step(const void*) {
    if (reinterpret_cast<uintptr_t>(far) % 64 < bytes) {  // each line once
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        prefetch_far(far + r * row_bytes);
        prefetch_far(near + r * row_bytes);
      }
    }
    far += bytes, near += bytes;
  }
};

// The same of rows that are read one after the other.
struct FetchStream {
  const char* at;
  template <int bytes, int R>
  void step(const void*) {
    prefetch_once(at);
    at += bytes;
  }
};

// For an x that several rows meet: the compiler would have each of their products load it from memory.
template <class V>
inline V loaded_once(V x) {
#if defined(OPSMITH_AVX2)
  asm("" : "+x"(x));
#endif
  return x;
}

// What x is stored as beside a weight of S and in what order, how much of K a step takes, what it does, and what sums begin with.
template <class T, class S>
struct Dots {
  using X = float;
  using Sum = Vec;
  static constexpr int64_t step = W;
  static void arrange(float*, int64_t) {}
  static Vec start(int32_t) { return Vec{}; }
  static Vec weight(const S* p, Full) { return load(p); }
  static Vec weight(const S* p, int64_t left) { return load(p, Part{int(left)}); }
  static Vec row(const float* p) { return loaded_once(load(p)); }
  static Vec mac(Vec x, Vec w, Vec sum) { return fma(x, w, sum); }
};

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
template <>
struct Dots<bfloat16, bfloat16> {
  using X = bfloat16;
  using Sum = Vec;
  static constexpr int64_t step = 2 * W;
  static void arrange(bfloat16*, int64_t) {}
  static Vec start(int32_t) { return Vec{}; }
  static __m512bh weight(const bfloat16* p, Full) { return (__m512bh)_mm512_loadu_si512(p); }
  static __m512bh weight(const bfloat16* p, int64_t left) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint64_t{1} << left) - 1), p);
  }
  static __m512bh row(const bfloat16* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Vec mac(__m512bh x, __m512bh w, Vec sum) { return (Vec)_mm512_dpbf16_ps((__m512)sum, x, w); }
};

// Every byte is a number of bfloat16 too.
template <>
struct Dots<bfloat16, int8_t> : Dots<bfloat16, bfloat16> {
  static __m512bh widen(__m256i v) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(v)),
                  high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(v, 1));
    return _mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
  }
  static __m512bh weight(const int8_t* p, Full) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
  static __m512bh weight(const int8_t* p, int64_t left) {
    return widen(_mm256_maskz_loadu_epi8(__mmask32((uint64_t{1} << left) - 1), p));
  }
};
#elif defined(OPSMITH_AVX512) || defined(OPSMITH_AVX2)
// A vector of weights is their even ones and their odd ones, in an instruction each (in_pairs).
template <>
struct Dots<bfloat16, bfloat16> {
  using X = float;
  using Sum = Vec;
  static constexpr int64_t step = 2 * W;
  static void arrange(float* x, int64_t n) { even_before_odd(x, round_up(n, step)); }
  static Vec start(int32_t) { return Vec{}; }
  static Pair weight(const bfloat16* p, Full) { return load(p, Both{}); }
  static Pair weight(const bfloat16* p, int64_t left) { return load_pair(p, left); }
  static Pair row(const float* p) { return {loaded_once(load(p)), loaded_once(load(p + W))}; }
  static Vec mac(Pair x, Pair w, Vec sum) { return fma(x.b, w.b, fma(x.a, w.a, sum)); }
};
#endif

// Integers, whose sums are exact.
template <>
struct Dots<int8_t, int8_t> {
  using Sum = IVec;
#if defined(OPSMITH_BYTE_DIGITS)
  // One factor of a byte product may be unsigned: the weight plus 128, of which 128 times the sum of x is taken again.
  using X = int8_t;
  static constexpr int64_t step = 4 * W;
  static IVec start(int32_t x_sum) {
    IVec sum{};
    sum[0] = int32_t(uint32_t(kTaken - 128) * uint32_t(x_sum));
    return sum;
  }
  static Bytes weight(const int8_t* p, Full) { return bytes_of(load_words(p) ^ int32_t(0x80808080)); }
  static Bytes weight(const int8_t* p, int64_t left) {
    IVec word{};
    std::memcpy(&word, p, size_t(left));
    return bytes_of(word ^ int32_t(0x80808080));
  }
  static Four row(const int8_t* p) {
    Four v = four_of(load_words(p));
    load_once(v);
    return v;
  }
  static IVec mac(Four x, Bytes w, IVec sum) { return dot(sum, w, x); }
#else
  using X = int16_t;
  static constexpr int64_t step = 2 * W;
  typedef int8_t Narrow __attribute__((vector_size(2 * W)));
  static IVec start(int32_t) { return IVec{}; }
  static IVec weight(const int8_t* p, Full) { return weight(p, step); }
  static IVec weight(const int8_t* p, int64_t left) {
    Narrow bytes{};
    std::memcpy(&bytes, p, size_t(left));
    return (IVec) __builtin_convertvector(bytes, Shorts);
  }
  static IVec row(const int16_t* p) { return loaded_once(load_words(p)); }
  static IVec mac(IVec x, IVec w, IVec sum) { return sum + multiply_pairs(x, w); }
#endif
};

// out[m][r] = sum over K of x[m] w[r]. x is padded with zeros to whole steps, w is not; `x_sum` has the sum of each x.
template <class D, int M, int R, class S, class Fetch, class O>
__attribute__((noinline)) void dot_tile(const typename D::X* x, int64_t x_stride, const int32_t* x_sum,
                                        const S* w, int64_t w_stride, int64_t depth, Fetch fetch, O* out,
                                        int64_t out_stride) {
  // Few sums leave registers for several that alternate, which hide latency.
  constexpr int chains = W == 16 ? 1 : M * R <= 2 ? 4 : M * R <= 4 ? 2 : 1;
  typename D::Sum sum[chains][M][R] = {};
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sum[0][m][r] = D::start(x_sum[m]);
  }
  int64_t k = 0;
  auto add = [&](auto lanes, typename D::Sum(&sum)[M][R]) __attribute__((always_inline)) {
    decltype(D::weight(w, lanes)) column[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) column[r] = D::weight(w + r * w_stride + k, lanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const auto v = D::row(x + m * x_stride + k);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[m][r] = D::mac(v, column[r], sum[m][r]);
    }
  };
  const auto step = [&](typename D::Sum(&sum)[M][R]) __attribute__((always_inline)) {
    fetch.template step<D::step * sizeof(S), R>(w + k);
    add(Full{}, sum);
    k += D::step;
  };
  while (k + chains * D::step <= depth) {
#pragma GCC unroll 4
    for (int c = 0; c < chains; ++c) step(sum[c]);
  }
  while (k + D::step <= depth) step(sum[0]);
  if (k < depth) add(depth - k, sum[0]);
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int c = 1; c < chains; ++c) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[0][m][r] += sum[c][m][r];
    }
    store_totals(sum[0][m], out + m * out_stride);
  }
}

inline IVec load_bytes(const uint8_t* p) {
#if defined(OPSMITH_AVX512)
  return (IVec)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(OPSMITH_AVX2)
  return (IVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(OPSMITH_NEON)
  return (IVec)vmovl_s16(vget_low_s16(widen_four_bytes((const int8_t*)p))) & 255;
#else
  IVec v;
  for (int i = 0; i < W; ++i) v[i] = p[i];
  return v;
#endif
}

// The same with numbers of 4 bits, in groups of `bytes` bytes that have a factor each. x is divided into its even numbers
// and, `half` further on, its odd ones.
template <int M, int R, class Fetch>
__attribute__((noinline)) void nibble_tile(const float* x, int64_t x_stride, int64_t half, const uint8_t* w,
                                           int64_t w_stride, const float* factor, int64_t groups,
                                           int64_t bytes, Fetch fetch, float* out, int64_t out_stride) {
  Vec total[M][R] = {};
  for (int64_t g = 0; g < groups; ++g) {
    Vec sum[M][R] = {};
    for (int64_t j = g * bytes; j < (g + 1) * bytes; j += W) {
      fetch.template step<W, R>(w + j);
      Vec low[R], high[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const IVec b = load_bytes(w + r * w_stride + j);
        low[r] = to_float((b & 15) - 8);
        high[r] = to_float((b >> 4) - 8);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Vec even = load(x + m * x_stride + j), odd = load(x + m * x_stride + half + j);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[m][r] = fma(odd, high[r], fma(even, low[r], sum[m][r]));
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[m][r] = fma(sum[m][r], splat(factor[r * groups + g]), total[m][r]);
    }
  }
  for (int m = 0; m < M; ++m) store_totals(total[m], out + m * out_stride);
}

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
template <int M, int R, class Fetch>
__attribute__((noinline)) void nibble_tile(const bfloat16* x, int64_t x_stride, int64_t half,
                                           const uint8_t* w, int64_t w_stride, const float* factor,
                                           int64_t groups, int64_t bytes, Fetch fetch, float* out,
                                           int64_t out_stride) {
  alignas(64) static constexpr auto numbers = [] {  // -8 to 7, twice
    std::array<uint16_t, 32> v{0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
                               0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    for (int i = 0; i < 16; ++i) v[size_t(i) + 16] = v[size_t(i)];
    return v;
  }();
  constexpr int64_t step = 2 * W;
  const __m512i table = _mm512_load_si512(numbers.data()), low_bits = _mm512_set1_epi16(15);
  const bool whole = bytes % step == 0;  // half a step where not
  const __mmask32 lanes = whole ? ~__mmask32{0} : __mmask32{0xffff};
  Vec total[M][R] = {};
  for (int64_t g = 0; g < groups; ++g) {
    Vec sum[M][R] = {};
    for (int64_t j = g * bytes; j < (g + 1) * bytes; j += whole ? step : W) {
      whole ? fetch.template step<step, R>(w + j) : fetch.template step<W, R>(w + j);
      __m512bh even[R], odd[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const __m512i b = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, w + r * w_stride + j));
        even[r] = (__m512bh)_mm512_permutexvar_epi16(_mm512_and_si512(b, low_bits), table);
        odd[r] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(b, 4), table);
      }
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const bfloat16* const p = x + m * x_stride + j;
        const __m512bh v = (__m512bh)_mm512_maskz_loadu_epi16(lanes, p),
                       u = (__m512bh)_mm512_maskz_loadu_epi16(lanes, p + half);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const __m512 first = _mm512_dpbf16_ps((__m512)sum[m][r], v, even[r]);
          sum[m][r] = (Vec)_mm512_dpbf16_ps(first, u, odd[r]);
        }
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) total[m][r] = fma(sum[m][r], splat(factor[r * groups + g]), total[m][r]);
    }
  }
  for (int m = 0; m < M; ++m) store_totals(total[m], out + m * out_stride);
}
#endif

// Calls tile<M, R> for `tokens` <= kDotTokens and R = kDotRows, kFewRows, for one token kOneRows, or 1.
template <class F>
inline void with_tile(int64_t tokens, int64_t rows, F&& f) {
  auto of_rows = [&](auto m) {
    if constexpr (m() == 1) {
      if (rows == kOneRows) return f(m, std::integral_constant<int, kOneRows>{});
    }
    if constexpr (m() >= kDotTokens / 2) {  // as many as a tile has where there are several
      if (rows == kDotRows) return f(m, std::integral_constant<int, kDotRows>{});
    }
    if (rows == kFewRows) return f(m, std::integral_constant<int, kFewRows>{});
    f(m, std::integral_constant<int, 1>{});
  };
  with_count<kDotTokens>(tokens, of_rows);
}

// A row of a weight: its numbers of the weight's type, how many of them stay together, and the bytes of a token's x beside it.
struct RowSize {
  int64_t depth, unit, x_bytes;
  int64_t few = kFewRows, many = kDotRows;  // rows of a tile where there is one, or where there are several
};

// For tokens of one tile, piece by piece of K; the same pieces of some rows follow each other, so that what is asked for lies
// as far ahead as if rows were read whole.
template <class S, class O, class Tile>
inline void dot_few(int64_t tokens, const S* w, int64_t w_stride, int64_t rows, const RowSize& size,
                    const Ahead& ahead, O* out, int64_t out_stride, const Tile& tile) {
  const int64_t row_bytes = w_stride * int64_t(sizeof(S)),
                pieces = ceil_div(tokens * size.x_bytes, kPieceBytes);
  const int64_t piece = round_up(ceil_div(size.depth, std::max<int64_t>(1, pieces)), size.unit);
  const int64_t apart = kAheadBytes / std::max<int64_t>(1, piece * int64_t(sizeof(S)));
  const int64_t together = tokens == 1 ? kOneRows : tokens < kDotTokens / 2 ? kFewRows : size.few;
  const int64_t group = std::max<int64_t>(1, apart / together) * together;
  for (int64_t r = 0; r < rows; r += group) {
    const int64_t some = std::min(group, rows - r);
    for (int64_t k = 0; k < size.depth; k += piece) {
      const int64_t left = std::min(piece, size.depth - k);
      // Where the piece lies that is used `i` rows after the first: of these rows, the next one's of them, or of other rows.
      const auto place = [&](int64_t i) {
        if (i < some) return reinterpret_cast<const char*>(w + (r + i) * w_stride + k);
        if (k + piece < size.depth)
          return reinterpret_cast<const char*>(w + (r + i - some) * w_stride + k + piece);
        return ahead((r + i) * row_bytes);
      };
      for (int64_t i = 0; i < some;) {
        const int64_t count = some - i >= together ? together : 1;
        const FetchRows fetch{place(i + some), place(i + some / 2), row_bytes};
        const S* const from = w + (r + i) * w_stride + k;
        O *const to = out + r + i, part[kDotTokens * std::max(kDotRows, kOneRows)];
        with_tile(tokens, count, [&](auto m, auto n) {
          if (k == 0) return tile(m, n, 0, k, left, from, fetch, to, out_stride);
          tile(m, n, 0, k, left, from, fetch, part, n());
          for (int t = 0; t < m(); ++t) {
            for (int j = 0; j < n(); ++j) to[t * out_stride + j] += part[t * n() + j];
          }
        });
        i += count;
      }
    }
  }
}

// out [tokens, rows] of rows of the weight, which are the first bytes of `ahead`; `tile(m, r, t, k, depth, w, fetch, out,
// out_stride)` computes the part of r rows and m tokens from t on that `depth` numbers from k on have, `step` bytes of a row at
// a time. All tiles of some rows share in asking for what comes: the processor's queue for it is short.
template <int64_t step, class S, class O, class Tile>
inline void dot_rows(int64_t tokens, const S* w, int64_t w_stride, int64_t rows, const RowSize& size,
                     const Ahead& ahead, O* out, int64_t out_stride, const Tile& tile) {
  if constexpr (step == 64) {
    if (tokens == 1) {
      using One = std::integral_constant<int, 1>;
      for (int64_t r = 0; r < rows; ++r) {
        const FetchStream fetch{ahead(r * w_stride * int64_t(sizeof(S)) + kStreamBytes)};
        tile(One{}, One{}, 0, 0, size.depth, w + r * w_stride, fetch, out + r, out_stride);
      }
      return;
    }
  }
  const int64_t tiles = ceil_div(tokens, kDotTokens), row_bytes = w_stride * int64_t(sizeof(S));
  if (tiles == 1) return dot_few(tokens, w, w_stride, rows, size, ahead, out, out_stride, tile);
  const int64_t distance = std::max(kAheadBytes, kDotRows * row_bytes);
  // A tile's tokens stay in the nearest cache for so many rows, if they fit there together.
  const int64_t fit = std::max<int64_t>(
      1, (kNearBytes / std::max<int64_t>(1, row_bytes) - kDotTokens) / kDotRows);
  for (int64_t r = 0; r < rows;) {
    const int64_t count = rows - r >= size.many ? size.many : 1, lines = ceil_div(count, tiles);
    const int64_t end = r + std::min(fit * count, (rows - r) / count * count);
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t t = i * tokens / tiles, some = (i + 1) * tokens / tiles - t;
      const int64_t asked = std::min(count, i * lines);
      for (int64_t s = r; s < end; s += count) {
        const Fetch fetch{ahead(s * row_bytes + distance) + asked * row_bytes,
                          int(std::min(lines, count - asked)), 0};
        with_tile(some, count, [&](auto m, auto n) {
          tile(m, n, t, 0, size.depth, w + s * w_stride, fetch, out + t * out_stride + s, out_stride);
        });
      }
    }
    r = end;
  }
}

}  // namespace opsmith::mla
