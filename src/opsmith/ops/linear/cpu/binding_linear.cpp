// Registers the linear layer on packed weights, and checks what its memory safety needs.
#include "binding.h"
#include "linear/linear.h"

namespace opsmith {
namespace {

void check_matrix(const char* name, const Tensor& t, const Tensor& like, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(
      t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && (columns < 2 || t.stride(1) == 1),
      "linear: ", name, " must be [", rows, ", ", columns, "] with a contiguous last dimension");
  STD_TORCH_CHECK(t.scalar_type() == like.scalar_type(), "linear: ", name, " and x must have one dtype");
}

void check_float(const Tensor& x) {
  const DType dtype = dtype_of(x);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16,
                  "linear: x must be floating-point");
}

std::optional<Rows> rows_of(const char* name, const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return Rows("linear", name, *t);
}

void check_packed(const Tensor& packed, const Tensor& like, int64_t n, int64_t k) {
  const int64_t unit = elements_per_unit(dtype_of(packed)), depth = (k + unit - 1) / unit * unit;
  STD_TORCH_CHECK(packed.dim() == 3 && packed.size(0) == 1 && packed.size(1) == n &&
                      packed.size(2) == depth && packed.is_contiguous() &&
                      (packed.scalar_type() == like.scalar_type() || dtype_of(packed) == DType::bf16),
                  "linear: a packed weight must be a contiguous [1, ", n, ", ", depth,
                  "] in x's dtype or bfloat16");
}

void linear_pack_op(const Tensor& weight, const Tensor& packed) {
  STD_TORCH_CHECK(weight.dim() == 2, "linear: weight must be [N, K]");
  check_matrix("weight", weight, packed, weight.size(0), weight.size(1));
  STD_TORCH_CHECK(weight.scalar_type() == packed.scalar_type(),
                  "linear: a weight is packed in its own dtype");
  check_packed(packed, weight, weight.size(0), weight.size(1));
  linear_pack(view_of(weight), view_of(packed));
}

void check_epilogue(const Tensor& x, int64_t n, const std::optional<Tensor>& bias,
                    const std::optional<Rows>& residual, int64_t activation, const Rows& y) {
  check_float(x);
  const Rows in("linear", "x", x);
  for (const auto& [name, rows] : {std::pair("y", &y), std::pair("residual", residual ? &*residual : &y)}) {
    STD_TORCH_CHECK(rows->rows() == in.rows() && rows->n() == n && rows->dtype() == in.dtype(),
                    "linear: ", name, " must be ", in.rows(), " rows of ", n, " in x's dtype");
  }
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n && (n < 2 || bias->stride(0) == 1) &&
                        bias->scalar_type() == x.scalar_type(),
                    "linear: bias must be a contiguous [", n, "] in x's dtype");
  }
  STD_TORCH_CHECK(0 <= activation && activation <= int64_t(Activation::silu), "linear: no activation ",
                  activation);
}

void linear_packed_op(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& residual, int64_t activation, const Tensor& y) {
  STD_TORCH_CHECK(packed.dim() == 3, "linear: a packed weight must have 3 dimensions");
  const Rows in("linear", "x", x), out("linear", "y", y);
  const auto added = rows_of("residual", residual);
  check_packed(packed, x, packed.size(1), in.n());
  check_epilogue(x, packed.size(1), bias, added, activation, out);
  linear_packed(in.view(), view_of(packed), view_of(bias), added ? added->view() : View{},
                Activation(activation), out.view());
}

void linear_rows_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& residual, int64_t activation, const Tensor& y) {
  const Rows in("linear", "x", x), out("linear", "y", y);
  const auto added = rows_of("residual", residual);
  STD_TORCH_CHECK(weight.dim() == 2, "linear: weight must be [N, K]");
  check_matrix("weight", weight, x, weight.size(0), in.n());
  check_epilogue(x, weight.size(0), bias, added, activation, out);
  linear_rows(in.view(), view_of(weight), view_of(bias), added ? added->view() : View{},
              Activation(activation), out.view());
}

void linear_rows_backward_op(const Tensor& dy, const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& dx, const std::optional<Tensor>& dweight,
                             const std::optional<Tensor>& dbias) {
  check_float(x);
  const Rows dout("linear", "dy", dy), in("linear", "x", x);
  const int64_t n = dout.n(), k = in.n();
  STD_TORCH_CHECK(dout.rows() == in.rows() && dout.dtype() == in.dtype(),
                  "linear: dy must have x's rows and dtype");
  check_matrix("weight", weight, x, n, k);
  const auto to = rows_of("dx", dx);
  STD_TORCH_CHECK(!to || (to->rows() == in.rows() && to->n() == k && to->dtype() == in.dtype()),
                  "linear: dx must be like x");
  if (dweight) check_matrix("dweight", *dweight, x, n, k);
  STD_TORCH_CHECK(!dbias || (dbias->dim() == 1 && dbias->size(0) == n && dbias->is_contiguous() &&
                             dbias->scalar_type() == x.scalar_type()),
                  "linear: dbias must be a contiguous [", n, "] in x's dtype");
  linear_rows_backward(dout.view(), in.view(), view_of(weight), to ? to->view() : View{}, view_of(dweight),
                       view_of(dbias));
}

void linear_unpacked_op(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                        const std::optional<Tensor>& residual, int64_t activation, const Tensor& y,
                        const std::optional<Tensor>& before) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(1) == x.size(1) &&
                      dtype_of(x) == DType::f32 && dtype_of(weight) == DType::f32 &&
                      (weight.stride(0) == 1 || weight.stride(1) == 1),
                  "linear: x and weight must be float32 [M, K] and [N, K], the weight or its transpose of "
                  "contiguous rows");
  const Rows out("linear", "y", y);
  const auto added = rows_of("residual", residual);
  check_epilogue(x, weight.size(0), bias, added, activation, out);
  if (before) {
    check_matrix("before", *before, x, x.size(0), weight.size(0));
    STD_TORCH_CHECK(x.size(0) < 2 || before->stride(0) == out.view().strides[0],
                    "linear: before and y must have the same strides");
  }
  linear_unpacked(view_of(x), view_of(weight), view_of(bias), added ? added->view() : View{},
                  Activation(activation), out.view(), view_of(before));
}

void linear_gradient_op(const Tensor& dy, const Tensor& x, bool shortly, const Tensor& dweight,
                        const std::optional<Tensor>& dbias) {
  STD_TORCH_CHECK(dy.dim() == 2 && x.dim() == 2 && dtype_of(x) == DType::f32,
                  "linear: dy and x must be float32 matrices");
  const int64_t m = x.size(0), k = x.size(1), n = dy.size(1);
  STD_TORCH_CHECK(m > 0 && k > 0 && n > 0, "linear: there is nothing to multiply");
  check_matrix("x", x, x, m, k);
  check_matrix("dy", dy, x, m, n);
  check_matrix("dweight", dweight, x, n, k);
  if (dbias) {
    STD_TORCH_CHECK(
        dbias->dim() == 1 && dbias->size(0) == n && dbias->is_contiguous() && dtype_of(*dbias) == DType::f32,
        "linear: dbias must be a contiguous float32 [", n, "]");
  }
  linear_gradient(view_of(dy), view_of(x), shortly, view_of(dweight), view_of(dbias));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "linear_pack", opsmith::kernel<&opsmith::linear_pack_op>);
  opsmith::offer(m, "linear_packed", opsmith::kernel<&opsmith::linear_packed_op>);
  opsmith::offer(m, "linear_rows", opsmith::kernel<&opsmith::linear_rows_op>);
  opsmith::offer(m, "linear_rows_backward", opsmith::kernel<&opsmith::linear_rows_backward_op>);
  opsmith::offer(m, "linear_unpacked", opsmith::kernel<&opsmith::linear_unpacked_op>);
  opsmith::offer(m, "linear_gradient", opsmith::kernel<&opsmith::linear_gradient_op>);
}
