// Registers the routing, and checks what its memory safety needs.
#include "binding.h"
#include "moe_route.h"

namespace opsmith {
namespace {

Rows logits_of(const char* op, const char* name, const Tensor& t) {
  const Rows rows(op, name, t);
  STD_TORCH_CHECK(t.dim() == 2 && is_floating(rows.dtype()), op, ": ", name,
                  " must be floating-point [T, E]");
  return rows;
}

void check_chosen(const char* op, const char* name, const Tensor& t, int64_t tokens, int64_t k, DType dtype) {
  STD_TORCH_CHECK(
      t.dim() == 2 && t.size(0) == tokens && t.size(1) == k && t.is_contiguous() && dtype_of(t) == dtype, op,
      ": ", name, " must be a contiguous [", tokens, ", ", k, "]");
}

void moe_route_op(const Tensor& logits, const Optional& bias, int64_t k, bool sigmoid, int64_t groups,
                  int64_t open, bool normalize, double scale, const Tensor& ids, const Tensor& weights) {
  const char* op = "moe_route";
  const Rows in = logits_of(op, "logits", logits);
  const int64_t tokens = in.rows(), experts = in.n();
  STD_TORCH_CHECK(groups > 0 && experts % groups == 0 && 0 < open && open <= groups, op, ": no ", open,
                  " of ", groups, " groups of ", experts, " experts");
  STD_TORCH_CHECK(0 < k && k <= experts / groups * open, op, ": there are no ", k, " experts to choose");
  check_vector(op, "bias", bias, experts, false);
  STD_TORCH_CHECK(!bias || dtype_of(*bias) == in.dtype() || dtype_of(*bias) == DType::f32, op,
                  ": bias must be float32 or in the logits' dtype");
  check_chosen(op, "ids", ids, tokens, k, DType::i64);
  check_chosen(op, "weights", weights, tokens, k, DType::f32);
  moe_route(in.view(), view_of(bias), {sigmoid, groups, open, normalize, float(scale)}, view_of(ids),
            view_of(weights));
}

void moe_route_backward_op(const Tensor& dweights, const Tensor& logits, const Tensor& ids, bool sigmoid,
                           bool normalize, double scale, const Tensor& dlogits) {
  const char* op = "moe_route_backward";
  const Rows in = logits_of(op, "logits", logits), out = logits_of(op, "dlogits", dlogits);
  STD_TORCH_CHECK(out.like(in), op, ": dlogits must be like logits");
  STD_TORCH_CHECK(ids.dim() == 2, op, ": ids must be [T, k]");
  const int64_t tokens = in.rows(), k = ids.size(1);
  check_chosen(op, "ids", ids, tokens, k, DType::i64);
  check_chosen(op, "dweights", dweights, tokens, k, DType::f32);
  const int64_t* const id = static_cast<const int64_t*>(ids.data_ptr());
  for (int64_t i = 0; i < tokens * k; ++i)
    STD_TORCH_CHECK(0 <= id[i] && id[i] < in.n(), op, ": ids must be in [0, ", in.n(), "), got ", id[i]);
  moe_route_backward(view_of(dweights), in.view(), view_of(ids), {sigmoid, 1, 1, normalize, float(scale)},
                     out.view());
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "moe_route", opsmith::kernel<&opsmith::moe_route_op>);
  opsmith::offer(m, "moe_route_backward", opsmith::kernel<&opsmith::moe_route_backward_op>);
}
