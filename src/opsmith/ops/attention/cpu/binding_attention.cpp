// Registers attention.
#include "attention/binding_attention.h"

namespace opsmith {
namespace {

void attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask,
                  const std::optional<Tensor>& query_starts, const std::optional<Tensor>& key_starts,
                  const std::optional<Tensor>& sinks, const std::optional<Tensor>& alibi, double scale,
                  bool causal, int64_t window, double softcap, const Tensor& out,
                  const std::optional<Tensor>& row_sums) {
  const Attended x("attention", q, k, v, mask, query_starts, key_starts, sinks, alibi, out, row_sums);
  attention(x.call(scale, causal, window, softcap));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention", opsmith::kernel<&opsmith::attention_op>);
}
