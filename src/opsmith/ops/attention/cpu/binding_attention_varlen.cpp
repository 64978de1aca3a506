// Registers attention over packed sequences.
#include "attention/attention.h"
#include "attention/binding_attention.h"

namespace opsmith {
namespace {

void attention_varlen_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& query_starts,
                         const Tensor& key_starts, double scale, bool causal, int64_t window, double softcap,
                         const Tensor& out, const std::optional<Tensor>& row_sums) {
  check_heads("attention_varlen", 3, q, k, v, out);
  check_row_sums("attention_varlen", row_sums, out);
  attention_varlen(view_of(q), view_of(k), view_of(v), checked(q, k, query_starts, key_starts),
                   {float(scale), causal, window, float(softcap)}, view_of(out), view_of(row_sums));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention_varlen", opsmith::kernel<&opsmith::attention_varlen_op>);
}
