// Registers RMSNorm, and checks what its memory safety needs.
#include "binding.h"
#include "rms_norm/rms_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void rms_norm_op(const Tensor& x, const Optional& residual, const Optional& weight, double eps, double offset,
                 bool round_first, const Tensor& y, const Optional& summed, const Optional& rstd) {
  STD_TORCH_CHECK(x.dim() > 0 && (!residual || (summed && same_sizes(*residual, x))),
                  "rms_norm: with a residual like x, summed must be given too");
  const Rows in("rms_norm", "x", x), out("rms_norm", "y", y);
  const Rows added = residual ? Rows("rms_norm", "residual", *residual) : in;
  const Rows sum = summed ? Rows("rms_norm", "summed", *summed) : in;
  STD_TORCH_CHECK(out.like(in) && added.like(in) && sum.like(in),
                  "rms_norm: all rows must have one shape and dtype");
  check_weight("rms_norm", "weight", weight, in.n(), in.dtype());
  check_vector("rms_norm", "rstd", rstd, in.rows(), true);
  rms_norm(in.view(), residual ? added.view() : View{}, view_of(weight), eps, offset, round_first, out.view(),
           summed ? sum.view() : View{}, view_of(rstd));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "rms_norm", opsmith::kernel<&opsmith::rms_norm_op>);
}
