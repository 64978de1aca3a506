// Registers the backward passes of attention, dense and over packed sequences.
#include "attention/attention.h"
#include "attention/binding_attention.h"

namespace opsmith {
namespace {

void attention_backward_op(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& out, const Tensor& row_sums, const std::optional<Tensor>& mask,
                           double scale, bool causal, int64_t window, double softcap, const Tensor& dq,
                           const Tensor& dk, const Tensor& dv) {
  const char* op = "attention_backward";
  check_heads(op, 4, q, k, v, out);
  check_row_sums(op, row_sums, out);
  check_gradients(op, dout, out, {&q, &k, &v}, {&dq, &dk, &dv});
  const Mask spread(op, mask, q, k);
  attention_backward(view_of(dout), view_of(q), view_of(k), view_of(v), view_of(out), view_of(row_sums),
                     spread.view(), {float(scale), causal, window, float(softcap)}, view_of(dq), view_of(dk),
                     view_of(dv));
}

void attention_varlen_backward_op(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& out, const Tensor& row_sums, const Tensor& query_starts,
                                  const Tensor& key_starts, double scale, bool causal, int64_t window,
                                  double softcap, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const char* op = "attention_varlen_backward";
  check_heads(op, 3, q, k, v, out);
  check_row_sums(op, row_sums, out);
  check_gradients(op, dout, out, {&q, &k, &v}, {&dq, &dk, &dv});
  attention_varlen_backward(view_of(dout), view_of(q), view_of(k), view_of(v), view_of(out),
                            view_of(row_sums), checked(q, k, query_starts, key_starts),
                            {float(scale), causal, window, float(softcap)}, view_of(dq), view_of(dk),
                            view_of(dv));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention_backward", opsmith::kernel<&opsmith::attention_backward_op>);
  opsmith::offer(m, "attention_varlen_backward", opsmith::kernel<&opsmith::attention_varlen_backward_op>);
}
