// Sums over the columns of many rows: the rows in chunks over the threads, then the chunks' sums together.
// A thread's chunks halve in size, so that what another takes over from it at the end is little.
// Within a chunk, 32 rows at a time are summed by themselves: rounding errors of a sum grow with its length, and PyTorch's
// sum, against whose error ours is held, adds in blocks as well.
#pragma once

#include <algorithm>
#include <array>
#include <memory>

#include "schedules/element_walk.h"

namespace opsmith {

// `kinds` sums of n columns each, float32, in the order of pairs, four pairs at a time: as for_pairs<paired_block> walks.
template <int kinds>
class ColumnSums {
 public:
  // The split into chunks, and so the order of every addition, depends on the shape and the thread count alone.
  ColumnSums(int64_t rows, int64_t n, int64_t grain)
      : rows_(rows), n_(n), stride_(round_up(n, 16) + 16),
        threads_(std::max<int64_t>(1, std::min(num_threads(), rows / std::max<int64_t>(1, grain)))) {
    while (threads_ > 1 && each_ < 7 && (rows / threads_) >> each_ >= std::max(block, grain)) ++each_;
    memory_.reset(new float[size_t(threads_ * each_ * kinds * stride_)]());
  }

  // f(begin, end, sums) adds what rows begin to end - 1 give to sums[kind], [n].
  template <class F>
  void over_rows(const F& f) {
    if (rows_ == 0) return;
    parallel_shares(threads_ * each_, 1, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        const int64_t begin = beginning(c), end = beginning(c + 1);
        float* const total = sums(c);
        f(begin, std::min(begin + block, end), kinds_of(total));
        for (int64_t r = begin + block; r < end; r += block) {
          float* const part = scratch(kinds * stride_);
          std::fill_n(part, kinds * stride_, 0.0f);
          f(r, std::min(r + block, end), kinds_of(part));
          add(total, part, kinds * stride_);
        }
      }
    });
  }

  // The total, in the order of elements; T is what the rows are made of.
  template <class T>
  void write(int kind, const View& to) {
    float* const total = sums(0) + kind * stride_;
    for (int64_t c = 1; c < threads_ * each_; ++c) add(total, sums(c) + kind * stride_, n_);
    with_float_type(to.dtype, [&]<class U>(U*) { from_pair_order<T>(total, n_, to.as<U>()); });
  }

 private:
  static constexpr int64_t block = 32;

  // The first row of a chunk: of a thread's share a half, then a quarter, and at last what is left.
  int64_t beginning(int64_t chunk) const {
    const int64_t thread = chunk / each_, within = chunk % each_;
    const int64_t from = rows_ * thread / threads_, to = rows_ * (thread + 1) / threads_;
    return to - ((to - from) >> within);
  }
  float* sums(int64_t chunk) const { return memory_.get() + chunk * kinds * stride_; }
  std::array<float*, size_t(kinds)> kinds_of(float* first) const {
    std::array<float*, size_t(kinds)> found;
    for (int kind = 0; kind < kinds; ++kind) found[size_t(kind)] = first + kind * stride_;
    return found;
  }
  static void add(float* total, const float* part, int64_t n) {
    for_lanes(n, [=](int64_t i, auto k) { store(total + i, load(total + i, k) + load(part + i, k), k); });
  }

  int64_t rows_, n_, stride_, threads_, each_ = 1;  // a thread has `each_` chunks
  std::unique_ptr<float[]> memory_;
};

}  // namespace opsmith
