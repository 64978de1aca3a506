// Floats to whole numbers.
#pragma once

#include "simd.h"

namespace opsmith {

// Rounded to nearest, ties to even. Not by adding a large number: a compiler may fuse that with the product before it,
// whose own rounding then is missing.
inline IVec nearest_integers(Vec v) {
#if defined(OPSMITH_AVX512)
  return (IVec)_mm512_cvtps_epi32((__m512)v);
#elif defined(OPSMITH_AVX2)
  return (IVec)_mm256_cvtps_epi32((__m256)v);
#else
  IVec whole;
  for (int i = 0; i < W; ++i) whole[i] = v[i] == v[i] ? int32_t(__builtin_rintf(v[i])) : 0;
  return whole;
#endif
}

}  // namespace opsmith
