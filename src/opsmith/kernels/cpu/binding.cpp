// Registers the kernels with torch through its stable ABI, and lends them torch's thread pool.
#include "binding.h"

#include "parallel.h"

extern "C" void opsmith_parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(begin, end, context); });
}

extern "C" int64_t opsmith_num_threads() { return torch::stable::get_num_threads(); }
