// One attention problem or many at once, shared out to the threads. For attention and its backward pass.
#pragma once

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "attention.h"
#include "parallel.h"

namespace opsmith {

constexpr double kSerialCycles = 25000;  // of work that waking a thread would not shorten

// A packed tensor [T, H, D], to be seen as one of its sequences, [1, H, L, D].
template <class T>
class Packed {
 public:
  explicit Packed(const View& x)
      : x_(x), strides_{0, x.defined() ? x.strides[1] : 0, x.defined() ? x.strides[0] : 0, 1} {}

  // The view has this object's strides: it must not outlive it. Sizes are the problem's to know.
  View from(int64_t token) const {
    if (!x_.defined()) return {};
    return {x_.as<T>() + token * strides_[2], x_.dtype, 4, x_.sizes, strides_};
  }

 private:
  View x_;
  int64_t strides_[4];
};

// Runs problems that know their `cycles()`, `plan(threads, all cycles)` themselves into `items()`, `run(item)` and
// `finish()`. Whoever is free takes the next item; the largest come first, so that none is left for the end.
template <class Part>
void run_all(std::vector<Part>& parts) {
  double total = 0;
  for (const Part& part : parts) total += part.cycles();
  const int64_t threads = total < kSerialCycles ? 1 : num_threads();
  for (Part& part : parts) part.plan(threads, total);
  std::vector<int64_t> order(parts.size());
  std::iota(order.begin(), order.end(), 0);
  if (threads > 1 && parts.size() > 1) {
    const auto size = [&](int64_t i) {
      return parts[size_t(i)].cycles() / double(std::max<int64_t>(parts[size_t(i)].items(), 1));
    };
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return size(a) > size(b); });
  }
  std::vector<int64_t> ends;  // of the parts' items, counted in this order
  int64_t items = 0;
  for (int64_t i : order) ends.push_back(items += parts[size_t(i)].items());

  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t n; (n = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      const int64_t at = std::upper_bound(ends.begin(), ends.end(), n) - ends.begin();
      parts[size_t(order[size_t(at)])].run(n - (at ? ends[size_t(at) - 1] : 0));
    }
  };
  threads > 1 ? parallel_for(std::min(threads, items), 1, work) : work(0, 1);
  for (const Part& part : parts) part.finish();
}

}  // namespace opsmith
