// Registers GELU, and checks what its memory safety needs.
#include "binding.h"
#include "gelu.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void check(const char* op, int64_t dims, const Rows& x, const Optional& bias,
           std::initializer_list<const Rows*> others) {
  for (const Rows* r : others) {
    STD_TORCH_CHECK(r->like(x), op, ": all tensors must have one shape and dtype");
  }
  if (!bias) return;
  STD_TORCH_CHECK(dims > 0 && bias->dim() == 1 && bias->size(0) == x.n() && (x.n() < 2 || bias->stride(0) == 1) &&
                      dtype_of(*bias) == x.dtype(),
                  op, ": bias must be a contiguous [", x.n(), "] in x's dtype");
}

void gelu_op(const Tensor& x, const Optional& bias, bool tanh, const Tensor& y) {
  const Rows in("gelu", "x", x), out("gelu", "y", y);
  check("gelu", x.dim(), in, bias, {&out});
  gelu(in.view(), view_of(bias), tanh, out.view());
}

void gelu_backward_op(const Tensor& dy, const Tensor& x, const Optional& bias, bool tanh, const Tensor& dx,
                      const Optional& dbias) {
  const char* const op = "gelu_backward";
  const Rows slope(op, "dy", dy), in(op, "x", x), out(op, "dx", dx);
  check(op, x.dim(), in, bias, {&slope, &out});
  STD_TORCH_CHECK(!dbias || bias, op, ": there is no bias to have a gradient");
  check(op, x.dim(), in, dbias, {});
  gelu_backward(slope.view(), in.view(), view_of(bias), tanh, out.view(), view_of(dbias));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "gelu", TORCH_BOX(&opsmith::gelu_op));
  opsmith::offer(m, "gelu_backward", TORCH_BOX(&opsmith::gelu_backward_op));
}
