// Two vectors of memory at a time, in whichever order of their elements costs least: for kernels that treat all
// elements alike. A bfloat16 is the upper half of a float, so of 2W neighbors the odd ones need a mask and the even
// ones a shift, where W neighbors in order need a shuffle too; and the results leave as one line of 64 bytes.
#pragma once

#include "rows.h"

namespace opsmith {

struct Pair {
  Vec a, b;
};

// What `load_pair` takes apart, `put_pair` puts together again; p holds 2W elements.
template <class T>
inline Pair load_pair(const T* p) {
  return {load(p), load(p + W)};
}
template <class T>
inline void put_pair(T* p, Pair v, bool streaming) {
  put(p, v.a, Full{}, streaming);
  put(p + W, v.b, Full{}, streaming);
}

#if defined(OPSMITH_AVX512)

inline void put_line(void* p, __m512i line, bool streaming) {
  if (streaming) {
    _mm512_stream_si512((__m512i*)p, line);
  } else {
    _mm512_storeu_si512(p, line);
  }
}

template <>
inline Pair load_pair(const bfloat16* p) {
  const __m512i line = _mm512_loadu_si512(p);
  return {(Vec)_mm512_slli_epi32(line, 16), (Vec)_mm512_and_si512(line, _mm512_set1_epi32(int(0xffff0000)))};
}
template <>
inline void put_pair(bfloat16* p, Pair v, bool streaming) {
#if defined(__AVX512BF16__)
  const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(v.b, v.a);
#else
  const __m512i halves = _mm512_inserti64x4(_mm512_castsi256_si512(narrow_bfloat16(v.a)), narrow_bfloat16(v.b), 1);
#endif
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i order = _mm512_or_si512(first, _mm512_slli_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(16)), 16));
  put_line(p, _mm512_permutexvar_epi16(order, halves), streaming);
}
template <>
inline void put_pair(float16* p, Pair v, bool streaming) {
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(v.a, nearest));
  put_line(p, _mm512_inserti64x4(low, _mm512_cvtps_ph(v.b, nearest), 1), streaming);
}

#elif defined(OPSMITH_AVX2)

template <>
inline Pair load_pair(const bfloat16* p) {
  const __m256i line = _mm256_loadu_si256((const __m256i*)p);
  return {(Vec)_mm256_slli_epi32(line, 16), (Vec)_mm256_and_si256(line, _mm256_set1_epi32(int(0xffff0000)))};
}
template <>
inline void put_pair(bfloat16* p, Pair v, bool streaming) {
  const __m128i a = narrow_bfloat16(v.a), b = narrow_bfloat16(v.b);
  const __m256i line = _mm256_set_m128i(_mm_unpackhi_epi16(a, b), _mm_unpacklo_epi16(a, b));
  if (streaming) {
    _mm256_stream_si256((__m256i*)p, line);
  } else {
    _mm256_storeu_si256((__m256i*)p, line);
  }
}

#endif

template <class T>
inline bool can_stream_pairs(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (2 * W * sizeof(T)) == 0;
}

}  // namespace opsmith
