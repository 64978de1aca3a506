// x Phi(x) and its slope by tables in registers, for AVX-512. With a = |x|, y = max(x, 0) - a Phi(-a); below 0 the slope is
// S(a) = Phi(-a) - a phi(a), and above 0 it is 1 - S(a). Phi(-a) and S(a) are a polynomial for each quarter: entry k holds
// the coefficients for a in [(k - 1/2) / 4, (k + 1/2) / 4]. Choosing among 32 floats takes one instruction, which leaves a
// third of the arithmetic that an exponential and a quotient need.
//
// The compiler makes them: polynomials through the Chebyshev nodes of each quarter, in double. The fine tables are of degree
// 5 around k / 4; the coarse ones of degree 3 around 0, which spares the subtraction and costs digits that bfloat16 does not
// show. The last entry is 0: nothing is left of Phi(-7.6).
//
// Relative error of Phi(-a) in float32, up to
//   a =             1       2       3       4       5       6       7
//   erf, fine       8e-8    9e-8    1e-7    4e-7    2e-6    8e-6    3e-5
//   erf, coarse     4e-6    8e-6    1e-4    4e-4    2e-3    4e-3    1e-2
//   tanh, fine      1e-7    9e-8    1e-7    7e-7    9e-6    1e-4    8e-4
//   tanh, coarse    4e-6    9e-6    1e-4    7e-4    4e-3    3e-2    1e-1
// Error of S(a), up to
//   a =             0.7     1.5     2.5     3.5     4.5     5.5     6.5
//   erf, fine       2e-8    1e-8    1e-8    2e-9    2e-10   2e-11   1e-12
//   erf, coarse     4e-6    4e-6    1e-6    7e-7    2e-7    3e-8    1e-9
//   tanh, fine      3e-8    1e-8    1e-8    4e-9    3e-10   2e-11   7e-13
//   tanh, coarse    4e-6    3e-6    1e-6    7e-7    2e-7    3e-8    2e-10
#pragma once

#include "simd.h"

namespace opsmith {

struct ValueAndSlope {
  Vec value, slope;
};

#if defined(OPSMITH_AVX512)

// What the tables are of, for the compiler.
namespace exactly {

constexpr double root_2_over_pi = 0.79788456080286535588;

constexpr double exp(double x) {  // (e^(x / 1024))^1024, by its series
  double term = 1, sum = 1;
  for (int i = 1; i < 12; ++i) sum += term *= x / (1024 * i);
  for (int i = 0; i < 10; ++i) sum *= sum;
  return sum;
}

constexpr double density(double a) { return root_2_over_pi / 2 * exp(-a * a / 2); }

constexpr double phi(double a) {  // Phi(-a), by a series near 0 and a continued fraction far from it
  double term = a, sum = a, rest = a;
  for (int i = 1; i < 60; ++i) sum += term *= a * a / (2 * i + 1);
  for (int i = 100; i > 0; --i) rest = a + i / rest;
  return a < 2 ? 0.5 - density(a) * sum : density(a) / rest;
}

constexpr double phi_slope(double a) { return phi(a) - a * density(a); }

constexpr double phi_tanh(double a) {
  const double e = exp(-2 * root_2_over_pi * (a + 0.044715 * a * a * a));
  return e / (1 + e);
}

constexpr double phi_tanh_slope(double a) {
  const double s = phi_tanh(a);
  return s - a * s * (1 - s) * 2 * root_2_over_pi * (1 + 3 * 0.044715 * a * a);
}

}  // namespace exactly

// A function's polynomials, by coefficient and quarter.
template <int terms>
struct alignas(64) Quarters {
  static_assert(terms == 4 || terms == 6);
  static constexpr bool fine = terms == 6;
  float of[terms][32] = {};

  constexpr explicit Quarters(double (*f)(double)) {
    constexpr double nodes[] = {0.96592582628906829, 0.70710678118654752, 0.25881904510252076,
                                0.92387953251128674, 0.38268343236508977};
    for (int k = 0; k < 31; ++k) {
      double at[terms] = {}, difference[terms] = {}, p[terms] = {};
      for (int j = 0; j < terms; ++j) {
        const double node = j < terms / 2 ? nodes[fine ? j : 3 + j] : -nodes[fine ? j - 3 : 1 + j];
        at[j] = node / 8 + (fine ? 0 : k / 4.0);
        difference[j] = f(node / 8 + k / 4.0);
      }
      for (int order = 1; order < terms; ++order) {  // Newton's divided differences
        for (int j = terms - 1; j >= order; --j) {
          difference[j] = (difference[j] - difference[j - 1]) / (at[j] - at[j - order]);
        }
      }
      for (int j = terms - 1; j >= 0; --j) {
        for (int i = terms - 1; i >= 0; --i) p[i] = (i > 0 ? p[i - 1] : difference[j]) - at[j] * p[i];
      }
      for (int i = 0; i < terms; ++i) of[i][k] = float(p[i]);
    }
  }
};

// As precise as T can show.
template <class T, double (*f)(double)>
constexpr Quarters<std::is_same_v<T, bfloat16> ? 4 : 6> by_quarters{f};

constexpr float nothing_left = 7.75f;  // in the last entry

// Where in the tables a = |x| lies, 0 <= a <= nothing_left.
template <int terms>
struct Place {
  static constexpr float quarters = 3145728.0f;  // 1.5 * 2^21: added to a number, it rounds to quarters
  Vec rounded, from;
  explicit Place(Vec a)
      : rounded(a + quarters), from(Quarters<terms>::fine ? Vec(_mm512_reduce_ps(a, 0x20 | nearest)) : a) {}

  Vec coefficient(const float* of) const {
    return _mm512_permutex2var_ps(_mm512_load_ps(of), (__m512i)rounded, _mm512_load_ps(of + 16));
  }
  Vec polynomial(const Quarters<terms>& table) const {
    Vec p = coefficient(table.of[terms - 1]);
#pragma GCC unroll 8
    for (int j = terms - 2; j >= 0; --j) p = fma(p, from, coefficient(table.of[j]));
    return p;
  }
};

// max(x, 0). NaN stays NaN, and -infinity becomes one, as times 0 in the definition.
inline Vec ramp_of(Vec x) {
  constexpr int32_t
      zero_below = 0x18531822;  // by kind: NaN to itself, infinity too, -infinity to NaN, what is negative to 0
  return _mm512_fixupimm_ps(x, x, _mm512_set1_epi32(zero_below), 0);
}

template <int terms>
inline Vec times_phi(const Quarters<terms>& phi, Vec x) {
  const Vec a = as_float(
      min(as_int(x) & 0x7fffffff, as_int(splat(nothing_left))));  // as integers floats are in order, too
  return fma(-a, Place<terms>(a).polynomial(phi), ramp_of(x));
}

// Below, the relative error of the slope is more than a float32 should have, and what it takes to compute it is rarely needed.
constexpr float tail_begins = -5.0f;

// x Phi(x) and its slope. A NaN stays one in both.
template <int terms>
inline ValueAndSlope both_by_tables(const Quarters<terms>& phi, const Quarters<terms>& slope, Vec x) {
  const Vec a = min(nothing_left, abs(x));  // keeps a NaN
  const Place<terms> place(a);
  const Vec s = place.polynomial(slope);
  return {fma(-a, place.polynomial(phi), ramp_of(x)),
          _mm512_mask_sub_ps(s, _mm512_cmp_ps_mask(x, Vec{}, _CMP_NLT_UQ), splat(1.0f), s)};
}

#endif

}  // namespace opsmith
