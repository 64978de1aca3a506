// The curves by which gated and plain activations weight their input: Phi, in both forms of GELU, and the sigmoid.
//
// `Curve<T>::both(x)` gives the value f(x) and the slope f'(x), as precise as T can show. The relative error of the
// lower tail is kept in every type: each curve there is an exponential times something near 1.
#pragma once

#include "simd.h"

namespace opsmith {

struct Both {
  Vec value, slope;
};

constexpr float log2_e = 1.44269504088896341f;

// e^x, 1 / x: exact to a unit or so for float32, to 7e-5 of themselves for results that are rounded to 16 bits.
template <class T>
inline Vec exp_for(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return exp(x);
  } else {
    return exp2_coarse(x * log2_e);
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
  static Both both(Vec x) {
    const Vec c = max(-80.0f, x);  // the slope has vanished there, and e stays finite
    const Vec e = exp_for<T>(-c), s = reciprocal_for<T>(1.0f + e);
    return {x * s, fma(x * s, e * s, s)};
  }
};

// Phi(-|x|) = e^(-x^2/2) t Q(t), t = 1 / (1 + 0.35 |x|), Q fitted to 3e-8 (the form is Hastings', 1955).
template <class T>
struct Gelu {
  static Vec value(Vec x) { return x * phi(x, gauss(x)); }
  static Both both(Vec x) {
    constexpr float root_half_over_pi = 0.39894228040143268f;
    const Vec g = gauss(x), p = phi(x, g);
    return {x * p, fma(x * root_half_over_pi, g, p)};
  }

 private:
  static Vec gauss(Vec x) {
    if constexpr (std::is_same_v<T, float>) {
      return exp(x * x * -0.5f);
    } else {
      return exp2_coarse(x * x * (-0.5f * log2_e));
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

// The tanh form of Phi is 1 / (1 + e), e = exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)).
template <class T>
struct GeluTanh {
  static Vec value(Vec x) { return x * reciprocal_for<T>(1.0f + odds(x)); }
  static Both both(Vec x) {
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
    return std::is_same_v<T, float> ? exp(z) : exp2_coarse(z);
  }
};

}  // namespace opsmith
