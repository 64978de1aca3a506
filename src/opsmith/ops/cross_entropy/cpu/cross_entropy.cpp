// Cross-entropy: the forward reads the logits once, the backward reads them once and writes the gradient.
#include "cross_entropy.h"

#include <vector>

#include "exp_sum.h"

namespace opsmith {
namespace {

constexpr int64_t task = 8192;

std::vector<int64_t> targets_of(const View& target) {
  std::vector<int64_t> all(size_t(target.sizes[0]));
  for (size_t i = 0; i < all.size(); ++i) all[i] = integer_at(target, int64_t(i) * target.strides[0]);
  return all;
}

int64_t count_valid(const std::vector<int64_t>& targets, int64_t ignore_index) {
  return int64_t(targets.size()) - std::count(targets.begin(), targets.end(), ignore_index);
}

template <bool coarse, class T>
void read_row(ExpSum& s, const T* x, int64_t n, int64_t target, const LossOptions& o) {
  if (o.label_smoothing == 0) {
    add_to_sum<T, false, coarse>(s, x, n, target);
  } else {
    add_to_sum<T, true, coarse>(s, x, n, target);
  }
}

// What the backward needs of every row: two rows of stats, or nothing.
struct Stats {
  float *pivots, *log_totals;
  explicit Stats(const View& v)
      : pivots(v.as<float>()), log_totals(v.defined() ? pivots + v.strides[0] : nullptr) {}
  void keep(int64_t r, float pivot, float log_total) const {
    if (pivots) pivots[r] = pivot, log_totals[r] = log_total;
  }
};

// loss = (1 - smoothing) * (lse - z_target) + smoothing * (lse - mean(z)) + z_loss * lse^2, with lse = pivot +
// log(total). Differences first: lse and z_target may both be 1e4, and the loss 1e-3.
double row_loss(const ExpSum& s, float z_target, int64_t n, const LossOptions& o, const Stats& stats,
                int64_t r) {
  const double above = s.log_total();
  stats.keep(r, s.pivot, float(above));
  double loss = (double(s.pivot) - double(z_target)) + above;
  if (o.label_smoothing != 0) {
    const double mean = (double(s.pivot) - s.values / double(n)) + above;
    loss = (1 - o.label_smoothing) * loss + o.label_smoothing * mean;
  }
  const double lse = double(s.pivot) + above;
  return o.z_loss == 0 ? loss : loss + o.z_loss * lse * lse;
}

template <bool coarse, class T>
void forward(const View& logits, const std::vector<int64_t>& targets, const LossOptions& o, double* losses,
             Stats stats) {
  const int64_t rows = logits.sizes[0], n = logits.sizes[1];
  parallel_rows(rows, row_grain(n, task), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t target = targets[size_t(r)];
      if (target == o.ignore_index) {
        stats.keep(r, 0, 0);
        continue;
      }
      const T* x = logits.as<T>() + r * logits.strides[0];
      ExpSum s;
      read_row<coarse>(s, x, n, target, o);
      losses[r] = row_loss(s, to_float(x[target]), n, o, stats, r);
    }
  });
}

// One loss for each row, or their sum or mean.
void reduce(const std::vector<double>& losses, const std::vector<int64_t>& targets, const LossOptions& o,
            const View& loss) {
  with_float_type(loss.dtype, [&]<class T>(T*) {
    T* const out = loss.as<T>();
    if (o.reduction == Reduction::none) {
      for (size_t i = 0; i < losses.size(); ++i)
        out[int64_t(i) * loss.strides[0]] = from_float<T>(float(losses[i]));
      return;
    }
    double total = 0;
    for (double l : losses) total += l;
    // Nothing but ignored targets: 0 / 0, as in PyTorch.
    if (o.reduction == Reduction::mean) total /= double(count_valid(targets, o.ignore_index));
    out[0] = from_float<T>(float(total));
  });
}

// A row's sum between two parts of its logits; the doubles as two floats each.
struct State {
  float* data;
  int64_t stride;
  float& at(int field, int64_t r) const { return data[field * stride + r]; }
  float& z_target(int64_t r) const { return at(5, r); }
  ExpSum load(int64_t r) const {
    ExpSum s;
    s.pivot = at(0, r);
    s.total = double(at(1, r)) + double(at(2, r));
    s.values = double(at(3, r)) + double(at(4, r));
    return s;
  }
  void store(int64_t r, const ExpSum& s) const {
    at(0, r) = s.pivot;
    at(1, r) = float(s.total);
    at(2, r) = std::isfinite(s.total) ? float(s.total - double(float(s.total))) : 0.0f;
    at(3, r) = float(s.values);
    at(4, r) = std::isfinite(s.values) ? float(s.values - double(float(s.values))) : 0.0f;
  }
};

// d = upstream * ((1 + 2 * z_loss * lse) * softmax - (1 - smoothing) * [j == target] - smoothing / n)
// of which x and d hold the `some` classes from `first` on.
template <class T>
void row_gradient(const T* x, int64_t some, int64_t first, int64_t n, int64_t target, const LossOptions& o,
                  float pivot, float log_total, double upstream, T* d, bool streaming) {
  const double lse = double(pivot) + double(log_total);
  const double weight = upstream * (1 + 2 * o.z_loss * lse);
  const float factor = float(weight * std::exp(-double(log_total)));
  const float everywhere = float(-upstream * o.label_smoothing / double(n));
  const int64_t at = target - first;
  const bool here = 0 <= at && at < some;
  const double z = here ? double(to_float(x[at])) : 0;  // before it is overwritten
  for_lanes_unrolled<4>(some, [=](int64_t i, int, auto k) {
    if constexpr (sizeof(T) == 4) {
      prefetch_far(reinterpret_cast<const char*>(x + i) + 8192);
    } else {  // bound by arithmetic
      prefetch(reinterpret_cast<const char*>(x + i) + kPrefetchBytes);
    }
    put(d + i, fma(exp_from_pivot(load(x + i, k) - pivot), factor, splat(everywhere)), k, streaming);
  });
  if (!here) return;
  const double p = std::exp((z - double(pivot)) - double(log_total));
  d[at] = from_float<T>(
      float(weight * p - upstream * ((1 - o.label_smoothing) + o.label_smoothing / double(n))));
}

template <class T>
void backward(const View& dloss, const View& logits, const std::vector<int64_t>& targets, const View& stats,
              const LossOptions& o, int64_t first, int64_t classes, const View& dlogits) {
  const int64_t rows = logits.sizes[0], n = logits.sizes[1];
  const float *pivots = stats.as<float>(), *log_totals = pivots + stats.strides[0];
  const double share = o.reduction == Reduction::mean ? 1.0 / double(count_valid(targets, o.ignore_index))
                                                      : 1.0;
  const bool elsewhere = logits.data != dlogits.data;
  const bool past_cache = elsewhere && outlives_cache(rows * n * int64_t(sizeof(T)));
  with_float_type(dloss.dtype, [&]<class U>(U*) {
    const U* up = dloss.as<U>();
    const int64_t step = o.reduction == Reduction::none ? dloss.strides[0] : 0;
    parallel_rows(rows, row_grain(n, task), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* const d = dlogits.as<T>() + r * dlogits.strides[0];
        if (targets[size_t(r)] == o.ignore_index) {
          std::fill_n(d, n, T{});
          continue;
        }
        row_gradient(logits.as<T>() + r * logits.strides[0], n, first, classes, targets[size_t(r)], o,
                     pivots[r], log_totals[r], share * double(to_float(up[r * step])), d,
                     past_cache && can_stream(d));
      }
      if (past_cache) stream_fence();
    });
  });
}

}  // namespace

void cross_entropy(View logits, View target, const LossOptions& options, View loss, View stats) {
  const std::vector<int64_t> targets = targets_of(target);
  std::vector<double> losses(targets.size());
  with_float_type(logits.dtype, [&]<class T>(T*) {
    const auto run = sizeof(T) == 2 && loss.dtype != DType::f32 ? forward<sizeof(T) == 2, T>
                                                                : forward<false, T>;
    run(logits, targets, options, losses.data(), Stats(stats));
  });
  reduce(losses, targets, options, loss);
}

void cross_entropy_backward(View dloss, View logits, View target, View stats, const LossOptions& options,
                            int64_t first, int64_t classes, View dlogits) {
  const std::vector<int64_t> targets = targets_of(target);
  with_float_type(logits.dtype, [&]<class T>(T*) {
    backward<T>(dloss, logits, targets, stats, options, first, classes, dlogits);
  });
}

void cross_entropy_part(View logits, View target, const LossOptions& options, int64_t first, View state) {
  const std::vector<int64_t> targets = targets_of(target);
  const int64_t n = logits.sizes[1];
  const State states{state.as<float>(), state.strides[0]};
  with_float_type(logits.dtype, [&]<class T>(T*) {
    parallel_for(logits.sizes[0], row_grain(n, task), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t target = targets[size_t(r)], at = target - first;
        if (target == options.ignore_index) continue;
        const T* x = logits.as<T>() + r * logits.strides[0];
        ExpSum s;
        if (first > 0) s = states.load(r);
        read_row<sizeof(T) == 2>(s, x, n, at, options);
        states.store(r, s);
        if (0 <= at && at < n) states.z_target(r) = to_float(x[at]);
      }
    });
  });
}

void cross_entropy_finish(View state, View target, const LossOptions& options, int64_t classes, View loss,
                          View stats) {
  const std::vector<int64_t> targets = targets_of(target);
  std::vector<double> losses(targets.size());
  const State states{state.as<float>(), state.strides[0]};
  const Stats kept(stats);
  for (size_t i = 0; i < targets.size(); ++i) {
    const int64_t r = int64_t(i);
    if (targets[i] == options.ignore_index) {
      kept.keep(r, 0, 0);
    } else {
      losses[i] = row_loss(states.load(r), states.z_target(r), classes, options, kept, r);
    }
  }
  reduce(losses, targets, options, loss);
}

void add_to_total(View part, View total) {
  with_float_type(part.dtype, [&]<class T>(T*) {
    const T* p = part.as<T>();
    float* sums = total.as<float>();
    parallel_for(part.sizes[0], 4 * task, [&](int64_t begin, int64_t end) {
      for_lanes(end - begin, [&](int64_t i, auto k) {
        store(sums + begin + i, load(sums + begin + i, k) + load(p + begin + i, k), k);
      });
    });
  });
}

}  // namespace opsmith
