// Registers GELU, and checks what its memory safety needs.
#include "gelu/binding_gelu.h"
#include "gelu/gelu.h"

namespace opsmith {
namespace {

void gelu_op(const Tensor& x, const Optional& bias, bool tanh, const Tensor& y) {
  const Rows in("gelu", "x", x), out("gelu", "y", y);
  check_bias_rows("gelu", x.dim(), in, bias, {&out});
  gelu(in.view(), view_of(bias), tanh, out.view());
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) { opsmith::offer(m, "gelu", opsmith::kernel<&opsmith::gelu_op>); }
