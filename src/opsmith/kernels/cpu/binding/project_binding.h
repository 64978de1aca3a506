// What the generated binding of a project's CPU kernels needs: the checks of a call, and torch's thread pool. Included by
// one file of a library.
#pragma once

#include "binding_call.h"
#include "parallel.h"

#if defined(__SANITIZE_THREAD__)
#include <algorithm>
#include <thread>
#include <vector>

// PyTorch's OpenMP is not built for ThreadSanitizer, to which every end of a loop would look like a race: under it,
// loops run on threads whose beginning and end it sees.
extern "C" void opsmith_parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                     void* context) {
  static thread_local bool inside = false;
  const int64_t threads = inside ? 1 : opsmith_num_threads();
  const int64_t share = std::max(grain, (n + threads - 1) / threads);
  std::vector<std::thread> others;
  for (int64_t begin = share; begin < n; begin += share) {
    others.emplace_back([=] {
      inside = true;
      body(begin, std::min(n, begin + share), context);
    });
  }
  const bool outer = inside;
  inside = true;
  body(0, std::min(n, share), context);
  inside = outer;
  for (std::thread& other : others) other.join();
}
#else
extern "C" void opsmith_parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                     void* context) {
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(begin, end, context); });
}
#endif

extern "C" int64_t opsmith_num_threads() { return torch::stable::get_num_threads(); }
