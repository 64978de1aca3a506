// The problems of a call, one or many, shared out to the threads. For attention and its backward pass.
#pragma once

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "attention_scores.h"
#include "parallel.h"

namespace opsmith {

constexpr double kSerialCycles = 25000;  // of work that waking a thread would not shorten

// A tensor from a token on: how many there are is the problem's to know.
template <class T>
View from(View x, int64_t token) {
  if (x.defined()) x.data = x.as<T>() + token * x.strides[2];
  return x;
}

// Calls f with the problems of a call, and the first query and key of each: all of it, or one packed sequence at a time.
template <class T, class F>
void for_problems(const AttentionCall& x, const F& f) {
  const Problem whole(x);
  if (!x.sequences.defined()) return f(whole, 0, 0);
  for (int64_t i = 0; i < x.sequences.count(); ++i) {
    const int64_t query = x.sequences.query(i), key = x.sequences.key(i);
    Problem one = whole;
    one.queries = x.sequences.query(i + 1) - query;
    one.keys = x.sequences.key(i + 1) - key;
    one.q = from<T>(x.q, query);
    one.k = from<T>(x.k, key);
    one.v = from<T>(x.v, key);
    one.out = from<T>(x.out, query);
    one.row_sums = from<float>(x.row_sums, query);
    f(one, query, key);
  }
}

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
