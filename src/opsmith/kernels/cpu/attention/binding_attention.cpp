// Registers attention.
#include "attention.h"
#include "binding_attention.h"

namespace opsmith {
namespace {

void attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double scale,
                  bool causal, int64_t window, double softcap, const Tensor& out, const std::optional<Tensor>& row_sums) {
  check_heads("attention", 4, q, k, v, out);
  check_row_sums("attention", row_sums, out);
  if (mask) {
    const DType dtype = dtype_of(*mask);
    STD_TORCH_CHECK(mask->dim() == 4 && mask->size(0) == q.size(0) && mask->size(1) == q.size(1) &&
                        mask->size(2) == q.size(2) && mask->size(3) == k.size(2) &&
                        (mask->size(3) < 2 || mask->stride(3) == 1 || mask->numel() == 0) &&
                        (dtype == DType::boolean || dtype == DType::f32 || dtype == dtype_of(q)),
                    "attention: mask must be [B, H, L, S], bool, float32 or in q's dtype, its last dimension contiguous");
  }
  attention(view_of(q), view_of(k), view_of(v), view_of(mask), {float(scale), causal, window, float(softcap)},
            view_of(out), view_of(row_sums));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention", opsmith::kernel<&opsmith::attention_op>);
}
