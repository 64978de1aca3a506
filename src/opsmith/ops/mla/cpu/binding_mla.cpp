// Registers MLA's operators, and checks what their memory safety needs.
#include "binding.h"
#include "mla.h"

namespace opsmith::mla {
namespace {

constexpr int64_t kAny = -1;

// Whether a tensor has these sizes, the numbers of its last dimension next to each other, where there are any.
bool fits(const Tensor& t, std::initializer_list<int64_t> sizes) {
  int64_t d = 0;
  if (t.dim() != int64_t(sizes.size())) return false;
  for (const int64_t n : sizes) {
    if (t.size(d++) != n && n != kAny) return false;
  }
  return t.size(d - 1) < 2 || t.stride(d - 1) == 1 || t.numel() == 0;
}

void check(const char* name, const Optional& t, std::initializer_list<int64_t> sizes, DType dtype,
           bool or_float32 = false) {
  STD_TORCH_CHECK(
      !t || (fits(*t, sizes) && (dtype_of(*t) == dtype || (or_float32 && dtype_of(*t) == DType::f32))),
      "mla: ", name, " has another shape, layout or dtype than this call asks for");
}

// The dtype that a call computes in.
DType float_type(const char* name, const Tensor& t) {
  const DType dtype = dtype_of(t);
  STD_TORCH_CHECK(is_floating(dtype), "mla: ", name, " must be floating-point");
  return dtype;
}

void check_ids(const char* name, const Tensor& t, int64_t dims) {
  STD_TORCH_CHECK(t.dim() == dims && is_id(dtype_of(t)), "mla: ", name, " must have ", dims,
                  " dimension(s), in int32 or int64");
}

float or_one(const char* name, const Optional& t) { return t ? number("mla", name, t) : 1.0f; }

Rotation rotation(const Optional& cos, const Optional& sin, bool interleaved, int64_t tokens, int64_t rope,
                  DType dtype) {
  STD_TORCH_CHECK(bool(cos) == bool(sin) && (!cos || rope % 2 == 0), "mla: cos and sin belong together");
  const bool half = cos && cos->dim() == 2 && cos->size(1) != rope;
  for (const Optional* t : {&cos, &sin})
    check("cos or sin", *t, {tokens, half ? rope / 2 : rope}, dtype, true);
  return {view_of(cos), view_of(sin), interleaved};
}

// Where finished queries go: two tensors, or one whose rows hold both parts, as a joint cache has them.
class CheckedQueries {
 public:
  CheckedQueries(const Tensor& wuk, const Tensor& q_out, const Optional& q_rope, const Optional& q_nope_scale,
                 int64_t tokens, int64_t rope, const Rotation& rotation)
      : sizes_{{tokens, wuk.size(0), wuk.size(2)}, {tokens, wuk.size(0), rope}},
        queries_{view_of(wuk), view_of(q_nope_scale), view_of(q_out), view_of(q_rope ? *q_rope : q_out),
                 rotation} {
    const DType dtype = dtype_of(wuk);
    const int64_t heads = wuk.size(0), latent = wuk.size(2);
    STD_TORCH_CHECK(q_rope || !q_nope_scale, "mla: int8 queries and their rope part are two tensors");
    check("q_nope_scale", q_nope_scale, {heads}, DType::f32);
    check("q_out", q_out, {tokens, heads, q_rope ? latent : latent + rope}, q_nope_scale ? DType::i8 : dtype);
    check("q_rope", q_rope, {tokens, heads, rope}, dtype);
    if (q_rope) return;
    queries_.q_out.sizes = sizes_[0];
    queries_.q_rope.sizes = sizes_[1];
    queries_.q_rope.data = static_cast<char*>(queries_.q_rope.data) + latent * (dtype == DType::f32 ? 4 : 2);
  }
  CheckedQueries(const CheckedQueries&) = delete;

  const Queries& operator*() const { return queries_; }

 private:
  int64_t sizes_[2][3];
  Queries queries_;
};

// What every write into the cache relies on; `keys` has what is known of it without its tensors.
Keys checked(Keys keys, DType dtype, int64_t tokens, int64_t kv_lora, const Tensor& gamma2,
             const Tensor& slots, const Tensor& latent, const Optional& rope, const Optional& ctkv_scale) {
  check("gamma2", gamma2, {kv_lora}, dtype, true);
  const int64_t width = keys.rope_size;
  const bool tiled = keys.tiled;
  STD_TORCH_CHECK(latent.dim() == 4, "mla: latent must have 4 dimensions");
  const bool int8 = dtype_of(latent) == DType::i8;
  STD_TORCH_CHECK(int8 ? tiled && bool(ctkv_scale) : dtype_of(latent) == dtype,
                  "mla: latent has another dtype than a");
  const int64_t size = latent.size(tiled ? 2 : 1);
  auto lies = [&](const Tensor& t, int64_t n) {
    bool good = t.dim() == 4 && t.size(0) == latent.size(0) && t.size(tiled ? 2 : 1) == size;
    good = good && (tiled ? t.size(1) * t.size(3) == n : t.size(2) == 1 && t.size(3) == n);
    int64_t step = 1;
    for (int64_t d = 3; good && d > 0; --d) {
      good = t.size(d) < 2 || t.stride(d) == step || t.numel() == 0;
      step *= t.size(d);
    }
    return good && (t.size(0) < 2 || t.stride(0) >= step || t.numel() == 0);
  };
  STD_TORCH_CHECK(lies(latent, rope ? kv_lora : kv_lora + width) && (rope || !tiled) &&
                      (!rope || (lies(*rope, width) && dtype_of(*rope) == dtype)),
                  "mla: latent and rope do not fit their layout");
  check_ids("slots", slots, 1);
  STD_TORCH_CHECK(slots.size(0) == tokens, "mla: a slot for each token");
  keys.slots = view_of(slots);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t slot = integer_at(keys.slots, t * slots.stride(0)), end = latent.size(0) * size;
    STD_TORCH_CHECK(-1 <= slot && slot < end, "mla: slot_mapping must lie in [0, ", end,
                    ") or be -1; it does not for token ", t, "; nothing was written");
  }
  STD_TORCH_CHECK(0 <= keys.eps && keys.eps <= std::numeric_limits<float>::max(), "mla: no eps ", keys.eps);
  keys.gamma2 = view_of(gamma2);
  keys.latent = view_of(latent);
  keys.rope = view_of(rope);
  keys.ctkv_scale = or_one("ctkv_scale", ctkv_scale);
  return keys;
}

void kv_epilogue_op(const Tensor& a, const Tensor& gamma2, const Optional& cos, const Optional& sin,
                    const Tensor& slots, int64_t rope_size, bool interleaved, bool tiled, double eps,
                    const Optional& ctkv_scale, const Tensor& latent, const Optional& rope) {
  STD_TORCH_CHECK(
      fits(a, {kAny, kAny}) && gamma2.dim() == 1 && rope_size >= 0 && a.size(1) >= gamma2.size(0) + rope_size,
      "mla_kv_epilogue: a must be [T, kv_lora + rope or more] with a contiguous last dimension");
  const DType dtype = float_type("a", a);
  const Keys keys{.rotation = rotation(cos, sin, interleaved, a.size(0), rope_size, dtype),
                  .rope_size = rope_size,
                  .tiled = tiled,
                  .eps = float(eps)};
  kv_epilogue(view_of(a),
              checked(keys, dtype, a.size(0), gamma2.size(0), gamma2, slots, latent, rope, ctkv_scale));
}

void q_epilogue_op(const Tensor& q, const Tensor& wuk, const Optional& cos, const Optional& sin,
                   bool interleaved, const Optional& q_nope_scale, const Tensor& q_out,
                   const Optional& q_rope) {
  STD_TORCH_CHECK(fits(q, {kAny, kAny, kAny}) && wuk.dim() == 3 && wuk.is_contiguous() &&
                      q.size(1) == wuk.size(0) && q.size(2) >= wuk.size(1) && dtype_of(q) == dtype_of(wuk),
                  "mla_q_epilogue: q must be [T, H, nope + rope] and wuk [H, nope, kv_lora], of one dtype");
  const int64_t tokens = q.size(0), rope = q.size(2) - wuk.size(1);
  const CheckedQueries queries(wuk, q_out, q_rope, q_nope_scale, tokens, rope,
                               rotation(cos, sin, interleaved, tokens, rope, float_type("q", q)));
  q_epilogue(view_of(q), *queries);
}

Projection projection(const char* name, const Tensor& weight, const Optional& bias, const Optional& descale,
                      const Optional& scale, const Optional& offset, Quant quant, DType dtype,
                      int64_t depth) {
  const bool packed = quant == Quant::weight_int4;
  check(name, weight, {kAny, packed ? kAny : depth}, quant == Quant::none ? dtype : DType::i8);
  const int64_t n = weight.size(0), width = weight.size(1);
  STD_TORCH_CHECK(n <= 1 || weight.stride(0) >= width, "mla: rows of ", name, " lie on each other");
  check("bias", bias, {n}, quant == Quant::per_tensor ? DType::i32 : dtype);
  STD_TORCH_CHECK(!bias || quant != Quant::per_token, "mla: no bias per token");
  Projection p{view_of(weight), view_of(bias), view_of(descale)};
  if (quant == Quant::none) return p;
  if (packed) {
    check("descale", descale, {n, kAny}, DType::f32);
    const int64_t groups = descale ? descale->size(1) : 0;
    STD_TORCH_CHECK(groups > 0 && descale->is_contiguous() && width % groups == 0 &&
                        width / groups % 16 == 0 && depth <= 2 * width && 2 * width <= (depth + 63) / 64 * 64,
                    "mla: descale must be [N, groups], and the weight [N, K / 2] with K in whole groups");
  } else {
    STD_TORCH_CHECK(descale, "mla: a quantized weight has descales");
    check("descale", descale, {n}, DType::f32);
  }
  if (quant == Quant::per_tensor) {
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
      fits(x, {kAny, kAny}) && fits(wdqkv, {kAny, kAny}) && fits(wuq, {kAny, kAny}) && wuk.dim() == 3 &&
          wuk.is_contiguous(),
      "mla_preprocess: x, wdqkv, wuq must be matrices and wuk 3-dimensional, dense in their last dimension");
  STD_TORCH_CHECK(0 <= quant && quant <= int64_t(Quant::weight_int4), "mla_preprocess: no form ", quant);
  const DType dtype = float_type("x", x);
  const int64_t tokens = x.size(0), hidden = x.size(1), heads = wuk.size(0), nope = wuk.size(1),
                kv_lora = wuk.size(2);
  check("wuk", wuk, {heads, nope, kv_lora}, dtype);
  STD_TORCH_CHECK(
      heads > 0 && nope > 0 && kv_lora > 0 && wuq.size(0) % heads == 0 && wuq.size(0) / heads >= nope,
      "mla_preprocess: wuq must have heads * (nope + rope) rows");
  const int64_t width = wuq.size(0) / heads - nope, inner = gamma1 ? wdqkv.size(0) - kv_lora - width : hidden;
  STD_TORCH_CHECK(inner >= 0 && (gamma1 || wdqkv.size(0) == kv_lora + width) && (!latent_q || gamma1),
                  "mla_preprocess: wdqkv and wuq do not fit each other");
  check("gamma0", gamma0, {hidden}, dtype, true);
  check("beta0", beta0, {hidden}, dtype, true);
  check("gamma1", gamma1, {inner}, dtype, true);
  check("beta1", beta1, {inner}, dtype, true);
  check("latent_q", latent_q, {tokens, inner}, dtype);
  const Rotation turn = rotation(cos, sin, interleaved, tokens, width, dtype);
  const CheckedQueries queries(wuk, q_out, q_rope, q_nope_scale, tokens, width, turn);
  const Keys keys{.rotation = turn, .rope_size = width, .tiled = tiled, .eps = float(eps)};
  preprocess(
      {.x = view_of(x),
       .gamma0 = view_of(gamma0),
       .beta0 = view_of(beta0),
       .gamma1 = view_of(gamma1),
       .beta1 = view_of(beta1),
       .down = projection("wdqkv", wdqkv, bias0, descale0, scale0, offset0, Quant(quant), dtype, hidden),
       .up = projection("wuq", wuq, bias1, descale1, scale1, offset1, Quant(quant), dtype, inner),
       .quant = Quant(quant),
       .keys = checked(keys, dtype, tokens, kv_lora, gamma2, slots, latent, rope, ctkv_scale),
       .queries = *queries,
       .latent_q = view_of(latent_q),
       .eps = float(eps)});
}

void attention_op(const Tensor& q_nope, const Tensor& q_rope, const Tensor& latent, const Tensor& rope,
                  const Tensor& tables, const Tensor& lens, double scale, const Optional& ctkv_scale,
                  const Optional& q_nope_scale, const Optional& wuv, const Tensor& latent_out,
                  const Optional& out) {
  const DType dtype = float_type("q_rope", q_rope), held = q_nope_scale ? DType::i8 : dtype;
  check("q_out", q_nope, {kAny, kAny, kAny}, held);
  const int64_t tokens = q_nope.size(0), heads = q_nope.size(1), kv_lora = q_nope.size(2);
  check("q_rope", q_rope, {tokens, heads, kAny}, dtype);
  check("q_nope_scale", q_nope_scale, {heads}, DType::f32);
  check("latent", latent, {kAny, kAny, kAny, kAny}, held);
  check("rope", rope, {latent.size(0), latent.size(1), kAny, kAny}, dtype);
  STD_TORCH_CHECK(bool(ctkv_scale) == bool(q_nope_scale) && latent.size(2) * latent.size(3) == kv_lora &&
                      rope.size(2) * rope.size(3) == q_rope.size(2),
                  "mla_attention: the cache does not fit the queries");
  check_ids("block_tables", tables, 2);
  check_ids("seq_lens", lens, 1);
  const int64_t sequences = lens.size(0), size = latent.size(1);
  STD_TORCH_CHECK(
      tables.size(0) == sequences && (sequences > 0 ? tokens % sequences == 0 : tokens == 0),
      "mla_attention: block_tables must be [S, n] and seq_lens [S], as many tokens for each of S");
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t length = integer_at(view_of(lens), s * lens.stride(0));
    STD_TORCH_CHECK(0 <= length && length <= tables.size(1) * size,
                    "mla_attention: seq_lens must lie within the table");
    for (int64_t i = 0; i * size < length; ++i) {
      const int64_t block = integer_at(view_of(tables), s * tables.stride(0) + i * tables.stride(1));
      STD_TORCH_CHECK(0 <= block && block < latent.size(0),
                      "mla_attention: block_tables must lie within the cache");
    }
  }
  STD_TORCH_CHECK(bool(wuv) == bool(out) && latent_out.is_contiguous() &&
                      (!wuv || (wuv->is_contiguous() && out->is_contiguous())),
                  "mla_attention: wuv and its result belong together, contiguous as all results are");
  check("latent_out", latent_out, {tokens, heads, kv_lora}, dtype);
  check("wuv", wuv, {heads, kAny, kv_lora}, dtype);
  check("out", out, {tokens, heads, wuv ? wuv->size(1) : 0}, dtype);
  attention({.q_nope = view_of(q_nope),
             .q_rope = view_of(q_rope),
             .latent = view_of(latent),
             .rope = view_of(rope),
             .tables = view_of(tables),
             .lens = view_of(lens),
             .scale = float(scale),
             .ctkv_scale = or_one("ctkv_scale", ctkv_scale),
             .q_nope_scale = view_of(q_nope_scale),
             .wuv = view_of(wuv),
             .latent_out = view_of(latent_out),
             .out = view_of(out)});
}

}  // namespace
}  // namespace opsmith::mla

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  using namespace opsmith;
  offer(m, "mla_preprocess", kernel<&mla::preprocess_op>);
  offer(m, "mla_kv_epilogue", kernel<&mla::kv_epilogue_op>);
  offer(m, "mla_q_epilogue", kernel<&mla::q_epilogue_op>);
  offer(m, "mla_attention", kernel<&mla::attention_op>);
}
