// Two vectors of elements at a time, in the order in which memory gives them up fastest: a pair of bfloat16 vectors
// holds the even elements and the odd ones, which takes one instruction each to read. For elementwise work and sums,
// where the order does not matter as long as all that meet have the same: float vectors that meet such pairs are kept
// in this order too (`in_pair_order`).
#pragma once

#include "rows.h"

namespace opsmith {

struct Pair {
  Vec a, b;
};

struct Both {  // the lanes of a pair
  static constexpr int count = 2 * W;
};

inline Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
inline Pair operator-(Pair x, Pair y) { return {x.a - y.a, x.b - y.b}; }
inline Pair operator*(Pair x, Pair y) { return {x.a * y.a, x.b * y.b}; }
inline Pair operator-(Pair x, float y) { return {x.a - y, x.b - y}; }
inline Pair operator*(Pair x, float y) { return {x.a * y, x.b * y}; }
inline Pair fma(Pair x, Pair y, Pair z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }
inline Pair fma(Pair x, float y, float z) { return {fma(x.a, y, z), fma(x.b, y, z)}; }
inline Pair fma(Pair x, float y, Pair z) { return {fma(x.a, y, z.a), fma(x.b, y, z.b)}; }

// A function of vectors, of each of a pair.
template <class F>
inline Vec apply(Vec x, F f) {
  return f(x);
}
template <class F>
inline Pair apply(Pair x, F f) {
  return {f(x.a), f(x.b)};
}
template <class T>
constexpr bool even_odd = std::is_same_v<T, bfloat16> && W > 4;

// A pair of bfloat16 vectors in one: each lane has an element of b above one of a.
inline IVec halves_of(Pair v) {
  typedef uint32_t UVec __attribute__((vector_size(4 * W)));
  const UVec a = (UVec)round_to_upper_half(v.a), b = (UVec)round_to_upper_half(v.b);
  return (IVec)((b & 0xffff0000) | (a >> 16));
}

#if defined(OPSMITH_AVX512)

inline Pair unpack(__m512i h) {
  return {(Vec)_mm512_slli_epi32(h, 16), (Vec)_mm512_and_si512(h, _mm512_set1_epi32(int(0xffff0000)))};
}
inline __m512i pack(Pair v) {
#if defined(__AVX512BF16__)
  const __m512i order = (__m512i)(lane_index() * 0x10001 + 0x100000);  // words 0, 16, 1, 17, ...
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(v.b, v.a));
#else
  return (__m512i)halves_of(v);
#endif
}
inline __m512i packed_at(const bfloat16* p) { return _mm512_loadu_si512(p); }
inline void store_packed(bfloat16* p, __m512i h, bool streaming) {
  streaming ? _mm512_stream_si512((__m512i*)p, h) : _mm512_storeu_si512(p, h);
}
// 2 W sums of columns as `unpacklo` and `unpackhi` of two rows leave them, in the order of the columns.
inline void store_in_order(float* to, Vec low, Vec high) {
  const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  store(to, (Vec)_mm512_permutex2var_ps((__m512)low, front, (__m512)high));
  store(to + W, (Vec)_mm512_permutex2var_ps((__m512)low, back, (__m512)high));
}

#elif defined(OPSMITH_AVX2)

inline Pair unpack(__m256i h) {
  return {(Vec)_mm256_slli_epi32(h, 16), (Vec)_mm256_and_si256(h, _mm256_set1_epi32(int(0xffff0000)))};
}
inline __m256i pack(Pair v) { return (__m256i)halves_of(v); }
inline __m256i packed_at(const bfloat16* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline void store_packed(bfloat16* p, __m256i h, bool streaming) {
  streaming ? _mm256_stream_si256((__m256i*)p, h) : _mm256_storeu_si256((__m256i*)p, h);
}

#endif

template <class T>
inline Pair load(const T* p, Both) {
  return {load(p, Full{}), load(p + W, Full{})};
}

// Store, past the cache where asked to: `p` is aligned to 64 bytes then.
template <class T>
inline void put(T* p, Pair v, Both, bool streaming) {
  put(p, v.a, Full{}, streaming);
  put(p + W, v.b, Full{}, streaming);
}
template <class T>
inline bool can_stream_both(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % 64 == 0;
}
inline void store(float* p, Pair v, Both) {
  store(p, v.a, Full{});
  store(p + W, v.b, Full{});
}

// What a pair becomes when it is stored as T and read back.
template <class T>
inline Pair round_to(Pair v) {
  return {round_to<T>(v.a), round_to<T>(v.b)};
}

#if defined(OPSMITH_AVX512) || defined(OPSMITH_AVX2)
inline Pair load(const bfloat16* p, Both) { return unpack(packed_at(p)); }
inline void put(bfloat16* p, Pair v, Both, bool streaming) { store_packed(p, pack(v), streaming); }
template <>
inline Pair round_to<bfloat16>(Pair v) {
  return unpack(pack(v));
}
#endif

#if defined(OPSMITH_AVX512)
inline void put(float16* p, Pair v, Both, bool streaming) {  // two half lines as one
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(v.a, nearest));
  const __m512i line = _mm512_inserti64x4(low, _mm512_cvtps_ph(v.b, nearest), 1);
  streaming ? _mm512_stream_si512((__m512i*)p, line) : _mm512_storeu_si512(p, line);
}
#endif

// Store two vectors whose elements stand in order, whatever T's pairs do: where T has 16 bits as one whole line, since half
// lines past the cache take longer.
template <class T>
inline void put_in_order(T* p, Pair v, bool streaming) {
  put(p, v, Both{}, streaming);
}
#if defined(OPSMITH_AVX512)
inline void put_in_order(bfloat16* p, Pair v, bool streaming) {
#if defined(__AVX512BF16__)
  store_packed(p, (__m512i)_mm512_cvtne2ps_pbh((__m512)v.b, (__m512)v.a), streaming);
#else
  store_packed(p, _mm512_inserti64x4(_mm512_castsi256_si512(narrow_bfloat16(v.a)), narrow_bfloat16(v.b), 1),
               streaming);
#endif
}
#elif defined(OPSMITH_AVX2)
inline void put_in_order(bfloat16* p, Pair v, bool streaming) {
  store_packed(p, _mm256_set_m128i(narrow_bfloat16(v.b), narrow_bfloat16(v.a)), streaming);
}
#endif

// Two vectors whose elements stand in order, as their even ones and their odd ones; and back.
template <int... l>
inline Pair split(Pair v, std::integer_sequence<int, l...>) {
  return {shuffle(v.a, v.b, std::integer_sequence<int, (2 * l)...>{}),
          shuffle(v.a, v.b, std::integer_sequence<int, (2 * l + 1)...>{})};
}
inline Pair split(Pair v) { return split(v, std::make_integer_sequence<int, W>{}); }
template <int... l>
inline Pair interleave(Pair v, std::integer_sequence<int, l...>) {
  return {shuffle(v.a, v.b, std::integer_sequence<int, (l % 2 * W + l / 2)...>{}),
          shuffle(v.a, v.b, std::integer_sequence<int, (l % 2 * W + W / 2 + l / 2)...>{})};
}
inline Pair interleave(Pair v) { return interleave(v, std::make_integer_sequence<int, W>{}); }

// The same of a row of whole pairs, in place.
inline void even_before_odd(float* row, int64_t n) {
  for (int64_t c = 0; c < n; c += 2 * W) store(row + c, split(load(row + c, Both{})), Both{});
}
inline void even_beside_odd(float* row, int64_t n) {
  for (int64_t c = 0; c < n; c += 2 * W) store(row + c, interleave(load(row + c, Both{})), Both{});
}

// How many of a row's elements are handled in pairs, four pairs at a time; the rest goes vector by vector.
constexpr int64_t paired_block = 8 * W;
inline int64_t paired(int64_t n) { return n / paired_block * paired_block; }

// `from`, [n], as floats in the order in which pairs of T stand in vectors.
template <class T, class From>
inline void in_pair_order(const From* from, int64_t n, float* to) {
  int64_t i = 0;
  if constexpr (even_odd<T>) {
    for (; i < paired(n); i += 2 * W) {
      store(to + i, split({load(from + i, Full{}), load(from + i + W, Full{})}), Both{});
    }
  }
  for (; i < n; ++i) to[i] = to_float(from[i]);
}

// And back.
template <class T, class To>
inline void from_pair_order(const float* from, int64_t n, To* to) {
  int64_t i = 0;
  if constexpr (even_odd<T>) {
    for (; i < paired(n); i += 2 * W) {
      const Pair v = interleave(load(from + i, Both{}));
      store(to + i, v.a, Full{});
      store(to + i + W, v.b, Full{});
    }
  }
  for (; i < n; ++i) to[i] = from_float<To>(from[i]);
}

// The pair at `p`, of which `left` elements are there and zeros follow.
template <class T>
inline Pair load_pair(const T* p, int64_t left) {
  if (left >= 2 * W) return load(p, Both{});
  alignas(64) T some[2 * W] = {};
  std::copy_n(p, std::max<int64_t>(left, 0), some);
  return load(some, Both{});
}

}  // namespace opsmith
