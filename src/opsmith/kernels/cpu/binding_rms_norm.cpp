// Registers RMSNorm and its backward pass, and checks what their memory safety needs.
#include "binding.h"
#include "rms_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void check_rows(const char* name, const Optional& t, const Tensor& like) {
  if (!t) return;
  STD_TORCH_CHECK(t->dim() == 2 && like.dim() == 2 && t->size(0) == like.size(0) && t->size(1) == like.size(1) &&
                      (t->size(1) < 2 || t->stride(1) == 1) && t->scalar_type() == like.scalar_type(),
                  "rms_norm: ", name, " must be [rows, n] like the input, with a contiguous last dimension");
}

void check_vector(const char* name, const Optional& t, int64_t n, bool float32) {
  if (!t) return;
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == n && t->is_contiguous() && (!float32 || dtype_of(*t) == DType::f32),
                  "rms_norm: ", name, " must be a contiguous vector of ", n, float32 ? " float32" : "");
}

void rms_norm_op(const Tensor& x, const Optional& residual, const Optional& weight, double eps, double offset,
                 bool round_first, const Tensor& y, const Optional& summed, const Optional& rstd) {
  check_rows("x", x, x);
  check_rows("residual", residual, x);
  check_vector("weight", weight, x.size(1), false);
  check_rows("y", y, x);
  check_rows("summed", summed, x);
  check_vector("rstd", rstd, x.size(0), true);
  STD_TORCH_CHECK(!residual || summed, "rms_norm: with a residual, summed must be given too");
  rms_norm(view_of(x), view_of(residual), view_of(weight), eps, offset, round_first, view_of(y), view_of(summed),
           view_of(rstd));
}

void rms_norm_backward_op(const Tensor& dy, const Optional& dsummed, const Tensor& s, const Tensor& rstd,
                          const Optional& weight, double offset, const Optional& dx, const Optional& dweight) {
  check_rows("s", s, s);
  check_rows("dy", dy, s);
  check_rows("dsummed", dsummed, s);
  check_vector("rstd", rstd, s.size(0), true);
  check_vector("weight", weight, s.size(1), false);
  check_rows("dx", dx, s);
  check_vector("dweight", dweight, s.size(1), false);
  rms_norm_backward(view_of(dy), view_of(dsummed), view_of(s), view_of(rstd), view_of(weight), offset, view_of(dx),
                    view_of(dweight));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&opsmith::rms_norm_op));
  m.impl("rms_norm_backward", TORCH_BOX(&opsmith::rms_norm_backward_op));
}
