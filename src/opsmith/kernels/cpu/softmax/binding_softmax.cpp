// Registers softmax and its backward pass, and checks what their memory safety needs.
#include "binding.h"
#include "softmax.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void softmax_op(Tensor x, Optional mask, double scale, bool causal, int64_t method, Tensor y) {
  STD_TORCH_CHECK(x.dim() > 0, "softmax: x must have at least one dimension");
  if (x.dim() == 3) return softmax(view_of(x), view_of(mask), scale, causal, method, view_of(y));
  // Rows of any number of dimensions, in which nothing depends on the place of a row.
  const Rows in("softmax", "x", x), out("softmax", "y", y);
  STD_TORCH_CHECK(!mask && !causal && out.like(in), "softmax: with a mask or causality, x must be [outer, L, S]");
  const View a = in.view(), b = out.view();
  const int64_t sizes[] = {1, a.sizes[0], a.sizes[1]};
  const int64_t x_strides[] = {0, a.strides[0], 1}, y_strides[] = {0, b.strides[0], 1};
  softmax({a.data, a.dtype, 3, sizes, x_strides}, View{}, scale, false, method, {b.data, b.dtype, 3, sizes, y_strides});
}

void softmax_backward_op(Tensor dy, Tensor y, double scale, Tensor dx) {
  for (const Tensor* t : {&dy, &y, &dx}) {
    STD_TORCH_CHECK(t->dim() == 3 && t->scalar_type() == y.scalar_type() && (t->size(2) < 2 || t->stride(2) == 1),
                    "softmax: dy, y and dx must be [outer, L, S] of one dtype, the last dimension contiguous");
    for (int64_t d = 0; d < 3; ++d) STD_TORCH_CHECK(t->size(d) == y.size(d), "softmax: dy, y and dx must have one shape");
  }
  softmax_backward(view_of(dy), view_of(y), scale, view_of(dx));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "softmax", opsmith::kernel<&opsmith::softmax_op>);
  opsmith::offer(m, "softmax_backward", opsmith::kernel<&opsmith::softmax_backward_op>);
}
