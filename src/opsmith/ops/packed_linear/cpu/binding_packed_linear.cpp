// Registers the linear layer on quantized weights, and checks what its memory safety needs.
#include "linear/binding_linear.h"
#include "packed_linear/binding_packed.h"

namespace opsmith {
namespace {

void packed_linear_op(const Tensor& x, const Tensor& weight, const Tensor& scale, const Optional& zero,
                      const Optional& bias, const Optional& outer, int64_t bits, int64_t group,
                      int64_t scales, const Tensor& y) {
  constexpr const char* op = "packed_linear";
  const Rows in(op, "x", x), out(op, "y", y);
  STD_TORCH_CHECK(out.rows() == in.rows() && out.dtype() == in.dtype(), op,
                  ": y must have x's dtype and as many rows, ", in.rows());
  const QuantizedWeight packed = packed_weight(op, weight, scale, zero, outer, bits, group, scales, out.n(),
                                               in.n());
  check_bias(op, "bias", bias, out.n(), in.dtype());
  packed_linear({{in.view(), packed, view_of(bias), out.view()}}, scales == kDynamic);
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "packed_linear", opsmith::kernel<&opsmith::packed_linear_op>);
}
