// What every library binds alike: torch's thread pool for its kernels, and the kernels by name.
#include "project_binding.h"

namespace opsmith {
namespace {

// Built before any file's registration asks for it.
std::vector<std::pair<std::string_view, Direct>>& offered() {
  static std::vector<std::pair<std::string_view, Direct>> all;
  return all;
}

}  // namespace

void offer(torch::stable::detail::StableLibrary& library, const char* name, const Kernel& kernel) {
  library.impl(name, kernel.boxed);
  offered().emplace_back(name, kernel.direct);
}

}  // namespace opsmith

extern "C" __attribute__((visibility("default"))) opsmith::Direct opsmith_kernel(const char* name) {
  for (const auto& [known, direct] : opsmith::offered()) {
    if (known == name) return direct;
  }
  return nullptr;
}
