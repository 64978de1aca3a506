// Registers attention and its backward pass.
#include "attention.h"
#include "binding.h"

namespace opsmith {
namespace {

void attention_op(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double scale,
                  bool causal, int64_t window, double softcap, const Tensor& out, const std::optional<Tensor>& row_sums) {
  attention(view_of(q), view_of(k), view_of(v), view_of(mask), {float(scale), causal, window, float(softcap)},
            view_of(out), view_of(row_sums));
}

void attention_backward_op(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                           const Tensor& row_sums, const std::optional<Tensor>& mask, double scale, bool causal,
                           int64_t window, double softcap, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  attention_backward(view_of(dout), view_of(q), view_of(k), view_of(v), view_of(out), view_of(row_sums), view_of(mask),
                     {float(scale), causal, window, float(softcap)}, view_of(dq), view_of(dk), view_of(dv));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  m.impl("attention", TORCH_BOX(&opsmith::attention_op));
  m.impl("attention_backward", TORCH_BOX(&opsmith::attention_backward_op));
}
