// Registers LayerNorm, and checks what its memory safety needs.
#include "binding.h"
#include "layer_norm/layer_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void layer_norm_op(const Tensor& x, const Optional& residual, const Optional& weight, const Optional& bias,
                   double eps, const Tensor& y, const Optional& summed, const Optional& mean,
                   const Optional& rstd) {
  STD_TORCH_CHECK(x.dim() > 0 && (!residual || (summed && same_sizes(*residual, x))),
                  "layer_norm: with a residual like x, summed must be given too");
  const Rows in("layer_norm", "x", x), out("layer_norm", "y", y);
  const Rows added = residual ? Rows("layer_norm", "residual", *residual) : in;
  const Rows sum = summed ? Rows("layer_norm", "summed", *summed) : in;
  STD_TORCH_CHECK(out.like(in) && added.like(in) && sum.like(in),
                  "layer_norm: all rows must have one shape and dtype");
  check_weight("layer_norm", "weight", weight, in.n(), in.dtype());
  check_weight("layer_norm", "bias", bias, in.n(), in.dtype());
  check_vector("layer_norm", "mean", mean, in.rows(), true);
  check_vector("layer_norm", "rstd", rstd, in.rows(), true);
  layer_norm(in.view(), residual ? added.view() : View{}, view_of(weight), view_of(bias), eps, out.view(),
             summed ? sum.view() : View{}, view_of(mean), view_of(rstd));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "layer_norm", opsmith::kernel<&opsmith::layer_norm_op>);
}
