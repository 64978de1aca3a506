// Floats to whole numbers, and those to bytes.
#pragma once

#include <cmath>

#include "rows.h"

namespace opsmith {

// The largest of numbers whose magnitudes' bits these are, lane by lane; NaN where one is: its bits are above all others.
inline float largest(IVec magnitudes) {
  return any(magnitudes > 0x7f800000) ? NAN : reduce_max(as_float(magnitudes));
}

template <class T>
inline float largest(const T* x, int64_t n) {
  IVec most{};
  for_lanes(n, [&](int64_t i, auto k) { most = max(most, as_int(abs(keep(load(x + i, k), k, 0.0f)))); });
  return largest(most);
}

// Rounded to nearest, ties to even. Not by adding a large number: a compiler may fuse that with the product before it,
// whose own rounding then is missing.
inline IVec nearest_integers(Vec v) {
#if defined(OPSMITH_AVX512)
  return (IVec)_mm512_cvtps_epi32((__m512)v);
#elif defined(OPSMITH_AVX2)
  return (IVec)_mm256_cvtps_epi32((__m256)v);
#elif defined(OPSMITH_NEON)
  return (IVec)vcvtnq_s32_f32(v);
#elif defined(__SSE2__)
  return (IVec)_mm_cvtps_epi32((__m128)v);
#else
  IVec whole;
  for (int i = 0; i < W; ++i) whole[i] = v[i] == v[i] ? int32_t(__builtin_rintf(v[i])) : 0;
  return whole;
#endif
}

// The low byte of every lane.
inline void store_low_bytes(int8_t* p, IVec v, Full = {}) {
#if defined(OPSMITH_AVX512)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(OPSMITH_AVX2)
  // The low bytes of each half's four lanes, in its first lane.
  const __m256i bytes = _mm256_shuffle_epi8((__m256i)v, _mm256_set1_epi32(0x0c080400));
  const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64((__m128i*)p, both);
#elif defined(OPSMITH_NEON)
  const int16x4_t half = vmovn_s32((int32x4_t)v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(half, half));
  std::memcpy(p, &bytes, 4);
#else
  for (int i = 0; i < W; ++i) p[i] = int8_t(v[i]);
#endif
}
inline void store_low_bytes(int8_t* p, IVec v, Part k) {
  int8_t bytes[W];
  store_low_bytes(bytes, v);
  std::memcpy(p, bytes, size_t(k.count));
}

}  // namespace opsmith
