// Registers the backward pass of attention.
#include "attention/binding_attention.h"

namespace opsmith {
namespace {

void attention_backward_op(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                           const Tensor& out, const Tensor& row_sums, const Optional& mask,
                           const Optional& query_starts, const Optional& key_starts, const Optional& sinks,
                           const Optional& alibi, double scale, bool causal, int64_t window, double softcap,
                           const Tensor& dq, const Tensor& dk, const Tensor& dv, const Optional& dsinks) {
  const char* const op = "attention_backward";
  const Attended x(op, q, k, v, mask, query_starts, key_starts, sinks, alibi, out, row_sums);
  const Heads slope(op, dout, x.layout, x.dtype), of_q(op, dq, x.layout, x.dtype),
      of_k(op, dk, x.layout, x.dtype), of_v(op, dv, x.layout, x.dtype);
  STD_TORCH_CHECK(slope.like(x.out, 4) && of_q.like(x.q, 4) && of_k.like(x.k, 4) && of_v.like(x.v, 4), op,
                  ": a gradient must have the sizes of what it is of");
  STD_TORCH_CHECK(!dsinks || sinks, op, ": there are no sinks to have a gradient");
  attention_backward(
      x.call(scale, causal, window, softcap),
      {slope.view, of_q.view, of_k.view, of_v.view, of_heads(op, "dsinks", dsinks, x.q.sizes[1], x.dtype)});
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention_backward", opsmith::kernel<&opsmith::attention_backward_op>);
}
