// LayerNorm: each row is read from memory once, while the row before it, still in cache, is written. x, residual, y and summed are
// [rows, n], weight and bias [n], mean and rstd [rows] float32.
#include <cmath>

#include "norm.h"

namespace opsmith {
namespace {

template <class T>
struct LayerNorm {
  using Stats = Moments<std::is_same_v<T, float>>;  // no mean of 16 bits is too large for a float
  struct Of {
    float scale, high, low;
  };

  Of of(int64_t r, const Stats& stats) const {
    const auto m = stats.value();
    const float scale = 1.0f / std::sqrt(m.variance + eps);
    if (mean) mean[r] = m.high + m.low;
    if (rstd) rstd[r] = scale;
    return {scale, m.high, -m.low * scale};
  }

  template <class V, class Weights>
  static V apply(const Of& of, V v, const Weights& weights) {
    return fma(fma(v - of.high, of.scale, of.low), weights.first, weights.second);
  }

  int64_t n;
  float eps;
  float *mean, *rstd;  // or null
};

}  // namespace

void layer_norm(View x, View residual, View weight, View bias, double eps, View y, View summed, View mean,
                View rstd) {
  const int64_t n = x.sizes[1];
  if (x.sizes[0] == 0 || n == 0) return;
  with_float_type(x.dtype, [&]<class T>(T*) {
    const LayerNorm<T> norm{n, float(eps), mean.as<float>(), rstd.as<float>()};
    with_parameter_type<T>(false, weight, bias, [&]<class P>(P*) {
      const Parameter<T, P> w(weight, n, 1.0f), b(bias, n, 0.0f);
      auto parameters = [w = w.data(), b = b.data()](int64_t i, auto k) {
        return std::make_pair(load(w + i, k), load(b + i, k));
      };
      norm_forward<T>(x, residual, y, summed, parameters, norm);
    });
  });
}

}  // namespace opsmith
