// Registers MLA pre-processing, and checks what its memory safety needs.
#include "binding_mla.h"

namespace opsmith {
namespace {

// What every write into the cache relies on.
MlaCacheView check_cache(const Tensor& latent, const Optional& rope, bool tiled, DType dtype, int64_t kv_lora,
                         int64_t width, const Tensor& slots, const Optional& ctkv_scale) {
  STD_TORCH_CHECK(latent.dim() == 4, "mla: latent must have 4 dimensions");
  const bool int8 = dtype_of(latent) == DType::i8;
  STD_TORCH_CHECK(int8 ? tiled && bool(ctkv_scale) : dtype_of(latent) == dtype,
                  "mla: latent has another dtype than a");
  const int64_t size = latent.size(tiled ? 2 : 1);
  auto fits = [&](const Tensor& t, int64_t n) {
    bool good = t.dim() == 4 && t.size(0) == latent.size(0) && t.size(tiled ? 2 : 1) == size;
    good = good && (tiled ? t.size(1) * t.size(3) == n : t.size(2) == 1 && t.size(3) == n);
    int64_t step = 1;
    for (int64_t d = 3; good && d > 0; --d) {
      good = t.size(d) < 2 || t.stride(d) == step || t.numel() == 0;
      step *= t.size(d);
    }
    return good && (t.size(0) < 2 || t.stride(0) >= step || t.numel() == 0);
  };
  STD_TORCH_CHECK(fits(latent, rope ? kv_lora : kv_lora + width) && (rope || !tiled),
                  "mla: latent does not fit its layout");
  STD_TORCH_CHECK(!rope || (fits(*rope, width) && dtype_of(*rope) == dtype),
                  "mla: rope does not fit its layout");
  const DType ids = dtype_of(slots);
  STD_TORCH_CHECK(slots.dim() == 1 && (ids == DType::i32 || ids == DType::i64),
                  "mla: slots must be [T], int32 or int64");
  const int64_t end = latent.size(0) * size, bad = mla_bad_slot(view_of(slots), end);
  STD_TORCH_CHECK(bad < 0, "mla: slot_mapping must lie in [0, ", end, ") or be -1; it does not for token ",
                  bad, "; nothing was written");
  return {view_of(latent), view_of(rope), tiled, ctkv_scale ? number("mla", "ctkv_scale", ctkv_scale) : 1.0f};
}

void kv_epilogue_op(const Tensor& a, const Tensor& gamma2, const Optional& cos, const Optional& sin,
                    const Tensor& slots, int64_t rope_size, bool interleaved, bool tiled, double eps,
                    const Optional& ctkv_scale, const Tensor& latent, const Optional& rope) {
  STD_TORCH_CHECK(a.dim() == 2 && dense(a) && gamma2.dim() == 1 && rope_size >= 0 &&
                      a.size(1) >= gamma2.size(0) + rope_size,
                  "mla_kv_epilogue: a must be [T, kv_lora + rope or more] with a contiguous last dimension");
  check_float_vector("gamma2", gamma2, gamma2.size(0));
  check_table(cos, sin, a.size(0), rope_size);
  STD_TORCH_CHECK(slots.dim() == 1 && slots.size(0) == a.size(0), "mla_kv_epilogue: a slot for each token");
  const MlaCacheView cache = check_cache(latent, rope, tiled, dtype_of(a), gamma2.size(0), rope_size, slots,
                                         ctkv_scale);
  mla_kv_epilogue(view_of(a), view_of(gamma2), {view_of(cos), view_of(sin), interleaved}, view_of(slots),
                  rope_size, float(eps), cache);
}

MlaProjection projection(const char* name, const Tensor& weight, const Optional& bias,
                         const Optional& descale, const Optional& scale, const Optional& offset,
                         MlaQuant quant, DType dtype, int64_t depth) {
  const int64_t n = weight.size(0);
  check_dtype(name, weight, quant == MlaQuant::none ? dtype : DType::i8);
  if (bias) {
    check_vector("bias", bias, n);
    check_dtype("bias", *bias, quant == MlaQuant::per_tensor ? DType::i32 : dtype);
    STD_TORCH_CHECK(quant != MlaQuant::per_token, "mla: no bias per token");
  }
  MlaProjection p{view_of(weight), view_of(bias), view_of(descale)};
  if (quant != MlaQuant::none)
    STD_TORCH_CHECK(descale && dtype_of(*descale) == DType::f32, "mla: descale must be float32");
  if (quant == MlaQuant::weight_int4) {
    const int64_t groups = descale->dim() == 2 ? descale->size(1) : 0, half = weight.size(1);
    STD_TORCH_CHECK(groups > 0 && descale->size(0) == n && descale->is_contiguous() && half % groups == 0 &&
                        half / groups % 16 == 0 && depth <= 2 * half && 2 * half <= (depth + 63) / 64 * 64,
                    "mla: descale must be [N, groups], and the weight [N, K / 2] with K in whole groups");
  } else if (quant != MlaQuant::none) {
    check_vector("descale", descale, n);
  }
  if (quant == MlaQuant::per_tensor) {
    p.scale = number("mla", "scale", scale);
    p.offset = number("mla", "offset", offset);
  }
  return p;
}

void preprocess_op(const Tensor& x, const Tensor& wdqkv, const Tensor& wuq, const Tensor& wuk,
                   const Optional& gamma0, const Optional& gamma1, const Tensor& gamma2,
                   const Optional& beta0, const Optional& beta1, const Optional& bias0, const Optional& bias1,
                   const Optional& descale0, const Optional& descale1, const Optional& scale0,
                   const Optional& offset0, const Optional& scale1, const Optional& offset1,
                   const Optional& cos, const Optional& sin, const Tensor& slots, int64_t quant,
                   bool interleaved, bool tiled, double eps, const Optional& ctkv_scale,
                   const Optional& q_nope_scale, const Tensor& q_out, const Optional& q_rope,
                   const Tensor& latent, const Optional& rope, const Optional& latent_q) {
  STD_TORCH_CHECK(
      x.dim() == 2 && wdqkv.dim() == 2 && wuq.dim() == 2 && wuk.dim() == 3 && dense(x) && dense(wdqkv) &&
          dense(wuq) && wuk.is_contiguous(),
      "mla_preprocess: x, wdqkv, wuq must be matrices and wuk 3-dimensional, dense in their last dimension");
  STD_TORCH_CHECK(0 <= quant && quant <= int64_t(MlaQuant::weight_int4), "mla_preprocess: no form ", quant);
  const DType dtype = dtype_of(x);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16,
                  "mla_preprocess: x must be floating-point");
  check_dtype("wuk", wuk, dtype);
  const int64_t tokens = x.size(0), hidden = x.size(1), heads = wuk.size(0), nope = wuk.size(1),
                kv_lora = wuk.size(2);
  STD_TORCH_CHECK(
      heads > 0 && nope > 0 && kv_lora > 0 && wuq.size(0) % heads == 0 && wuq.size(0) / heads >= nope,
      "mla_preprocess: wuq must have heads * (nope + rope) rows");
  const int64_t width = wuq.size(0) / heads - nope, inner = gamma1 ? wdqkv.size(0) - kv_lora - width : hidden;
  const bool packed = MlaQuant(quant) == MlaQuant::weight_int4;
  STD_TORCH_CHECK((packed || (wdqkv.size(1) == hidden && wuq.size(1) == inner)) && inner >= 0 &&
                      (gamma1 || wdqkv.size(0) == kv_lora + width),
                  "mla_preprocess: wdqkv and wuq do not fit x and each other");
  check_float_vector("gamma0", gamma0, hidden);
  check_float_vector("beta0", beta0, hidden);
  check_float_vector("gamma1", gamma1, inner);
  check_float_vector("beta1", beta1, inner);
  check_float_vector("gamma2", gamma2, kv_lora);
  check_table(cos, sin, tokens, width);
  for (const Optional* t : {&cos, &sin}) {
    STD_TORCH_CHECK(!*t || dtype_of(**t) == dtype || dtype_of(**t) == DType::f32,
                    "mla_preprocess: cos and sin must be float32 or in x's dtype");
  }
  STD_TORCH_CHECK(slots.dim() == 1 && slots.size(0) == tokens, "mla_preprocess: a slot for each token");
  MlaCall call;
  call.quant = MlaQuant(quant);
  call.down = projection("wdqkv", wdqkv, bias0, descale0, scale0, offset0, call.quant, dtype, hidden);
  call.up = projection("wuq", wuq, bias1, descale1, scale1, offset1, call.quant, dtype, inner);
  const Queries queries("mla_preprocess", q_out, q_rope, q_nope_scale, dtype, tokens, heads, kv_lora, width);
  if (latent_q) {
    STD_TORCH_CHECK(gamma1 && latent_q->dim() == 2 && latent_q->size(0) == tokens &&
                        latent_q->size(1) == inner && dense(*latent_q) && dtype_of(*latent_q) == dtype,
                    "mla_preprocess: latent_q must be [T, q_lora]");
  }
  call.x = view_of(x);
  call.gamma0 = view_of(gamma0);
  call.beta0 = view_of(beta0);
  call.gamma1 = view_of(gamma1);
  call.beta1 = view_of(beta1);
  call.gamma2 = view_of(gamma2);
  call.wuk = view_of(wuk);
  call.rotation = {view_of(cos), view_of(sin), interleaved};
  call.slots = view_of(slots);
  call.q_nope_scale = view_of(q_nope_scale);
  call.eps = float(eps);
  call.q_out = queries.latent();
  call.q_rope = queries.rope();
  call.latent_q = view_of(latent_q);
  call.cache = check_cache(latent, rope, tiled, dtype, kv_lora, width, slots, ctkv_scale);
  mla_preprocess(call);
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "mla_kv_epilogue", opsmith::kernel<&opsmith::kv_epilogue_op>);
  opsmith::offer(m, "mla_preprocess", opsmith::kernel<&opsmith::preprocess_op>);
}
