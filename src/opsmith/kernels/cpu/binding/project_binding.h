// What the generated binding of a project's CPU kernels needs: the checks of a call, and torch's thread pool. Included by
// that one file of a library.
#pragma once

#include "binding_call.h"
#include "parallel.h"

extern "C" void opsmith_parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                     void* context) {
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(begin, end, context); });
}

extern "C" int64_t opsmith_num_threads() { return torch::stable::get_num_threads(); }
