// What a walk over keys has summed so far, and how such sums become one.
#pragma once

#include <algorithm>

#include "attention/attention_scores.h"

namespace opsmith {

// A row of `width` floats for each row of scores; then the sums of the weights and the largest scores, in the order of the
// lanes of a token's scores.
struct Sums {
  float* data = nullptr;
  int64_t rows = 0, width = 0, lanes = 0;

  int64_t size() const { return round_up(rows * width + 2 * lanes, 16); }
  float* row(int64_t r) const { return data + r * width; }
  float* totals() const { return data + rows * width; }
  float* largest() const { return totals() + lanes; }

  // Lanes v on have scores as large as `most`: what was summed of rows whose maximum grows is scaled down. `period` is how
  // many lanes a token has.
  Vec raise(int64_t v, Vec most, int64_t period, float exponent) const {
    const Vec old = load(largest() + v), now = select(most > old, most, old);
    const Vec shrink = select(most > old, exp2<true>((old - now) * exponent), splat(1.0f));
    store(largest() + v, now);
    store(totals() + v, load(totals() + v) * shrink);
    for (int64_t i = 0; i < W && v + i < std::min(rows, period); ++i) {
      if (!(most[i] > old[i]) || old[i] == -kInfinity) continue;
      float* p = row(v + i);
      for (int64_t c = 0; c < width; c += W) store(p + c, load(p + c) * shrink[i]);
    }
    return now;
  }
};

// Of a vector that holds several tokens of `lanes` rows each, what `op` makes of a row's lanes, in all of these.
template <class Op>
inline Vec over_rows(Vec x, int64_t lanes, const Op& op) {
  float lane[W];
  store(lane, x);
  for (int64_t h = W / 2; h >= lanes; h /= 2) {
    for (int64_t i = 0; i < h; ++i) lane[i] = op(lane[i], lane[i + h]);
  }
  for (int64_t i = lanes; i < W; ++i) lane[i] = lane[i - lanes];
  return load(lane);
}

// Of each row of all parts, f(i) being one of `count`, what its part of the result is multiplied by: it takes the place of the largest
// score. The first part keeps the sums of all weights, 0 where no key was seen.
template <class F>
inline void share_out(int64_t count, int64_t period, float exponent, const F& f) {
  const Sums first = f(0);
  for (int64_t v = 0; v < first.lanes; v += W) {
    Vec most = load(first.largest() + v), total = {};
    for (int64_t i = 1; i < count; ++i) most = max(load(f(i).largest() + v), most);
    for (int64_t i = 0; i < count; ++i) {
      const Sums part = f(i);
      const Vec largest = load(part.largest() + v);
      const Vec factor = select(largest == most, splat(1.0f), exp2<true>((largest - most) * exponent));
      store(part.largest() + v, factor);
      total += load(part.totals() + v) * factor;
    }
    if (period < W) total = over_rows(total, period, [](float a, float b) { return a + b; });
    store(first.totals() + v, total);
    for (int64_t i = 0; i < count; ++i) store(f(i).largest() + v, load(f(i).largest() + v) / total);
  }
}

}  // namespace opsmith
