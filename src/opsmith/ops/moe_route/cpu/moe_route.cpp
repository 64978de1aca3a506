// Routing: a row of logits at a time, in float32. Softmax and sigmoid keep the order of their logits, so without a bias experts are
// chosen by these, in which rounding makes no ties.
#include "moe_route.h"

#include <cmath>

#include "rows.h"

namespace opsmith {
namespace {

constexpr double kTiny = 1e-20;  // DeepSeek's, so that scores that are all 0 give weights of 0

inline float* scratch_of(int64_t experts, int64_t chosen, int64_t groups) {
  return scratch(3 * round_up(experts, W) + 2 * (chosen + groups));
}

// The logits in float32, and their scores.
template <class T>
void scores_of(const T* logits, int64_t experts, bool sigmoid, float* wide, float* scores) {
  for_lanes(experts, [&](int64_t i, auto lanes) { store(wide + i, load(logits + i, lanes), lanes); });
  if (sigmoid) {
    for_lanes(experts, [&](int64_t i, auto lanes) {
      store(scores + i, 1.0f / (1.0f + exp(-load(wide + i, lanes))), lanes);
    });
    return;
  }
  Vec top = splat(-INFINITY), total = {};
  for_lanes(experts,
            [&](int64_t i, auto lanes) { top = max(top, keep(load(wide + i, lanes), lanes, -INFINITY)); });
  const float pivot = reduce_max(top);
  for_lanes(experts, [&](int64_t i, auto lanes) {
    const Vec e = exp(load(wide + i, lanes) - pivot);
    store(scores + i, e, lanes);
    total += keep(e, lanes, 0.0f);
  });
  const float sum = reduce_add(total);
  for_lanes(experts, [&](int64_t i, auto lanes) { store(scores + i, load(scores + i, lanes) / sum, lanes); });
}

// The places of the `count` largest of what next(f) gives to f(place, value), largest first, of equal ones the first.
// `kept` holds their values.
template <class Id, class F>
void largest(int64_t count, Id* places, float* kept, const F& next) {
  int64_t have = 0;
  next([&](int64_t place, float value) {
    if (have == count && !(value > kept[count - 1])) return;
    int64_t at = have < count ? have++ : count - 1;
    for (; at > 0 && value > kept[at - 1]; --at) {
      kept[at] = kept[at - 1];
      places[at] = places[at - 1];
    }
    kept[at] = value;
    places[at] = Id(place);
  });
}

// How good a group is: its largest value, or the sum of its two largest.
float value_of_group(const float* values, int64_t size, bool two) {
  float first = values[0], second = 0;
  for (int64_t i = 1; i < size; ++i) {
    const float v = values[i];
    second = i == 1 ? std::min(first, v) : std::max(second, std::min(first, v));
    first = std::max(first, v);
  }
  return two && size > 1 ? first + second : first;
}

template <class T>
void route(const View& logits, const View& bias, const Routing& how, const View& ids, const View& weights) {
  const int64_t tokens = logits.sizes[0], experts = logits.sizes[1], chosen = ids.sizes[1];
  const int64_t size = experts / how.groups;
  parallel_for(tokens, row_grain(experts, 8192), [&](int64_t begin, int64_t end) {
    float* const wide = scratch_of(experts, chosen, how.groups);
    float *const scores = wide + round_up(experts, W), *const sums = scores + round_up(experts, W);
    float *const kept = sums + round_up(experts, W), *const of_groups = kept + chosen + how.groups;
    for (int64_t t = begin; t < end; ++t) {
      scores_of(logits.as<T>() + t * logits.strides[0], experts, how.sigmoid, wide, scores);
      const float *by = wide, *groups_by = how.sigmoid ? scores : wide;
      if (bias.defined()) {
        with_float_type(bias.dtype, [&]<class B>(B*) {
          const B* add = bias.as<B>();
          for_lanes(experts, [&](int64_t i, auto lanes) {
            store(sums + i, load(scores + i, lanes) + load(add + i, lanes), lanes);
          });
        });
        by = groups_by = sums;
      }
      int64_t* const id = ids.as<int64_t>() + t * chosen;
      float* const weight = weights.as<float>() + t * chosen;
      int32_t* const open = reinterpret_cast<int32_t*>(of_groups);
      open[0] = 0;
      if (how.groups > 1) {
        largest(how.open, open, kept, [&](auto&& f) {
          for (int64_t g = 0; g < how.groups; ++g) {
            f(g, value_of_group(groups_by + g * size, size, how.sigmoid || bias.defined()));
          }
        });
        std::sort(open, open + how.open);  // so that experts are seen in their order
      }
      largest(chosen, id, kept, [&](auto&& f) {
        for (int64_t g = 0; g < how.open; ++g) {
          for (int64_t e = open[g] * size; e < (open[g] + 1) * size; ++e) f(e, by[e]);
        }
      });
      double total = how.normalize ? kTiny : 1;
      for (int64_t j = 0; how.normalize && j < chosen; ++j) total += scores[id[j]];
      for (int64_t j = 0; j < chosen; ++j) weight[j] = float(how.scale * double(scores[id[j]]) / total);
    }
  });
}

template <class T>
void back(const View& dweights, const View& logits, const View& ids, const Routing& how,
          const View& dlogits) {
  const int64_t tokens = logits.sizes[0], experts = logits.sizes[1], chosen = ids.sizes[1];
  parallel_for(tokens, row_grain(experts, 8192), [&](int64_t begin, int64_t end) {
    float* const wide = scratch_of(experts, chosen, 1);
    float *const scores = wide + round_up(experts, W), *const slopes = scores + round_up(experts, W);
    for (int64_t t = begin; t < end; ++t) {
      scores_of(logits.as<T>() + t * logits.strides[0], experts, how.sigmoid, wide, scores);
      const int64_t* const id = ids.as<int64_t>() + t * chosen;
      const float* const seen = dweights.as<float>() + t * chosen;
      std::fill_n(slopes, experts, 0.0f);
      double total = kTiny, along = 0, all = 0;
      for (int64_t j = 0; j < chosen; ++j) {
        total += scores[id[j]];
        along += double(seen[j]) * double(scores[id[j]]);
      }
      for (int64_t j = 0; j < chosen; ++j) {  // by the score of each that was chosen
        const double slope = how.normalize ? (seen[j] - along / total) / total : double(seen[j]);
        slopes[id[j]] = float(slope * how.scale);
        all += slope * how.scale * double(scores[id[j]]);
      }
      T* const to = dlogits.as<T>() + t * dlogits.strides[0];
      const float taken = how.sigmoid ? 0.0f : float(all);
      for_lanes(experts, [&](int64_t i, auto lanes) {
        const Vec s = load(scores + i, lanes), by = load(slopes + i, lanes);
        store(to + i, how.sigmoid ? by * s * (1.0f - s) : s * (by - taken), lanes);
      });
    }
  });
}

}  // namespace

void moe_route(const View& logits, const View& bias, const Routing& how, const View& ids,
               const View& weights) {
  with_float_type(logits.dtype, [&]<class T>(T*) { route<T>(logits, bias, how, ids, weights); });
}

void moe_route_backward(const View& dweights, const View& logits, const View& ids, const Routing& how,
                        const View& dlogits) {
  with_float_type(logits.dtype, [&]<class T>(T*) { back<T>(dweights, logits, ids, how, dlogits); });
}

}  // namespace opsmith
