// Registers the backward pass of LayerNorm, and checks what its memory safety needs.
#include "binding.h"
#include "layer_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void layer_norm_backward_op(const Tensor& dy, const Optional& dsummed, const Tensor& s, const Tensor& mean,
                            const Tensor& rstd, const Optional& weight, const Optional& dx, const Optional& dweight,
                            const Optional& dbias) {
  check_rows("layer_norm", "s", s, s);
  check_rows("layer_norm", "dy", dy, s);
  check_rows("layer_norm", "dsummed", dsummed, s);
  check_vector("layer_norm", "mean", mean, s.size(0), true);
  check_vector("layer_norm", "rstd", rstd, s.size(0), true);
  check_weight("layer_norm", "weight", weight, s.size(1), dtype_of(s));
  check_rows("layer_norm", "dx", dx, s);
  check_weight("layer_norm", "dweight", dweight, s.size(1), dtype_of(s));
  check_weight("layer_norm", "dbias", dbias, s.size(1), dtype_of(s));
  layer_norm_backward(view_of(dy), view_of(dsummed), view_of(s), view_of(mean), view_of(rstd), view_of(weight),
                      view_of(dx), view_of(dweight), view_of(dbias));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "layer_norm_backward", opsmith::kernel<&opsmith::layer_norm_backward_op>);
}
