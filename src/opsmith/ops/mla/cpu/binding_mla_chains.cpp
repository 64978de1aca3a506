// Registers the queries' epilogue and the attention behind it; checks what their memory safety needs.
#include "binding_mla.h"

namespace opsmith {
namespace {

void q_epilogue_op(const Tensor& q, const Tensor& wuk, const Optional& cos, const Optional& sin,
                   bool interleaved, const Optional& q_nope_scale, const Tensor& q_out,
                   const Optional& q_rope) {
  STD_TORCH_CHECK(q.dim() == 3 && dense(q) && wuk.dim() == 3 && wuk.is_contiguous() &&
                      q.size(1) == wuk.size(0) && q.size(2) >= wuk.size(1),
                  "mla_q_epilogue: q must be [T, H, nope + rope] and wuk [H, nope, kv_lora]");
  const DType dtype = dtype_of(q);
  check_float("q", dtype);
  check_dtype("wuk", wuk, dtype);
  const int64_t tokens = q.size(0), heads = q.size(1), width = q.size(2) - wuk.size(1);
  check_table(cos, sin, tokens, width);
  const Queries queries("mla_q_epilogue", q_out, q_rope, q_nope_scale, dtype, tokens, heads, wuk.size(2),
                        width);
  mla_q_epilogue(view_of(q), view_of(wuk), {view_of(cos), view_of(sin), interleaved}, view_of(q_nope_scale),
                 queries.latent(), queries.rope());
}

int64_t number_at(const Tensor& t, int64_t at) {
  return dtype_of(t) == DType::i32 ? static_cast<const int32_t*>(t.data_ptr())[at]
                                   : static_cast<const int64_t*>(t.data_ptr())[at];
}

void attention_op(const Tensor& q_nope, const Tensor& q_rope, const Tensor& latent, const Tensor& rope,
                  const Tensor& tables, const Tensor& lens, double scale, const Optional& ctkv_scale,
                  const Optional& q_nope_scale, const Optional& wuv, const Tensor& latent_out,
                  const Optional& out) {
  const DType dtype = dtype_of(q_rope), held = q_nope_scale ? DType::i8 : dtype;
  check_float("q_rope", dtype);
  check_dtype("q_out", q_nope, held);
  STD_TORCH_CHECK(q_nope.dim() == 3 && dense(q_nope) && q_rope.dim() == 3 &&
                      (q_rope.size(2) == 0 || dense(q_rope)) && q_nope.size(0) == q_rope.size(0) &&
                      q_nope.size(1) == q_rope.size(1),
                  "mla_attention: q_out must be [T, H, kv_lora] and q_rope [T, H, rope]");
  const int64_t tokens = q_nope.size(0), heads = q_nope.size(1);
  auto check_rows = [&](const Tensor& t, int64_t n, DType wanted) {
    STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == latent.size(0) && t.size(1) == latent.size(1) &&
                        t.size(2) * t.size(3) == n && dense(t) && dtype_of(t) == wanted,
                    "mla_attention: the cache does not fit the queries");
  };
  STD_TORCH_CHECK(latent.dim() == 4 && bool(ctkv_scale) == bool(q_nope_scale),
                  "mla_attention: the cache does not fit the queries");
  check_rows(latent, q_nope.size(2), held);
  check_rows(rope, q_rope.size(2), dtype);
  const DType ids = dtype_of(tables);
  STD_TORCH_CHECK(tables.dim() == 2 && lens.dim() == 1 && lens.size(0) == tables.size(0) &&
                      (ids == DType::i32 || ids == DType::i64) &&
                      (dtype_of(lens) == DType::i32 || dtype_of(lens) == DType::i64),
                  "mla_attention: block_tables must be [S, n] and seq_lens [S], int32 or int64");
  const int64_t sequences = lens.size(0), size = latent.size(1);
  STD_TORCH_CHECK(sequences > 0 ? tokens % sequences == 0 : tokens == 0,
                  "mla_attention: as many tokens for each sequence");
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = number_at(lens, s * lens.stride(0));
    STD_TORCH_CHECK(0 <= length && length <= tables.size(1) * size,
                    "mla_attention: seq_lens must lie within the table");
    for (int64_t i = 0; i * size < length; ++i) {
      const int64_t block = number_at(tables, s * tables.stride(0) + i * tables.stride(1));
      STD_TORCH_CHECK(0 <= block && block < latent.size(0),
                      "mla_attention: block_tables must lie within the cache");
    }
  }
  STD_TORCH_CHECK(
      latent_out.is_contiguous() && same_sizes(latent_out, q_nope) && dtype_of(latent_out) == dtype,
      "mla_attention: latent_out must be [T, H, kv_lora]");
  STD_TORCH_CHECK(bool(wuv) == bool(out), "mla_attention: wuv and its result belong together");
  if (wuv) {
    STD_TORCH_CHECK(wuv->dim() == 3 && wuv->is_contiguous() && wuv->size(0) == heads &&
                        wuv->size(2) == q_nope.size(2) && dtype_of(*wuv) == dtype && out->is_contiguous() &&
                        out->dim() == 3 && out->size(0) == tokens && out->size(1) == heads &&
                        out->size(2) == wuv->size(1) && dtype_of(*out) == dtype,
                    "mla_attention: wuv must be [H, v, kv_lora] and its result [T, H, v]");
  }
  check_head_scales(q_nope_scale, heads);
  MlaAttentionCall call;
  call.q_nope = view_of(q_nope);
  call.q_rope = view_of(q_rope);
  call.latent = view_of(latent);
  call.rope = view_of(rope);
  call.tables = view_of(tables);
  call.lens = view_of(lens);
  call.scale = float(scale);
  if (ctkv_scale) call.ctkv_scale = number("mla", "ctkv_scale", ctkv_scale);
  call.q_nope_scale = view_of(q_nope_scale);
  call.wuv = view_of(wuv);
  call.latent_out = view_of(latent_out);
  call.out = view_of(out);
  mla_attention(call);
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "mla_q_epilogue", opsmith::kernel<&opsmith::q_epilogue_op>);
  opsmith::offer(m, "mla_attention", opsmith::kernel<&opsmith::attention_op>);
}
