// When each task of MLA pre-processing began and ended, on which thread: for a picture, where somebody has asked for one.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace opsmith::mla {

struct Trace {
  // [capacity, 4]: thread, stage, begin and end in nanoseconds; null: nobody asks.
  std::atomic<int64_t*> rows{nullptr};
  int64_t capacity = 0;
  std::atomic<int64_t> used{0}, threads{0};
};

inline Trace trace_state;

// One thread's clock: a task ends where its next one begins.
class Watch {
 public:
  Watch() : rows_(trace_state.rows.load(std::memory_order_acquire)) {
    if (rows_ == nullptr) return;
    thread_ = trace_state.threads.fetch_add(1);
    begin_ = now();
  }

  template <class Stage>
  void note(const Stage& stage) {
    if (rows_ == nullptr) return;
    const int64_t at = trace_state.used.fetch_add(1), end = now();
    if (at < trace_state.capacity) {
      int64_t* const row = rows_ + 4 * at;
      row[0] = thread_, row[1] = stage(), row[2] = begin_, row[3] = end;
    }
    begin_ = end;
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  int64_t* rows_;
  int64_t thread_ = 0, begin_ = 0;
};

}  // namespace opsmith::mla
