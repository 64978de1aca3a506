// Sums over the columns of many rows: the rows in chunks over the threads, then the chunks' sums together.
// Within a chunk, 32 rows at a time are summed by themselves: rounding errors of a sum grow with its length, and PyTorch's
// sum, against whose error ours is held, adds in blocks as well.
#pragma once

#include <algorithm>
#include <array>
#include <memory>

#include "pair.h"

namespace opsmith {

// `kinds` sums of n columns each, float32, in the order of pairs.
template <int kinds>
class ColumnSums {
 public:
  // The split into chunks, and so the order of every addition, depends on the shape and the thread count alone.
  ColumnSums(int64_t rows, int64_t n, int64_t grain)
      : rows_(rows), n_(n), stride_(round_up(n, 16) + 16),
        chunks_(std::max<int64_t>(1, std::min(num_threads(), rows / std::max<int64_t>(1, grain)))),
        sets_(rows > block * chunks_ ? 2 : 1), memory_(new float[size_t(chunks_ * sets_ * kinds * stride_)]()) {}

  // f(begin, end, sums) adds what rows begin to end - 1 give to sums[kind], [n].
  template <class F>
  void over_rows(const F& f) {
    parallel_for(n_ > 0 && rows_ > 0 ? chunks_ : 0, 1, [&](int64_t first, int64_t last) {
      for (int64_t c = first; c < last; ++c) {
        const int64_t begin = rows_ * c / chunks_, end = rows_ * (c + 1) / chunks_;
        f(begin, std::min(begin + block, end), set(c, 0));
        for (int64_t r = begin + block; r < end; r += block) {
          std::fill_n(sums(c, 1, 0), kinds * stride_, 0.0f);
          f(r, std::min(r + block, end), set(c, 1));
          for (int kind = 0; kind < kinds; ++kind) add(sums(c, 0, kind), sums(c, 1, kind));
        }
      }
    });
  }

  // The total, in the order of elements; T is what the rows are made of.
  template <class T>
  void write(int kind, const View& to) {
    for (int64_t c = 1; c < chunks_; ++c) add(sums(0, 0, kind), sums(c, 0, kind));
    with_float_type(to.dtype, [&](auto* o) {
      from_pair_order<T>(sums(0, 0, kind), n_, to.as<std::remove_pointer_t<decltype(o)>>());
    });
  }

 private:
  static constexpr int64_t block = 32;

  float* sums(int64_t chunk, int set, int kind) const {
    return memory_.get() + ((chunk * sets_ + set) * kinds + kind) * stride_;
  }
  std::array<float*, size_t(kinds)> set(int64_t chunk, int which) const {
    std::array<float*, size_t(kinds)> found;
    for (int kind = 0; kind < kinds; ++kind) found[size_t(kind)] = sums(chunk, which, kind);
    return found;
  }
  void add(float* total, const float* part) const {
    for_lanes(n_, [=](int64_t i, auto k) { store(total + i, load(total + i, k) + load(part + i, k), k); });
  }

  int64_t rows_, n_, stride_, chunks_, sets_;
  std::unique_ptr<float[]> memory_;
};

}  // namespace opsmith
