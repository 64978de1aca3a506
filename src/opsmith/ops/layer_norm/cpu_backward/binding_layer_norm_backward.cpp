// Registers the backward pass of LayerNorm, and checks what its memory safety needs.
#include "binding_rows_like.h"
#include "layer_norm/layer_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void layer_norm_backward_op(const Tensor& dy, const Optional& dsummed, const Tensor& s, const Tensor& mean,
                            const Tensor& rstd, const Optional& weight, const Optional& dx,
                            const Optional& dweight, const Optional& dbias) {
  STD_TORCH_CHECK(s.dim() > 0, "layer_norm: s must have at least one dimension");
  const Rows in("layer_norm", "s", s);
  const RowsLike slope("layer_norm", "dy", dy, in), more("layer_norm", "dsummed", dsummed, in),
      out("layer_norm", "dx", dx, in);
  check_vector("layer_norm", "mean", mean, in.rows(), true);
  check_vector("layer_norm", "rstd", rstd, in.rows(), true);
  check_weight("layer_norm", "weight", weight, in.n(), in.dtype());
  check_weight("layer_norm", "dweight", dweight, in.n(), in.dtype());
  check_weight("layer_norm", "dbias", dbias, in.n(), in.dtype());
  layer_norm_backward(slope.view(), more.view(), in.view(), view_of(mean), view_of(rstd), view_of(weight),
                      out.view(), view_of(dweight), view_of(dbias));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "layer_norm_backward", opsmith::kernel<&opsmith::layer_norm_backward_op>);
}
