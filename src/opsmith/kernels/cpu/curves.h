// The curves by which gated and plain activations weight their input: Phi, in both forms of GELU, and the sigmoid.
//
// `Curve<T>::both(x)` gives the value f(x) and the slope f'(x), as precise as T can show. The relative error of the
// lower tail is kept in every type: each curve there is an exponential times something near 1.
#pragma once

#include "simd.h"

namespace opsmith {

struct ValueAndSlope {
  Vec value, slope;
};

// e^x, 1 / x: exact to a unit or so for float32, to 1e-4 of themselves or better for what is rounded to 16 bits.
template <class T>
inline Vec exp_for(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return exp(x);
  } else {
    return exp2_for<T>(x * log2_e);
  }
}
template <class T>
inline Vec reciprocal_for(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return 1.0f / x;
  } else {
    return reciprocal_coarse(x);
  }
}

// x * sigmoid(x); the slope is s + x s (1 - s), with 1 - s = e s.
template <class T>
struct Silu {
  static Vec value(Vec x) { return x * reciprocal_for<T>(1.0f + exp_for<T>(-x)); }
  static ValueAndSlope both(Vec x) {
    const Vec e = exp_for<T>(-x), s = reciprocal_for<T>(1.0f + e);
    return {x * s, fma(x * s, min(3e38f, e) * s, s)};  // where e is infinite s is 0, and their product must be too
  }
};

// Phi(-|x|) = e^(-x^2/2) t Q(t), t = 1 / (1 + 0.35 |x|), Q fitted to 3e-8 (the form is Hastings', 1955).
template <class T>
struct Gelu {
  static Vec value(Vec x) { return x * phi(x, gauss(x)); }
  static ValueAndSlope both(Vec x) {
    constexpr float root_half_over_pi = 0.39894228040143268f;
    const Vec g = gauss(x), p = phi(x, g);
    return {x * p, fma(x * root_half_over_pi, g, p)};
  }

 private:
  static Vec gauss(Vec x) {
    if constexpr (std::is_same_v<T, float>) {
      return exp(x * x * -0.5f);
    } else {
      return exp2_for<T>(x * x * (-0.5f * log2_e));
    }
  }
  static Vec phi(Vec x, Vec gauss) {
    const Vec t = reciprocal_for<T>(fma(abs(x), 0.35f, 1.0f));
    Vec q = fma(t, -0.0291459318f, 0.143971711f);
    q = fma(q, t, -0.255714267f);
    q = fma(q, t, 0.159174174f);
    q = fma(q, t, -0.0231098365f);
    q = fma(q, t, 0.105508f);
    q = fma(q, t, 0.119832866f);
    q = fma(q, t, 0.139861867f);
    q = fma(q, t, 0.139621407f);
    const Vec tail = gauss * t * q;
    return select(x < 0.0f, tail, 1.0f - tail);
  }
};

// For bfloat16, without a division: log2 Phi(-a) is close to a polynomial S(a), so with E = 2^S(|x|)
//   f(x) = max(x, 0) - |x| E,   f'(x) = E U(|x|) below 0 and 1 - E U(|x|) above, U(a) = 1 - a phi(a) / Phi(-a).
// S and U are minimax on [0, 13.2], E to 1e-3 of itself (bfloat16's half unit is 2e-3 or more), and at the clamp E is 0.
template <>
struct Gelu<bfloat16> {
  static Vec value(Vec x) { return from(x, tail(reach(x))); }
  static ValueAndSlope both(Vec x) {
    const Vec a = reach(x), e = tail(a);
    Vec u = fma(a, 2.92284913e-5f, -0.00102041929f);
    u = fma(u, a, 0.013597385f);
    u = fma(u, a, -0.0906713158f);
    u = fma(u, a, -0.655991554f);
    u = fma(u, a, -0.791063726f);
    u = fma(u, a, 0.99962014f);
    const Vec slope = e * u;
    return {from(x, e), select(x < 0.0f, slope, 1.0f - slope)};
  }

 private:
  static constexpr float end = 15.0f;
  static Vec reach(Vec x) { return min(end, abs(x)); }
  static Vec tail(Vec a) {
    Vec s = fma(a, 4.66247682e-6f, -0.000211100371f);
    s = fma(s, a, 0.00388257834f);
    s = fma(s, a, -0.0384152457f);
    s = fma(s, a, -0.484152734f);
    s = fma(s, a, -1.13333678f);
    return exp2_for<bfloat16>(fma(s, a, -1.00359070f));
  }
  // The factor of E is |x|, but no infinity above 0, where 0 times it would be NaN; below, NaN is what f has there.
  static Vec from(Vec x, Vec e) { return max(0.0f, x) - max(min(end, x), -x) * e; }
};

// The tanh form of Phi is 1 / (1 + e), e = exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)).
template <class T>
struct GeluTanh {
  static Vec value(Vec x) { return x * reciprocal_for<T>(1.0f + odds(x)); }
  static ValueAndSlope both(Vec x) {
    const Vec c = max(-10.0f, min(10.0f, x));  // the ends are reached, and e stays finite
    const Vec e = odds(c), s = reciprocal_for<T>(1.0f + e);
    const Vec rate = fma(c * c, 6 * root_2_over_pi * cubic, 2 * root_2_over_pi);
    return {x * s, fma(c * rate, e * s * s, s)};  // e s^2 is s (1 - s) without the cancellation
  }

 private:
  static constexpr float root_2_over_pi = 0.79788456080286536f, cubic = 0.044715f;
  static Vec odds(Vec x) {
    constexpr float unit = std::is_same_v<T, float> ? 1.0f : log2_e;
    const Vec z = -x * fma(x * x, 2 * root_2_over_pi * cubic * unit, 2 * root_2_over_pi * unit);
    return std::is_same_v<T, float> ? exp(z) : exp2_for<T>(z);
  }
};

}  // namespace opsmith
