// Registers the rotary embedding, and checks what its memory safety needs.
#include "binding.h"
#include "linear.h"
#include "rope.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

bool dense_rows(const Tensor& t) {
  return t.size(t.dim() - 1) < 2 || t.stride(t.dim() - 1) == 1 || t.numel() == 0;
}

void check_heads(const Tensor& t, const Tensor& like, bool same_heads) {
  bool fits = t.dim() == like.dim() && t.scalar_type() == like.scalar_type() && dense_rows(t);
  for (int64_t d = 0; fits && d < t.dim(); ++d) fits = t.size(d) == like.size(d) || (d == 1 && !same_heads);
  STD_TORCH_CHECK(fits, "rope: tensors must have one dtype, x's sizes and a contiguous last dimension");
}

// What reads of the table depend on: its width, its rows, and the positions that choose among them.
void check_table(const Tensor& cos, const Tensor& sin, const Optional& positions, const Tensor& x, int64_t dims) {
  const int64_t size = x.size(x.dim() - 1), batch = x.dim() == 4 ? x.size(0) : 1, tokens = x.size(x.dim() == 4 ? 2 : 0);
  STD_TORCH_CHECK(dims >= 0 && dims % 2 == 0 && dims <= size, "rope: ", dims, " dimensions cannot be rotated of ", size);
  const DType dtype = dtype_of(cos);
  const bool fits = dtype == DType::f32 || (dtype == dtype_of(x) && dtype != DType::i8) ||
                    (dtype_of(x) == DType::i8 && (dtype == DType::bf16 || dtype == DType::f16));
  STD_TORCH_CHECK(fits && dtype_of(sin) == dtype, "rope: cos and sin must both be float32, or both in x's dtype");
  STD_TORCH_CHECK((cos.dim() == 2 || cos.dim() == 3) && sin.dim() == cos.dim() && dense_rows(cos) && dense_rows(sin),
                  "rope: cos and sin must be [L, D] or [B, L, D] with a contiguous last dimension");
  for (int64_t d = 0; d < cos.dim(); ++d) {
    STD_TORCH_CHECK(cos.size(d) == sin.size(d), "rope: cos and sin must have one shape");
  }
  const int64_t width = cos.size(cos.dim() - 1), rows = cos.size(cos.dim() - 2), tables = cos.dim() == 3 ? cos.size(0) : 1;
  STD_TORCH_CHECK(width == dims || width == dims / 2, "rope: cos must be ", dims, " or ", dims / 2, " wide, not ", width);
  STD_TORCH_CHECK(tables == 1 || tables == batch, "rope: ", tables, " tables for a batch of ", batch);
  if (!positions) {
    STD_TORCH_CHECK(rows >= tokens, "rope: a table of ", rows, " rows for ", tokens, " tokens");
    return;
  }
  const int64_t d = positions->dim();
  STD_TORCH_CHECK(d == 1 || d == 2, "rope: positions must be [L] or [B, L]");
  STD_TORCH_CHECK(positions->size(d - 1) == tokens && (d == 1 || positions->size(0) == 1 || positions->size(0) == batch),
                  "rope: positions must be one for each token");
  const View view = view_of(*positions);
  STD_TORCH_CHECK(view.dtype == DType::i32 || view.dtype == DType::i64, "rope: positions must be int32 or int64");
  const int64_t bad = first_bad_position(view, rows);
  STD_TORCH_CHECK(bad < 0, "rope: positions must lie in [0, ", rows, "), the rows of the table; got ",
                  bad < 0 ? 0 : position_at(view, bad / tokens, bad % tokens), " for token ", bad);
}

void check_float(const Tensor& x) {
  const DType dtype = dtype_of(x);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "rope: x must be floating-point");
}

void rope_op(const Tensor& x, const Tensor& cos, const Tensor& sin, const Optional& positions, int64_t dims,
             bool interleaved, bool inverse, const Tensor& y) {
  STD_TORCH_CHECK(x.dim() == 3 || x.dim() == 4, "rope: x must be [B, H, L, D] or [T, H, D]");
  check_float(x);
  check_heads(x, x, true);
  check_heads(y, x, true);
  check_table(cos, sin, positions, x, dims);
  if (x.numel() == 0) return;
  rope(view_of(x), View{}, view_of(cos), view_of(sin), view_of(positions), {dims, interleaved, inverse}, view_of(y),
       View{});
}

void rope_qk_op(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, const Optional& positions,
                int64_t dims, bool interleaved, bool inverse, const Tensor& yq, const Tensor& yk) {
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

void rope_int8_op(const Tensor& x, const Tensor& scale, const Tensor& cos, const Tensor& sin, const Optional& positions,
                  int64_t dims, bool interleaved, const Tensor& y, const Tensor& y_scale) {
  STD_TORCH_CHECK((x.dim() == 3 || x.dim() == 4) && dtype_of(x) == DType::i8,
                  "rope_int8: x must be [B, H, L, D] or [T, H, D] int8");
  check_heads(x, x, true);
  check_heads(y, x, true);
  check_table(cos, sin, positions, x, dims);
  check_scale(scale, x);
  check_scale(y_scale, x);
  if (x.numel() == 0) return;
  rope_int8(view_of(x), view_of(scale), view_of(cos), view_of(sin), view_of(positions), {dims, interleaved, false},
            view_of(y), view_of(y_scale));
}

void linear_rope_op(const Tensor& x, const Tensor& packed, const Optional& bias, const Tensor& cos, const Tensor& sin,
                    const Optional& positions, int64_t dims, bool interleaved, const Tensor& q, const Tensor& k,
                    const Tensor& v) {
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
  const int64_t unit = elements_per_unit(dtype_of(x)), depth = (x.size(1) + unit - 1) / unit * unit;
  STD_TORCH_CHECK(packed.dim() == 3 && packed.size(0) == 1 && packed.size(1) == n && packed.size(2) == depth &&
                      packed.is_contiguous() && packed.scalar_type() == x.scalar_type(),
                  "linear_rope: the packed weight must be a contiguous [1, ", n, ", ", depth, "] in x's dtype");
  if (bias) {
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == n && dense_rows(*bias) && bias->scalar_type() == x.scalar_type(),
                    "linear_rope: bias must be a contiguous [", n, "] in x's dtype");
  }
  if (q.numel() == 0 && k.numel() == 0) return;
  linear_rope(view_of(x), view_of(packed), view_of(bias), view_of(cos), view_of(sin), view_of(positions),
              {dims, interleaved, false}, view_of(q), view_of(k), view_of(v));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "rope", TORCH_BOX(&opsmith::rope_op));
  opsmith::offer(m, "rope_qk", TORCH_BOX(&opsmith::rope_qk_op));
  opsmith::offer(m, "rope_int8", TORCH_BOX(&opsmith::rope_int8_op));
  opsmith::offer(m, "linear_rope", TORCH_BOX(&opsmith::linear_rope_op));
}
