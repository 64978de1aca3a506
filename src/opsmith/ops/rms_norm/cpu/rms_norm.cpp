// RMSNorm: each row is read from memory once, while the row before it, still in cache, is written. x, residual, y and summed are
// [rows, n], weight [n], rstd [rows] float32.
#include <cmath>

#include "norm.h"

namespace opsmith {
namespace {

class SumOfSquares {
 public:
  template <int k>
  void merge(Vec* v) {
#pragma GCC unroll 8
    for (int j = 0; j < k; ++j) total_[j % 4] = fma(v[j], v[j], total_[j % 4]);
  }
  void add(Vec v, Part k) {
    v = keep(v, k, 0.0f);
    total_[0] = fma(v, v, total_[0]);
  }
  float mean(int64_t n) const { return reduce_add(add_up<4>(total_)) / float(n); }

 private:
  Vec total_[4] = {};
};

template <class T>
struct RmsNorm {
  using Stats = SumOfSquares;
  using Of = float;  // what a row is multiplied with

  Of of(int64_t r, const Stats& stats) const {
    const float scale = 1.0f / std::sqrt(stats.mean(n) + eps);
    if (rstd) rstd[r] = scale;
    return scale;
  }

  template <class V>
  V apply(Of scale, V v, const V& weights) const {
    v = v * scale;
    return (round_first ? round_to<T>(v) : v) * weights;
  }

  int64_t n;
  float eps;
  bool round_first;
  float* rstd;  // or null
};

}  // namespace

void rms_norm(View x, View residual, View weight, double eps, double offset, bool round_first, View y,
              View summed, View rstd) {
  const int64_t n = x.sizes[1];
  if (x.sizes[0] == 0 || n == 0) return;
  with_float_type(x.dtype, [&]<class T>(T*) {
    const RmsNorm<T> norm{n, float(eps), round_first, rstd.as<float>()};
    with_parameter_type<T>(offset != 0.0, weight, View{}, [&]<class P>(P*) {
      const Parameter<T, P> w(weight, n, 1.0f, float(offset));
      norm_forward<T>(
          x, residual, y, summed, [w = w.data()](int64_t i, auto k) { return load(w + i, k); }, norm);
    });
  });
}

}  // namespace opsmith
