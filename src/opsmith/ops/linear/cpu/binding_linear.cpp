// Registers the linear layer on packed weights, and checks what its memory safety needs.
#include "binding_rows_like.h"
#include "linear/binding_linear.h"

namespace opsmith {
namespace {

constexpr const char* op = "linear";

void check_matrix(const char* name, const Tensor& t, DType dtype, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(
      t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && (columns < 2 || t.stride(1) == 1), op,
      ": ", name, " must be [", rows, ", ", columns, "] with a contiguous last dimension");
  STD_TORCH_CHECK(dtype_of(t) == dtype, op, ": ", name, " and x must have one dtype");
}

int64_t rows_of_matrix(const Tensor& weight) {
  STD_TORCH_CHECK(weight.dim() == 2, op, ": weight must be [N, K]");
  return weight.size(0);
}

// Rows, floating-point, times a weight of n rows, and what follows.
struct Product {
  const Rows x, y, residual;  // y, where there is no residual
  const bool adds;
  const Activation activation;

  Product(const Tensor& from, int64_t n, const Optional& bias, const Optional& added, int64_t code,
          const Tensor& to)
      : x(op, "x", from), y(op, "y", to), residual(op, "residual", added ? *added : to),
        adds(added.has_value()), activation(Activation(code)) {
    const DType dtype = x.dtype();
    STD_TORCH_CHECK(is_floating(dtype), op, ": x must be floating-point");
    for (const auto& [name, rows] : {std::pair("y", &y), std::pair("residual", &residual)}) {
      STD_TORCH_CHECK(rows->rows() == x.rows() && rows->n() == n && rows->dtype() == dtype, op, ": ", name,
                      " must be ", x.rows(), " rows of ", n, " in x's dtype");
    }
    check_bias(op, "bias", bias, n, dtype);
    STD_TORCH_CHECK(0 <= code && code <= int64_t(Activation::silu), op, ": no activation ", code);
  }

  View added() const { return adds ? residual.view() : View{}; }
};

void linear_pack_op(const Tensor& weight, const Tensor& packed) {
  const int64_t n = rows_of_matrix(weight), k = weight.size(1);
  check_matrix("weight", weight, dtype_of(packed), n, k);
  check_packed(op, packed, dtype_of(weight), n, k);
  linear_pack(view_of(weight), view_of(packed));
}

void linear_packed_op(const Tensor& x, const Tensor& packed, const Optional& bias, const Optional& residual,
                      int64_t activation, const Tensor& y) {
  STD_TORCH_CHECK(packed.dim() == 3, op, ": a packed weight must have 3 dimensions");
  const Product p(x, packed.size(1), bias, residual, activation, y);
  check_packed(op, packed, p.x.dtype(), packed.size(1), p.x.n());
  linear_packed(p.x.view(), view_of(packed), view_of(bias), p.added(), p.activation, p.y.view());
}

void linear_rows_op(const Tensor& x, const Tensor& weight, const Optional& bias, const Optional& residual,
                    int64_t activation, const Tensor& y) {
  const Product p(x, rows_of_matrix(weight), bias, residual, activation, y);
  check_matrix("weight", weight, p.x.dtype(), p.y.n(), p.x.n());
  linear_rows(p.x.view(), view_of(weight), view_of(bias), p.added(), p.activation, p.y.view());
}

void linear_rows_backward_op(const Tensor& dy, const Tensor& x, const Tensor& weight, const Optional& dx,
                             const Optional& dweight, const Optional& dbias) {
  const Product p(x, rows_of_matrix(weight), dbias, std::nullopt, 0, dy);
  check_matrix("weight", weight, p.x.dtype(), p.y.n(), p.x.n());
  const RowsLike to(op, "dx", dx, p.x);
  if (dweight) check_matrix("dweight", *dweight, p.x.dtype(), p.y.n(), p.x.n());
  linear_rows_backward(p.y.view(), p.x.view(), view_of(weight), to.view(), view_of(dweight), view_of(dbias));
}

void linear_unpacked_op(const Tensor& x, const Tensor& weight, const Optional& bias, const Optional& residual,
                        int64_t activation, const Tensor& y, const Optional& before) {
  const Product p(x, rows_of_matrix(weight), bias, residual, activation, y);
  STD_TORCH_CHECK(weight.size(1) == p.x.n() && dtype_of(weight) == p.x.dtype() &&
                      (weight.stride(0) == 1 || weight.stride(1) == 1),
                  op, ": weight must be [", p.y.n(), ", ", p.x.n(),
                  "] in x's dtype, its rows or its columns contiguous");
  if (before) {
    check_matrix("before", *before, p.x.dtype(), p.x.rows(), p.y.n());
    STD_TORCH_CHECK(p.x.rows() < 2 || before->stride(0) == p.y.view().strides[0], op,
                    ": before and y must have the same strides");
  }
  linear_unpacked(p.x.view(), view_of(weight), view_of(bias), p.added(), p.activation, p.y.view(),
                  view_of(before));
}

void linear_gradient_op(const Tensor& dy, const Tensor& x, bool shortly, const Tensor& dweight,
                        const Optional& dbias) {
  STD_TORCH_CHECK(dy.dim() == 2 && x.dim() == 2, op, ": dy and x must be matrices");
  const int64_t m = x.size(0), k = x.size(1), n = dy.size(1);
  STD_TORCH_CHECK(m > 0 && k > 0 && n > 0, op, ": there is nothing to multiply");
  check_matrix("x", x, DType::f32, m, k);
  check_matrix("dy", dy, DType::f32, m, n);
  check_matrix("dweight", dweight, DType::f32, n, k);
  check_bias(op, "dbias", dbias, n, DType::f32);
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
