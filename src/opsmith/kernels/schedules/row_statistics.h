// What is known of a row once its elements were added, pair by pair, vector by vector, and the rest.
#pragma once

#include <limits>

#include "curves.h"
#include "pair.h"

namespace opsmith {

// The larger and the smaller of two; a NaN in either stays, as in PyTorch.
inline Vec larger(Vec x, Vec y) { return select((x > y) | (x != x), x, y); }
inline Vec smaller(Vec x, Vec y) { return select((x < y) | (x != x), x, y); }

// As a tree: short chains, so that one block overlaps the next.
template <int k>
inline Vec add_up(const Vec* v) {
  if constexpr (k == 1) {
    return v[0];
  } else {
    return add_up<k / 2>(v) + add_up<k / 2>(v + k / 2);
  }
}

struct Sum {
  Pair sum{};
  void add(Pair v, Both) { sum = sum + v; }
  void add(Vec v, Full) { sum.a += v; }
  void add(Vec v, Part k) { sum.b += keep(v, k, 0.0f); }
  float value() const { return reduce_add(sum.a + sum.b); }
};

template <bool greatest>
struct Extreme {
  static constexpr float worst = greatest ? -std::numeric_limits<float>::infinity()
                                          : std::numeric_limits<float>::infinity();
  Pair best{splat(worst), splat(worst)};
  static Vec better(Vec x, Vec y) {
    if constexpr (greatest) return larger(x, y);
    return smaller(x, y);
  }
  void add(Pair v, Both) { best = {better(best.a, v.a), better(best.b, v.b)}; }
  void add(Vec v, Full) { best.a = better(best.a, v); }
  void add(Vec v, Part k) { best.b = better(best.b, keep(v, k, worst)); }
  float value() const {
    const Vec v = better(best.a, best.b);
    if (any(v != v)) return std::numeric_limits<float>::quiet_NaN();
    return greatest ? reduce_max(v) : reduce_min(v);
  }
};
using Max = Extreme<true>;
using Min = Extreme<false>;

// Mean and variance in one pass. Each lane holds the mean and the summed squared deviation (m2) of what it saw; `pivoted`,
// the mean as its distance from a pivot near it, as a float alone is too coarse where the mean is large beside the deviation.
// A block of vectors gets its own two moments first (exact, the values are still in registers) and is merged by Chan's
// formula, which is Welford's update for a block:
//   delta = block_mean - mean,  mean += delta * k / (count + k),  m2 += block_m2 + delta^2 * count * k / (count + k)
template <bool pivoted = true>
class Moments {
 public:
  struct Value {  // the mean is high + low
    float high, low, variance;
  };

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
  void add(Pair v, Both) {
    Vec both[2] = {v.a, v.b};
    merge<2>(both);
  }
  void add(Vec v, Full) { merge<1>(&v); }
  void add(Vec v, Part k) {  // the last, shorter vector, kept until the lanes are merged
    rest_[rests_++] = v;
    rest_count_ = k.count;
  }

  Value value() const {
    // Across lanes, all with the same count: Chan again, in one step.
    float high = 0, low = 0, sum2 = 0;
    int64_t n = count_ * W;
    if (count_ > 0) {
      high = reduce_add(pivoted ? pivot_ : mean_) * (1.0f / W);
      const Vec center = (pivot_ - high) + mean_;
      low = reduce_add(center) * (1.0f / W);
      const Vec off = center - low;
      sum2 = reduce_add(m2_ + off * off * float(count_));
    }
    for (int r = 0; r < rests_; ++r) {
      const Part k{rest_count_};
      if (n == 0) high = rest_[r][0];
      const Vec d = keep(rest_[r] - high - low, k, 0.0f);
      const float delta = reduce_add(d) / float(k.count), share = float(k.count) / float(n + k.count);
      const Vec off = keep(d - delta, k, 0.0f);
      low += delta * share;
      sum2 += reduce_add(off * off) + delta * delta * share * float(n);
      n += k.count;
    }
    return {high, low, sum2 / float(n)};
  }
  float mean() const {
    const Value m = value();
    return m.high + m.low;
  }
  float variance() const { return value().variance; }

 private:
  Vec pivot_{}, mean_{}, m2_{}, rest_[2];
  int64_t count_ = 0;
  int rests_ = 0, rest_count_ = 0;  // two where a row's halves are walked together
};

// The maximum, and the sum of e^(x - maximum), in one pass: the sum is scaled down where a larger element turns up.
template <class P>
class Online {
 public:
  void add(Pair v, Both) {
    step(top_.a, sum_.a, v.a);
    step(top_.b, sum_.b, v.b);
  }
  void add(Vec v, Full) { step(top_.a, sum_.a, v); }
  void add(Vec v, Part k) { step(top_.b, sum_.b, keep(v, k, least)); }

  float max() const {
    const Vec v = larger(top_.a, top_.b);
    return any(v != v) ? std::numeric_limits<float>::quiet_NaN() : reduce_max(v);
  }
  float sum() const {
    const float top = max();
    if (top == least) return std::numeric_limits<float>::quiet_NaN();  // as infinity - infinity is
    return reduce_add(sum_.a * scale(top_.a, splat(top)) + sum_.b * scale(top_.b, splat(top)));
  }

 private:
  static constexpr float least = -std::numeric_limits<float>::infinity();
  // e^(x - top), and 0 where x is -infinity, whatever top is.
  static Vec scale(Vec x, Vec top) { return select(x == least, Vec{}, exp_for<P>(x - top)); }
  static void step(Vec& top, Vec& sum, Vec v) {
    if (any(v > top)) {
      const Vec higher = max_of(top, v);
      sum *= scale(top, higher);
      top = higher;
    }
    sum += scale(v, top);
  }
  static Vec max_of(Vec top, Vec v) { return select(v > top, v, top); }

  Pair top_{splat(least), splat(least)}, sum_{};
};

}  // namespace opsmith
