// Registers the backward pass of GELU.
#include "gelu/binding_gelu.h"
#include "gelu/gelu.h"

namespace opsmith {
namespace {

void gelu_backward_op(const Tensor& dy, const Tensor& x, const Optional& bias, bool tanh, const Tensor& dx,
                      const Optional& dbias) {
  const char* const op = "gelu_backward";
  const Rows slope(op, "dy", dy), in(op, "x", x), out(op, "dx", dx);
  check_bias_rows(op, x.dim(), in, bias, {&slope, &out});
  STD_TORCH_CHECK(!dbias || bias, op, ": there is no bias to have a gradient");
  check_bias_rows(op, x.dim(), in, dbias, {});
  gelu_backward(slope.view(), in.view(), view_of(bias), tanh, out.view(), view_of(dbias));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "gelu_backward", opsmith::kernel<&opsmith::gelu_backward_op>);
}
