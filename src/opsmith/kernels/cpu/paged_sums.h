// What a walk over keys has summed so far, and how such sums become one.
#pragma once

#include <vector>

#include "attention_scores.h"

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

// Of a vector that holds several tokens of `lanes` rows each, the largest of a row in all of its lanes.
inline Vec most_of_rows(Vec x, int64_t lanes) {
  float lane[W];
  store(lane, x);
  for (int64_t h = W / 2; h >= lanes; h /= 2) {
    for (int64_t i = 0; i < h; ++i) lane[i] = std::max(lane[i], lane[i + h]);
  }
  for (int64_t i = lanes; i < W; ++i) lane[i] = lane[i - lanes];
  return load(lane);
}

// Row r of all parts, in the first one's place. The sum of its weights is returned.
inline float merge_row(const std::vector<Sums>& parts, int64_t r, int64_t period, float exponent) {
  float largest = -kInfinity, total = 0;
  for (const Sums& from : parts) largest = std::max(largest, from.largest()[r]);
  float* const into = parts[0].row(r);
  for (const Sums& from : parts) {
    const float factor = from.largest()[r] == largest ? 1.0f : std::exp2((from.largest()[r] - largest) * exponent);
    for (int64_t lane = r; lane < from.lanes; lane += period) total += from.totals()[lane] * factor;
    for (int64_t c = 0; c < from.width; c += W) {
      const Vec x = load(from.row(r) + c) * factor;
      store(into + c, from.data == parts[0].data ? x : load(into + c) + x);
    }
  }
  return total;
}

}  // namespace opsmith
