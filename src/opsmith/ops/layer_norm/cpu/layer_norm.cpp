// LayerNorm: each row is read from memory once, while the row before it, still in cache, is written.
#include <cmath>

#include "layer_norm/layer_norm.h"
#include "norm.h"

namespace opsmith {
namespace {

// Mean as high + low, as a float alone is too coarse where the mean is large beside the deviation.
struct Moments {
  float high, low, variance;
};

// Statistics of a row in one pass. Each lane holds the mean and the summed squared deviation (m2) of what it saw,
// the mean as its distance from a pivot near it (zero for the 16-bit types: no mean of theirs is too large for a float). A block of vectors gets its own two moments first (exact, the values are
// still in registers) and is merged by Chan's formula, which is Welford's update for a block:
//   delta = block_mean - mean,  mean += delta * k / (count + k),  m2 += block_m2 + delta^2 * count * k / (count + k)
template <bool pivoted>
class Welford {
 public:
  template <int k>
  void merge(Vec* v) {
    if constexpr (pivoted) {
      if (count_ == 0) pivot_ = add_up<k>(v) * (1.0f / k);
#pragma GCC unroll 8
      for (int j = 0; j < k; ++j) v[j] -= pivot_;
    }
    const Vec block_mean = add_up<k>(v) * (1.0f / k);
    constexpr int chains = k < 4 ? k : 4;
    Vec part[chains] = {};
#pragma GCC unroll 8
    for (int j = 0; j < k; ++j) {
      const Vec d = v[j] - block_mean;
      part[j % chains] = fma(d, d, part[j % chains]);
    }
    const Vec squares = add_up<chains>(part);
    const float share = float(k) / float(count_ + k);
    const Vec delta = block_mean - mean_;
    mean_ = fma(delta, share, mean_);
    m2_ += fma(delta, delta * (share * float(count_)),
               squares);  // the first block adds 0, however large its mean
    count_ += k;
  }

  void merge_rest(Vec v, Part k) {  // the last, shorter vector, kept until the lanes are merged
    rest_ = v;
    rest_count_ = k.count;
  }

  Moments moments(int64_t n) const {
    // Across lanes, all with the same count: Chan again, in one step.
    float high = 0, low = 0, sum2 = 0;
    if (count_ > 0) {
      high = reduce_add(pivoted ? pivot_ : mean_) * (1.0f / W);
      const Vec center = (pivot_ - high) + mean_;
      low = reduce_add(center) * (1.0f / W);
      const Vec off = center - low;
      sum2 = reduce_add(m2_ + off * off * float(count_));
    }
    if (rest_count_) {
      const Part k{rest_count_};
      if (count_ == 0) high = rest_[0];
      const Vec d = keep(rest_ - high - low, k, 0.0f);
      const float delta = reduce_add(d) / float(k.count), share = float(k.count) / float(n);
      const Vec off = keep(d - delta, k, 0.0f);
      low += delta * share;
      sum2 += reduce_add(off * off) + delta * delta * share * float(n - k.count);
    }
    return {high, low, sum2 / float(n)};
  }

 private:
  Vec pivot_{}, mean_{}, m2_{}, rest_{};
  int64_t count_ = 0;
  int rest_count_ = 0;
};

template <class T>
struct LayerNorm {
  using Stats = Welford<std::is_same_v<T, float>>;
  struct Of {
    float scale, high, low;
  };

  Of of(int64_t r, const Stats& stats) const {
    const Moments m = stats.moments(n);
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
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const LayerNorm<T> norm{n, float(eps), mean.as<float>(), rstd.as<float>()};
    with_parameter_type<T>(false, weight, bias, [&](auto* p) {
      using P = std::remove_pointer_t<decltype(p)>;
      const Parameter<T, P> w(weight, n, 1.0f), b(bias, n, 0.0f);
      auto parameters = [w = w.data(), b = b.data()](int64_t i, auto k) {
        return std::make_pair(load(w + i, k), load(b + i, k));
      };
      norm_forward<T>(x, residual, y, summed, parameters, norm);
    });
  });
}

}  // namespace opsmith
