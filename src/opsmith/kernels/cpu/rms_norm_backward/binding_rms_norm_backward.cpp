// Registers the backward pass of RMSNorm, and checks what its memory safety needs.
#include "binding.h"
#include "rms_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void rms_norm_backward_op(const Tensor& dy, const Optional& dsummed, const Tensor& s, const Tensor& rstd,
                          const Optional& weight, double offset, const Optional& dx, const Optional& dweight) {
  check_rows("rms_norm", "s", s, s);
  check_rows("rms_norm", "dy", dy, s);
  check_rows("rms_norm", "dsummed", dsummed, s);
  check_vector("rms_norm", "rstd", rstd, s.size(0), true);
  check_vector("rms_norm", "weight", weight, s.size(1), false);
  check_rows("rms_norm", "dx", dx, s);
  check_vector("rms_norm", "dweight", dweight, s.size(1), false);
  rms_norm_backward(view_of(dy), view_of(dsummed), view_of(s), view_of(rstd), view_of(weight), offset, view_of(dx),
                    view_of(dweight));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "rms_norm_backward", opsmith::kernel<&opsmith::rms_norm_backward_op>);
}
