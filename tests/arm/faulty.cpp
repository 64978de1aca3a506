// Kernels that do what no kernel may, for a machine that must notice.
#include <cstring>

#include "binding_tensor.h"

namespace {

using opsmith::Tensor;

const Tensor& tensor_at(const uint64_t* values, int i) { return *reinterpret_cast<const Tensor*>(values[i]); }
unsigned char* bytes_at(const uint64_t* values, int i) {
  return static_cast<unsigned char*>(tensor_at(values, i).data);
}

void behind(const uint64_t* values) { bytes_at(values, 1)[4 * tensor_at(values, 1).numel()] ^= 1; }
void before(const uint64_t* values) { bytes_at(values, 1)[-1] ^= 1; }
void input(const uint64_t* values) { *bytes_at(values, 0) ^= 1; }
void far_behind(const uint64_t* values) { bytes_at(values, 1)[0] = bytes_at(values, 0)[4096]; }
void refused(const uint64_t* values) {
  STD_TORCH_CHECK(tensor_at(values, 0).dim() == 7, "there are not 7 dimensions");
}
void dot_products(const uint64_t*) { __asm__ volatile(".inst 0x4e809400"); }  // sdot v0.4s, v0.16b, v0.16b
void bfloat16_products(const uint64_t*) { __asm__ volatile(".inst 0x6e40ec00"); }  // bfmmla
void good(const uint64_t* values) {
  const Tensor& from = tensor_at(values, 0);
  std::memcpy(bytes_at(values, 1), from.data, size_t(4 * from.numel()));
}

using Direct = void (*)(const uint64_t*);
constexpr struct {
  const char* name;
  Direct kernel;
} kAll[] = {{"behind", behind},
            {"before", before},
            {"input", input},
            {"far_behind", far_behind},
            {"refused", refused},
            {"dot_products", dot_products},
            {"bfloat16_products", bfloat16_products},
            {"good", good}};

}  // namespace

extern "C" __attribute__((visibility("default"))) Direct opsmith_kernel(const char* name) {
  for (const auto& one : kAll) {
    if (std::strcmp(one.name, name) == 0) return one.kernel;
  }
  return nullptr;
}
