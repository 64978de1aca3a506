// Registers attention.
#include "attention/attention.h"
#include "attention/binding_attention.h"

namespace opsmith {
namespace {

void attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                  double scale, bool causal, int64_t window, double softcap, const Tensor& out,
                  const std::optional<Tensor>& row_sums) {
  check_heads("attention", 4, q, k, v, out);
  check_row_sums("attention", row_sums, out);
  const Mask spread("attention", mask, q, k);
  attention(view_of(q), view_of(k), view_of(v), spread.view(), {float(scale), causal, window, float(softcap)},
            view_of(out), view_of(row_sums));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention", opsmith::kernel<&opsmith::attention_op>);
}
