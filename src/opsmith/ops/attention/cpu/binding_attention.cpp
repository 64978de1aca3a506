// Registers attention.
#include "attention/binding_attention.h"

namespace opsmith {
namespace {

void attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const Optional& mask,
                  const Optional& query_starts, const Optional& key_starts, const Optional& sinks,
                  const Optional& alibi, double scale, bool causal, int64_t window, double softcap,
                  const Tensor& out, const Optional& row_sums) {
  const Attended x("attention", q, k, v, mask, query_starts, key_starts, sinks, alibi, out, row_sums);
  attention(x.call(scale, causal, window, softcap));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention", opsmith::kernel<&opsmith::attention_op>);
}
