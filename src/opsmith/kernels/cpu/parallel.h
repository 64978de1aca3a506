// Parallel loops on PyTorch's own thread pool, so that kernels obey torch.set_num_threads.
#pragma once

#include <cstdint>

extern "C" {
// Defined by the library that binds the kernels to torch: kernel files never see a torch header.
void opsmith_parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);
int64_t opsmith_num_threads();
}

namespace opsmith {

inline int64_t num_threads() { return opsmith_num_threads(); }

// Calls f(begin, end) on ranges that cover [0, n), each at least `grain` long except the last.
// One range, or a call from inside a parallel loop, runs on the calling thread.
template <class F>
inline void parallel_for(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
#if defined(__SANITIZE_THREAD__)
  grain = 1;  // small tests split their loops too, so that a race has two threads to show in
#endif
  if (n <= grain) {
    f(int64_t{0}, n);
    return;
  }
  opsmith_parallel_for(
      n, grain,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<const F*>(context))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace opsmith
