// Work of many pieces that lie together in memory, shared out so that threads finish together.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "parallel.h"

namespace opsmith {

// Hands out pieces: to each thread the next one of a share that lies together, and then what others have not reached.
class Shares {
 public:
  Shares(int64_t pieces, int64_t threads) : count_(std::min(threads, kMost)) {
    for (int64_t i = 0; i < count_; ++i) {
      next_[i].at.store(pieces * i / count_, std::memory_order_relaxed);
      next_[i].end = pieces * (i + 1) / count_;
    }
  }

  template <class F>
  void take(int64_t thread, const F& f) {
    for (int64_t i = 0; i < count_; ++i) {
      Cursor& from = next_[(thread + i) % count_];
      for (int64_t piece; (piece = from.at.fetch_add(1, std::memory_order_relaxed)) < from.end;) f(piece);
    }
  }

 private:
  struct alignas(64) Cursor {  // a line of its own, which the others touch only once they are done
    std::atomic<int64_t> at;
    int64_t end;
  };
  // More threads than this have a share with others. On the stack: allocating took longer than handing out all pieces of a short call.
  static constexpr int64_t kMost = 64;
  int64_t count_;
  Cursor next_[kMost];
};

// Calls f(begin, end) on ranges of `grain` that cover [0, n). Memory does not serve all cores alike: with halves of their own,
// one thread was seen to wait for the other for a fifth of the time.
template <class F>
inline void parallel_shares(int64_t n, int64_t grain, const F& f) {
  const int64_t pieces = (n + grain - 1) / grain, threads = std::min(num_threads(), pieces);
  if (threads <= 1) return parallel_for(n, n, f);
  Shares shares(pieces, threads);
  parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      shares.take(thread, [&](int64_t piece) { f(piece * grain, std::min(n, (piece + 1) * grain)); });
    }
  });
}

// The same for rows that all take the same time, of which at least `grain` are worth a piece: many pieces for each thread where
// there are rows enough, halves where there are few.
template <class F>
inline void parallel_rows(int64_t n, int64_t grain, const F& f) {
  constexpr int64_t each = 16, least = 4;  // pieces a thread
  const int64_t threads = num_threads();
  if (threads == 1 || n < least * threads * grain) return parallel_for(n, grain, f);
  const int64_t share = (n + each * threads - 1) / (each * threads);
  parallel_shares(n, (std::max(grain, share) + 7) / 8 * 8, f);
}

}  // namespace opsmith
