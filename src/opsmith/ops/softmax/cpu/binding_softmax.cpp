// Registers softmax and its backward pass, and checks what their memory safety needs.
#include "binding.h"

namespace opsmith {

// x, mask, y [outer, L, S]; method 0 auto, 1 stable, 2 fast.
void softmax(View x, View mask, double scale, bool causal, int64_t method, View y);
void softmax_backward(View dy, View y, double scale, View dx);

namespace {

// Scores [outer, L, S]; or rows of any number of dimensions as [1, rows, n], where nothing depends on the place of a row.
class Scores {
 public:
  Scores(const char* name, const Tensor& t) : dtype_(dtype_of(t)), data_(t.data_ptr()) {
    STD_TORCH_CHECK(t.dim() > 0, "softmax: ", name, " must have at least one dimension");
    if (t.dim() == 3) {
      STD_TORCH_CHECK(t.size(2) < 2 || t.stride(2) == 1 || t.numel() == 0, "softmax: the last dimension of ",
                      name, " must be contiguous");
      std::copy_n(t.sizes().data(), 3, sizes_);
      std::copy_n(t.strides().data(), 3, strides_);
      return;
    }
    const View rows = Rows("softmax", name, t).view();
    sizes_[1] = rows.sizes[0], sizes_[2] = rows.sizes[1], strides_[1] = rows.strides[0];
  }

  bool like(const Scores& other) const {
    return dtype_ == other.dtype_ && std::equal(sizes_, sizes_ + 3, other.sizes_);
  }
  View view() const { return {data_, dtype_, 3, sizes_, strides_}; }

 private:
  DType dtype_;
  void* data_;
  int64_t sizes_[3] = {1, 1, 1}, strides_[3] = {0, 1, 1};
};

void softmax_op(const Tensor& x, const Optional& mask, double scale, bool causal, int64_t method,
                const Tensor& y) {
  const Scores in("x", x), out("y", y);
  STD_TORCH_CHECK(out.like(in), "softmax: x and y must have one shape and dtype");
  STD_TORCH_CHECK(x.dim() == 3 || (!mask && !causal),
                  "softmax: with a mask or causality, x must be [outer, L, S]");
  const DType dtype = mask ? dtype_of(*mask) : DType::boolean;
  STD_TORCH_CHECK(!mask || (same_sizes(*mask, x) &&
                            (dtype == DType::boolean || dtype == DType::f32 || dtype == in.view().dtype)),
                  "softmax: the mask must have the sizes of x, and be bool, float32 or in its dtype");
  softmax(in.view(), view_of(mask), scale, causal, method, out.view());
}

void softmax_backward_op(const Tensor& dy, const Tensor& y, double scale, const Tensor& dx) {
  const Scores slope("dy", dy), result("y", y), out("dx", dx);
  STD_TORCH_CHECK(slope.like(result) && out.like(result),
                  "softmax: dy, y and dx must have one shape and dtype");
  softmax_backward(slope.view(), result.view(), scale, out.view());
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "softmax", opsmith::kernel<&opsmith::softmax_op>);
  opsmith::offer(m, "softmax_backward", opsmith::kernel<&opsmith::softmax_backward_op>);
}
