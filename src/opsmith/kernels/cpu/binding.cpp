// Lends the kernels torch's thread pool, and registers softmax with torch through its stable ABI.
#include "binding.h"

#include "kernels.h"
#include "parallel.h"

#if defined(__SANITIZE_THREAD__)
#include <algorithm>
#include <thread>
#include <vector>

// PyTorch's OpenMP is not built for ThreadSanitizer, to which every end of a loop would look like a race: under it,
// loops run on threads whose beginning and end it sees.
extern "C" void opsmith_parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
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
extern "C" void opsmith_parallel_for(int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
  torch::stable::parallel_for(0, n, grain, [&](int64_t begin, int64_t end) { body(begin, end, context); });
}
#endif

extern "C" int64_t opsmith_num_threads() { return torch::stable::get_num_threads(); }

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void softmax_op(Tensor x, Optional mask, double scale, bool causal, int64_t method, Tensor y) {
  STD_TORCH_CHECK(x.dim() > 0, "softmax: x must have at least one dimension");
  if (x.dim() == 3) return softmax(view_of(x), view_of(mask), scale, causal, method, view_of(y));
  // Rows of any number of dimensions, in which nothing depends on the place of a row.
  const Rows in("softmax", "x", x), out("softmax", "y", y);
  STD_TORCH_CHECK(!mask && !causal && out.like(in), "softmax: with a mask or causality, x must be [outer, L, S]");
  const View a = in.view(), b = out.view();
  const int64_t sizes[] = {1, a.sizes[0], a.sizes[1]};
  const int64_t x_strides[] = {0, a.strides[0], 1}, y_strides[] = {0, b.strides[0], 1};
  softmax({a.data, a.dtype, 3, sizes, x_strides}, View{}, scale, false, method, {b.data, b.dtype, 3, sizes, y_strides});
}

void softmax_backward_op(Tensor dy, Tensor y, double scale, Tensor dx) {
  for (const Tensor* t : {&dy, &y, &dx}) {
    STD_TORCH_CHECK(t->dim() == 3 && t->scalar_type() == y.scalar_type() && (t->size(2) < 2 || t->stride(2) == 1),
                    "softmax: dy, y and dx must be [outer, L, S] of one dtype, the last dimension contiguous");
    for (int64_t d = 0; d < 3; ++d) STD_TORCH_CHECK(t->size(d) == y.size(d), "softmax: dy, y and dx must have one shape");
  }
  softmax_backward(view_of(dy), view_of(y), scale, view_of(dx));
}

// Built before any file's registration asks for it.
std::vector<std::pair<std::string_view, Boxed>>& offered() {
  static std::vector<std::pair<std::string_view, Boxed>> all;
  return all;
}

}  // namespace

void offer(torch::stable::detail::StableLibrary& library, const char* name, Boxed boxed) {
  library.impl(name, boxed);
  offered().emplace_back(name, boxed);
}

}  // namespace opsmith

extern "C" __attribute__((visibility("default"))) opsmith::Boxed opsmith_kernel(const char* name) {
  for (const auto& [known, boxed] : opsmith::offered()) {
    if (known == name) return boxed;
  }
  return nullptr;
}

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  using namespace opsmith;
  offer(m, "softmax", TORCH_BOX(&softmax_op));
  offer(m, "softmax_backward", TORCH_BOX(&softmax_backward_op));
}
