// Registers the rotary embedding, and checks what its memory safety needs.
#include "rope/binding_rope.h"
#include "rope.h"

namespace opsmith {
namespace {

void rope_op(const Tensor& x, const Tensor& cos, const Tensor& sin, const Optional& positions, int64_t dims,
             bool interleaved, bool inverse, const Tensor& y) {
  STD_TORCH_CHECK(x.dim() == 3 || x.dim() == 4, "rope: x must be [B, H, L, D] or [T, H, D]");
  check_float(x);
  check_heads(x, x, true);
  check_heads(y, x, true);
  check_table(cos, sin, positions, x, dims);
  if (x.numel() == 0) return;
  rope(view_of(x), View{}, view_of(cos), view_of(sin), view_of(positions), {dims, interleaved, inverse},
       view_of(y), View{});
}

void rope_qk_op(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin,
                const Optional& positions, int64_t dims, bool interleaved, bool inverse, const Tensor& yq,
                const Tensor& yk) {
  STD_TORCH_CHECK(q.dim() == 3 || q.dim() == 4, "rope: q must be [B, H, L, D] or [T, H, D]");
  check_float(q);
  check_heads(q, q, true);
  check_heads(k, q, false);
  check_heads(yq, q, true);
  check_heads(yk, k, true);
  check_table(cos, sin, positions, q, dims);
  if (q.numel() == 0 && k.numel() == 0) return;
  rope(view_of(q), view_of(k), view_of(cos), view_of(sin), view_of(positions), {dims, interleaved, inverse},
       view_of(yq), view_of(yk));
}

void check_scale(const Tensor& scale, const Tensor& x) {
  bool fits = scale.dim() == x.dim() - 1 && dtype_of(scale) == DType::f32;
  for (int64_t d = 0; fits && d < scale.dim(); ++d) fits = scale.size(d) == x.size(d);
  STD_TORCH_CHECK(fits, "rope_int8: a scale must be float32, one for each row of x");
}

void rope_int8_op(const Tensor& x, const Tensor& scale, const Tensor& cos, const Tensor& sin,
                  const Optional& positions, int64_t dims, bool interleaved, const Tensor& y,
                  const Tensor& y_scale) {
  STD_TORCH_CHECK((x.dim() == 3 || x.dim() == 4) && dtype_of(x) == DType::i8,
                  "rope_int8: x must be [B, H, L, D] or [T, H, D] int8");
  check_heads(x, x, true);
  check_heads(y, x, true);
  check_table(cos, sin, positions, x, dims);
  check_scale(scale, x);
  check_scale(y_scale, x);
  if (x.numel() == 0) return;
  rope_int8(view_of(x), view_of(scale), view_of(cos), view_of(sin), view_of(positions),
            {dims, interleaved, false}, view_of(y), view_of(y_scale));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "rope", opsmith::kernel<&opsmith::rope_op>);
  opsmith::offer(m, "rope_qk", opsmith::kernel<&opsmith::rope_qk_op>);
  opsmith::offer(m, "rope_int8", opsmith::kernel<&opsmith::rope_int8_op>);
}
