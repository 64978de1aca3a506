// Registers the projection with its rotation, and checks what its memory safety needs.
#include "linear/binding_linear.h"
#include "rope/binding_rope.h"
#include "rope.h"

namespace opsmith {
namespace {

void linear_rope_op(const Tensor& x, const Tensor& packed, const Optional& bias, const Tensor& cos,
                    const Tensor& sin, const Optional& positions, int64_t dims, bool interleaved,
                    const Tensor& q, const Tensor& k, const Tensor& v) {
  STD_TORCH_CHECK(q.dim() == 3 || q.dim() == 4, "linear_rope: q must be [B, H, L, D] or [T, H, D]");
  check_float(q);
  check_heads(q, q, true);
  check_heads(k, q, false);
  check_heads(v, k, true);
  check_table(cos, sin, positions, q, dims);
  const int64_t size = q.size(q.dim() - 1), n = (q.size(1) + 2 * k.size(1)) * size;
  const int64_t tokens = q.dim() == 4 ? q.size(0) * q.size(2) : q.size(0);
  STD_TORCH_CHECK(0 < linear_rope_group(size) && linear_rope_group(size) <= kMostGroup,
                  "linear_rope: no kernel for heads of ", size);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) == tokens && dense_rows(x) && x.scalar_type() == q.scalar_type(),
                  "linear_rope: x must be [", tokens, ", K] in q's dtype with a contiguous last dimension");
  const DType dtype = dtype_of(x);
  check_packed("linear_rope", packed, dtype, n, x.size(1));
  STD_TORCH_CHECK(dtype_of(packed) == dtype, "linear_rope: the packed weight must be in x's dtype");
  check_bias("linear_rope", "bias", bias, n, dtype);
  if (q.numel() == 0 && k.numel() == 0) return;
  linear_rope(view_of(x), view_of(packed), view_of(bias), view_of(cos), view_of(sin), view_of(positions),
              {dims, interleaved, false}, view_of(q), view_of(k), view_of(v));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "linear_rope", opsmith::kernel<&opsmith::linear_rope_op>);
}
