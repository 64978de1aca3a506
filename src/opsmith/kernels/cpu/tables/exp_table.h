// e^x by a table in registers: two thirds of the arithmetic of a polynomial alone, for what two cores spend on a row of float32
// while memory brings the next one.
#pragma once

#include "simd.h"

namespace opsmith {

// e^x within 2 units in the last place or so while |x| < 100; 0 at -inf, NaN at NaN, infinite or NaN far above.
// x = n ln 2 + r with n in steps of 1/32: the last bits of n choose its power of two from a table, its whole part goes to the
// exponent, and e^r, |r| < 0.011, is a square whose slope at 0 makes up for most of the cube.
inline Vec exp_by_table(Vec x) {
#if defined(OPSMITH_AVX512)
  alignas(64) static constexpr float powers[32] = {
      // 2^(j / 32)
      1.0f,        1.0218972f,  1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f,  1.13878858f, 1.1637249f,
      1.18920708f, 1.21524739f, 1.24185777f, 1.26905096f, 1.29683959f, 1.32523668f, 1.35425556f, 1.38390994f,
      1.41421354f, 1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f,  1.61049032f, 1.64575553f,
      1.68179286f, 1.71861935f, 1.75625217f, 1.79470909f, 1.8340081f,  1.87416768f, 1.91520655f, 1.95714414f};
  constexpr float shift = 393216.0f;  // 1.5 * 2^18: added to it, a number is rounded to 1/32, the last bit
  x = max(-104.0f, x);
  const Vec y = fma(x, log2_e, shift), n = y - shift, r = fma(n, -0.693147181f, x);
  const Vec power = _mm512_permutex2var_ps(_mm512_load_ps(powers), (__m512i)y, _mm512_load_ps(powers + 16));
  return scale_exponent(fma(power, r * fma(r, 0.5f, 1.0000147f), power), n);
#else
  return exp(x);
#endif
}

}  // namespace opsmith
