// GELU, x * Phi(x), exact (erf) and in its tanh form, with the bias before it.
#include <cmath>

#include "kernels.h"
#include "rows.h"

namespace opsmith {
namespace {

constexpr int64_t task = 8192;
constexpr int64_t ahead = 1024;  // bytes: a vector takes long, so that few loads would be on their way otherwise
constexpr int64_t piece = 1024;  // what a row is where there are no rows to respect

// For 16-bit results. Both forms multiply x by a curve that rises from 0 to 1 and is odd around (0, 1/2):
// Phi(x) = 1/2 + x P(x^2). P is a minimax polynomial on |x| <= 5 in u = 2 (x / 5)^2 - 1, where its coefficients are
// small and nothing cancels; outside, Phi is 0 or 1 as far as the result shows. |x| times the error of Phi is below
// 5e-6, and below 2e-6 for |x| < 1, for half the arithmetic of an exponential.
constexpr float bound = 5.0f;
using Curve = float[12];
constexpr Curve erf_curve = {0.141363725f,   -0.0702983215f, 0.0515267998f,   -0.0403910466f,
                             0.0313393213f,  -0.0236218963f, 0.0169817302f,   -0.0102017894f,
                             0.00499804271f, -0.00380894751f, 0.00325720734f, -0.00114495622f};
constexpr Curve tanh_curve = {0.141378462f,   -0.0703679845f,  0.0516629741f, -0.0404860638f,
                              0.031247925f,   -0.0234010499f,  0.0166183747f, -0.00941256713f,
                              0.00433472125f, -0.00427381229f, 0.0042239991f, -0.00152508146f};

inline Vec phi_curve(Vec x, const Curve& curve) {
  const Vec c = max(-bound, min(bound, x));
  const Vec u = fma(c * c, 2.0f / (bound * bound), -1.0f);
  const Vec u2 = u * u, u4 = u2 * u2;  // Estrin's order: short chains, so that neighboring vectors overlap
  auto pair = [&](int i) { return fma(u, curve[i + 1], curve[i]); };
  auto four = [&](int i) { return fma(pair(i + 2), u2, pair(i)); };
  const Vec p = fma(fma(four(8), u4, four(4)), u4, four(0));
  return select(x <= -bound, Vec{}, fma(c, p, 0.5f));
}

// For float32, with the relative error of the lower tail kept to a few units in the last place:
// Phi(-|x|) = e^(-x^2/2) t Q(t), t = 1 / (1 + 0.35 |x|), Q fitted to 3e-8 (the form is Hastings', 1955).
inline Vec phi(Vec x, Vec gauss) {
  const Vec t = 1.0f / fma(abs(x), 0.35f, 1.0f);
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

constexpr float root_2_over_pi = 0.79788456080286536f, root_half_over_pi = 0.39894228040143268f, cubic = 0.044715f;

// The tanh form of Phi is 1 / (1 + e), e this.
inline Vec odds(Vec x) { return exp(-x * fma(x * x, 2 * root_2_over_pi * cubic, 2 * root_2_over_pi)); }

template <class T, bool Tanh>
inline Vec value(Vec x) {
  if constexpr (std::is_same_v<T, float>) {
    return Tanh ? x / (1.0f + odds(x)) : x * phi(x, exp(x * x * -0.5f));
  } else {
    return x * phi_curve(x, Tanh ? tanh_curve : erf_curve);
  }
}

template <bool Tanh>
inline Vec derivative(Vec x) {
  if constexpr (Tanh) {
    x = max(-10.0f, min(10.0f, x));  // the ends are reached, and e stays finite
    const Vec e = odds(x), s = 1.0f / (1.0f + e), slope = fma(x * x, 6 * root_2_over_pi * cubic, 2 * root_2_over_pi);
    return fma(x * slope, e * s * s, s);  // e s^2 is s (1 - s) without the cancellation
  } else {
    const Vec gauss = exp(x * x * -0.5f);
    return fma(x * root_half_over_pi, gauss, phi(x, gauss));
  }
}

// y = f(x + bias), row by row, or in equal pieces where rows do not matter.
template <class T, class F>
void map_rows(const View& x, const View& bias, const View& y, F f) {
  const int64_t rows = x.sizes[0], n = x.sizes[1], total = rows * n;
  if (total == 0) return;
  const bool flat = !bias.defined() && x.strides[0] == n && y.strides[0] == n;
  const int64_t width = flat ? piece : n, count = flat ? (total + piece - 1) / piece : rows;
  const int64_t x_pitch = flat ? piece : x.strides[0], y_pitch = flat ? piece : y.strides[0];
  const bool past_cache = outlives_cache(total * int64_t(sizeof(T)));
  with_float_type(bias.defined() ? bias.dtype : DType::f32, [&](auto* t) {
    const auto* b = bias.as<std::remove_pointer_t<decltype(t)>>();
    parallel_for(count, row_grain(width, task), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* xr = x.as<T>() + r * x_pitch;
        T* yr = y.as<T>() + r * y_pitch;
        const bool streaming = past_cache && can_stream(yr);
        // By value, here and below: a reference would be read again after every store.
        for_lanes(flat ? std::min(piece, total - r * piece) : n, [=](int64_t i, auto k) {
          prefetch(reinterpret_cast<const char*>(xr + i) + ahead);
          Vec v = load(xr + i, k);
          if (b) v += load(b + i, k);
          put(yr + i, f(v), k, streaming);
        });
      }
      if (past_cache) stream_fence();
    });
  });
}

template <class T, bool Tanh>
void backward(const View& dy, const View& x, const View& bias, const View& dx) {
  const int64_t rows = x.sizes[0], n = x.sizes[1];
  with_float_type(bias.defined() ? bias.dtype : DType::f32, [&](auto* t) {
    const auto* b = bias.as<std::remove_pointer_t<decltype(t)>>();
    parallel_for(rows, row_grain(n, task), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gr = dy.as<T>() + r * dy.strides[0];
        const T* xr = x.as<T>() + r * x.strides[0];
        T* out = dx.as<T>() + r * dx.strides[0];
        for_lanes(n, [=](int64_t i, auto k) {
          Vec v = load(xr + i, k);
          if (b) v += load(b + i, k);
          store(out + i, load(gr + i, k) * derivative<Tanh>(v), k);
        });
      }
    });
  });
}

}  // namespace

void gelu(View x, View bias, bool tanh, View y) {
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (tanh) {
      map_rows<T>(x, bias, y, [](Vec v) { return value<T, true>(v); });
    } else {
      map_rows<T>(x, bias, y, [](Vec v) { return value<T, false>(v); });
    }
  });
}

void gelu_backward(View dy, View x, View bias, bool tanh, View dx) {
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (tanh) {
      backward<T, true>(dy, x, bias, dx);
    } else {
      backward<T, false>(dy, x, bias, dx);
    }
  });
}

}  // namespace opsmith
