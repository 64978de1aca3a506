// Registers the backward pass of RMSNorm, and checks what its memory safety needs.
#include "binding_rows_like.h"
#include "rms_norm/rms_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void rms_norm_backward_op(const Tensor& dy, const Optional& dsummed, const Tensor& s, const Tensor& rstd,
                          const Optional& weight, double offset, const Optional& dx,
                          const Optional& dweight) {
  STD_TORCH_CHECK(s.dim() > 0, "rms_norm: s must have at least one dimension");
  const Rows in("rms_norm", "s", s);
  const RowsLike slope("rms_norm", "dy", dy, in), more("rms_norm", "dsummed", dsummed, in),
      out("rms_norm", "dx", dx, in);
  check_vector("rms_norm", "rstd", rstd, in.rows(), true);
  check_weight("rms_norm", "weight", weight, in.n(), in.dtype());
  check_weight("rms_norm", "dweight", dweight, in.n(), in.dtype());
  rms_norm_backward(slope.view(), more.view(), in.view(), view_of(rstd), view_of(weight), offset, out.view(),
                    view_of(dweight));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "rms_norm_backward", opsmith::kernel<&opsmith::rms_norm_backward_op>);
}
