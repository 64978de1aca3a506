// What stands between an expert's two products: the activation of the gate, times up.
#pragma once

#include "curves.h"
#include "experts.h"

namespace opsmith {

// x * sigmoid(1.702 x), which is multiplied by up + 1.
struct OssCurve {
  static Vec value(Vec x) { return x / (1.0f + exp(x * -1.702f)); }
};

class Middle {
 public:
  explicit Middle(const Experts& all) : activation_(all.activation), limit_(all.limit) {}

  bool interleaved() const { return activation_ == 3; }

  // n numbers of a token, in `sums` of 2n: gate and then up, `apart` from each other; or, interleaved, in turns.
  template <class To>
  void operator()(const float* sums, int64_t apart, int64_t n, To* to) const {
    if (!interleaved()) {
      return with_curve<float>(activation_,
                               [&]<class Curve>(Curve*) { run<Curve>(sums, sums + apart, n, 0.0f, to); });
    }
    constexpr int64_t kSome = 64;
    float gate[kSome], up[kSome];
    for (int64_t first = 0; first < n; first += kSome) {
      const int64_t some = std::min(kSome, n - first);
      for (int64_t i = 0; i < some; ++i) {
        gate[i] = sums[2 * (first + i)];
        up[i] = sums[2 * (first + i) + 1];
      }
      run<OssCurve>(gate, up, some, 1.0f, to + first);
    }
  }

 private:
  template <class Curve, class To>
  void run(const float* gate, const float* up, int64_t n, float more, To* to) const {
    const Vec top = splat(limit_), bottom = splat(-limit_);
    for_lanes(n, [&](int64_t i, auto lanes) {
      const Vec g = min(top, load(gate + i, lanes)), u = max(bottom, min(top, load(up + i, lanes)));
      store(to + i, Curve::value(g) * (u + more), lanes);
    });
  }

  const int64_t activation_;
  const float limit_;
};

// n sums, and a bias where there is one.
template <class T>
inline void add_bias(float* sums, const T* bias, int64_t n) {
  if (!bias) return;
  for_lanes(n, [&](int64_t i, auto lanes) {
    store(sums + i, load(sums + i, lanes) + load(bias + i, lanes), lanes);
  });
}

}  // namespace opsmith
