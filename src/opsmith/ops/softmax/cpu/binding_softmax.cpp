// Registers softmax and its backward pass, and checks what their memory safety needs.
#include "binding.h"
#include "softmax.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

// Rows of any number of dimensions as [1, rows, n], for a call in which nothing depends on the place of a row.
struct Stacked {
  explicit Stacked(const Rows& rows) {
    const View v = rows.view();
    sizes[1] = v.sizes[0], sizes[2] = v.sizes[1], strides[1] = v.strides[0];
    data = v.data, dtype = v.dtype;
  }

  View view() const { return {data, dtype, 3, sizes, strides}; }

  void* data;
  DType dtype;
  int64_t sizes[3] = {1, 1, 1}, strides[3] = {0, 1, 1};
};

void softmax_op(Tensor x, Optional mask, double scale, bool causal, int64_t method, Tensor y) {
  STD_TORCH_CHECK(x.dim() > 0, "softmax: x must have at least one dimension");
  if (x.dim() == 3) return softmax(view_of(x), view_of(mask), scale, causal, method, view_of(y));
  const Rows in("softmax", "x", x), out("softmax", "y", y);
  STD_TORCH_CHECK(!mask && !causal && out.like(in),
                  "softmax: with a mask or causality, x must be [outer, L, S]");
  softmax(Stacked(in).view(), View{}, scale, false, method, Stacked(out).view());
}

void softmax_backward_op(Tensor dy, Tensor y, double scale, Tensor dx) {
  if (y.dim() != 3) {
    const Rows slope("softmax", "dy", dy), result("softmax", "y", y), out("softmax", "dx", dx);
    STD_TORCH_CHECK(slope.like(result) && out.like(result),
                    "softmax: dy, y and dx must have one shape and dtype");
    return softmax_backward(Stacked(slope).view(), Stacked(result).view(), scale, Stacked(out).view());
  }
  for (const Tensor* t : {&dy, &y, &dx}) {
    STD_TORCH_CHECK(
        t->dim() == 3 && t->scalar_type() == y.scalar_type() && (t->size(2) < 2 || t->stride(2) == 1),
        "softmax: dy, y and dx must be [outer, L, S] of one dtype, the last dimension contiguous");
    for (int64_t d = 0; d < 3; ++d)
      STD_TORCH_CHECK(t->size(d) == y.size(d), "softmax: dy, y and dx must have one shape");
  }
  softmax_backward(view_of(dy), view_of(y), scale, view_of(dx));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "softmax", opsmith::kernel<&opsmith::softmax_op>);
  opsmith::offer(m, "softmax_backward", opsmith::kernel<&opsmith::softmax_backward_op>);
}
