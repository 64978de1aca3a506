// The curves by which gated and plain activations weight their input: Phi, in both forms of GELU, and the sigmoid.
//
// `Curve<T>::both(x)` gives the value f(x) and the slope f'(x), as precise as T can show. The relative error of the
// lower tail is kept in every type: each curve there is an exponential times something near 1.
#pragma once

#include "pair.h"
#include "tables/phi_table.h"

namespace opsmith {

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

// 1 / x for x neither tiny nor huge, to a unit or so.
inline Vec reciprocal(Vec x) {
#if defined(OPSMITH_AVX512)
  const Vec y = reciprocal_coarse(x);
  return fma(y, fma(-x, y, 1.0f), y);
#else
  return 1.0f / x;
#endif
}

// x * sigmoid(x); the slope is s + x s (1 - s), with 1 - s = e s.
template <class T>
struct Silu {
  static Vec value(Vec x) { return x * reciprocal_for<T>(1.0f + exp_for<T>(-x)); }
  static ValueAndSlope both(Vec x) {
    const Vec e = exp_for<T>(-x), s = reciprocal_for<T>(1.0f + e);
    return {x * s,
            fma(x * s, min(3e38f, e) * s, s)};  // where e is infinite s is 0, and their product must be too
  }
};

// What both forms of Phi below take from x: y = ramp - a Phi(-reach). As integers, floats of one sign are in order too, and
// comparing them so takes half the time. A NaN stays in `reach`, and in `ramp` or `a`, whatever its sign.
struct Halves {
  static constexpr float end = 14.5f;  // from there on a Phi(-a) is less than any float
  Vec ramp;  // max(x, 0)
  Vec a;  // |x|, but no infinity above 0, where 0 times it would be NaN; below, NaN is what GELU has there
  Vec reach;  // min(|x|, end)
  explicit Halves(Vec x) {
    const IVec i = as_int(x);
    ramp = as_float(max(i, IVec{}));
    a = as_float(min(i, as_int(splat(end))) & 0x7fffffff);
    reach = min(end, abs(x));
  }
};

// With a = |x| and t = 1 / (1 + k a), Phi(-a) = e^(-a^2/2) t Q(t): Q fitted to 3e-8, or to 5e-6 for 16 bits (the form is
// Hastings', 1955). Then f(x) = max(x, 0) - a Phi(-a), and at `end` nothing of the second term is left.
template <class T>
struct Gelu {
  static Vec value(Vec x) {
#if defined(OPSMITH_AVX512)
    return times_phi(by_quarters<T, exactly::phi>, x);
#else
    const Halves h(x);
    return h.ramp - h.a * tail(h.reach, gauss(h.reach));
#endif
  }
  static ValueAndSlope both(Vec x) {
#if defined(OPSMITH_AVX512)
    if (!exact || !any(x < tail_begins))
      return both_by_tables(by_quarters<T, exactly::phi>, by_quarters<T, exactly::phi_slope>, x);
#endif
    constexpr float root_half_over_pi = 0.39894228040143268f;
    const Halves h(x);
    const Vec g = gauss(h.reach), t = tail(h.reach, g), slope = fma(h.reach * -root_half_over_pi, g, t);
    return {h.ramp - h.a * t, select(x < 0.0f, slope, 1.0f - slope)};
  }

 private:
  static constexpr bool exact = std::is_same_v<T, float>;
  static Vec gauss(Vec a) { return exact ? exp2_of_square(a) : exp2_for<T>(a * a * (-0.5f * log2_e)); }
  // Phi(-a), given e^(-a^2/2).
  static Vec tail(Vec a, Vec gauss) {
    // Without a fused multiply-add a sum of products rounds too often in float.
    if constexpr (exact && kRoundings > 1) {
      return __builtin_convertvector(to_double(gauss) * share(to_double(a)), Vec);
    } else {
      return gauss * share(a);
    }
  }
  // q t + c
  static Vec step(Vec q, Vec t, float c) { return fma(q, t, c); }
  static DVec step(const DVec& q, const DVec& t, float c) { return q * t + double(c); }
  static DVec reciprocal(const DVec& x) { return 1.0 / x; }
  static Vec reciprocal(Vec x) { return opsmith::reciprocal(x); }
  template <class V>
  static V share(const V& a) {
    if constexpr (exact) {
      const V t = reciprocal(step(a, V{} + 0.35f, 1.0f));  // 1 where a is tiny, without a rounding error
      V q = step(t, V{} - 0.0291459318f, 0.143971711f);
      q = step(q, t, -0.255714267f);
      q = step(q, t, 0.159174174f);
      q = step(q, t, -0.0231098365f);
      q = step(q, t, 0.105508f);
      q = step(q, t, 0.119832866f);
      q = step(q, t, 0.139861867f);
      return t * step(q, t, 0.139621407f);
    } else {
      const Vec t = reciprocal(a + 3.25f);  // scaled by k
      Vec q = fma(t, -88.6143789f, 68.7943908f);
      q = fma(q, t, 0.82085595f);
      q = fma(q, t, 4.67917597f);
      q = fma(q, t, 1.25491169f);
      return t * fma(q, t, 0.399731803f);
    }
  }
  // e^(-a^2/2), as precise as the square's own rounding leaves it.
  static Vec exp2_of_square(Vec a) {
    constexpr float rate = -0.721347511f, rest_of_rate = -9.62981495e-09f;  // -log2(e) / 2 in two parts
    const Vec square = a * a, n = round_to_integer(square * rate);
    const Vec r = fma(square, rest_of_rate, fma(square, rate, -n));
    Vec p = fma(r, 0.000153458138f, 0.00133999319f);
    p = fma(p, r, 0.00961848896f);
    p = fma(p, r, 0.0555032878f);
    p = fma(p, r, 0.240226469f);
    p = fma(p, r, 0.693147206f);
    return scale_exponent(fma(p, r, 1.0f), n);
  }
};

// The tanh form of Phi is 1 / (1 + e), e = exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)).
template <class T>
struct GeluTanh {
  static Vec value(Vec x) {
#if defined(OPSMITH_AVX512)
    return times_phi(by_quarters<T, exactly::phi_tanh>, x);
#else
    return x * reciprocal_for<T>(1.0f + odds(x));
#endif
  }
  static ValueAndSlope both(Vec x) {
#if defined(OPSMITH_AVX512)
    if (!std::is_same_v<T, float> || !any(x < tail_begins))
      return both_by_tables(by_quarters<T, exactly::phi_tanh>, by_quarters<T, exactly::phi_tanh_slope>, x);
#endif
    const Vec c = max(-16.0f, min(16.0f, x));  // the ends are reached: there e is 0, or infinite and s 0
    const Vec e = odds(c), s = reciprocal_for<T>(1.0f + e);
    const Vec rate = fma(c * c, 6 * root_2_over_pi * cubic, 2 * root_2_over_pi);
    return {x * s, fma(c * rate, min(3e38f, e) * s * s, s)};  // e s^2 is s (1 - s) without the cancellation
  }

 private:
  static constexpr float root_2_over_pi = 0.79788456080286536f, cubic = 0.044715f;
  static Vec odds(Vec x) {
    constexpr float unit = std::is_same_v<T, float> ? 1.0f : log2_e;
    const Vec z = -x * fma(x * x, 2 * root_2_over_pi * cubic * unit, 2 * root_2_over_pi * unit);
    return std::is_same_v<T, float> ? exp(z) : exp2_for<T>(z);
  }
};

// A curve's value and slope at a vector or a pair of them.
template <class F, class V>
inline V value_of(V x) {
  return apply(x, [](Vec v) { return F::value(v); });
}
template <class F>
inline ValueAndSlope both_of(Vec x) {
  return F::both(x);
}
struct PairAndSlope {
  Pair value, slope;
};
template <class F>
inline PairAndSlope both_of(Pair x) {
  const ValueAndSlope a = F::both(x.a), b = F::both(x.b);
  return {{a.value, b.value}, {a.slope, b.slope}};
}

// Calls f with a null pointer to the curve: 0 SiLU, 1 GELU, 2 its tanh form.
template <class T, class F>
void with_curve(int64_t activation, F&& f) {
  switch (activation) {
    case 1: return f(static_cast<Gelu<T>*>(nullptr));
    case 2: return f(static_cast<GeluTanh<T>*>(nullptr));
    default: return f(static_cast<Silu<T>*>(nullptr));
  }
}

}  // namespace opsmith
