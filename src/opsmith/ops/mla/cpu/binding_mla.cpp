// Registers MLA's operators, and checks what their memory safety needs.
#include "binding.h"
#include "mla.h"
#include "trace.h"

namespace opsmith::mla {
namespace {

using Optional = std::optional<Tensor>;

bool dense(const Tensor& t) { return t.dim() > 0 && (t.size(t.dim() - 1) < 2 || t.stride(t.dim() - 1) == 1); }

bool is_matrix(const Tensor& t) { return t.dim() == 2 && dense(t); }

void check_float(const char* name, DType dtype) {
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, "mla: ", name,
                  " must be floating-point");
}

void check_ids(const char* name, const Tensor& t, int64_t dims) {
  const DType dtype = dtype_of(t);
  STD_TORCH_CHECK(t.dim() == dims && (dtype == DType::i32 || dtype == DType::i64), "mla: ", name,
                  " must have ", dims, " dimension(s), in int32 or int64");
}

void check_vector(const char* name, const Optional& t, int64_t n) {
  STD_TORCH_CHECK(!t || (t->dim() == 1 && t->size(0) == n && dense(*t)), "mla: ", name,
                  " must be a contiguous vector of ", n);
}

void check_float_vector(const char* name, const Optional& t, int64_t n) {
  check_vector(name, t, n);
  if (t) check_float(name, dtype_of(*t));
}

void check_dtype(const char* name, const Tensor& t, DType dtype) {
  STD_TORCH_CHECK(dtype_of(t) == dtype, "mla: ", name, " has another dtype than this form takes");
}

Rotation rotation(const Optional& cos, const Optional& sin, bool interleaved, int64_t tokens, int64_t rope) {
  STD_TORCH_CHECK(bool(cos) == bool(sin), "mla: cos and sin belong together");
  if (cos) {
    for (const Tensor* t : {&*cos, &*sin}) {
      STD_TORCH_CHECK(is_matrix(*t) && t->size(0) == tokens &&
                          (t->size(1) == rope || 2 * t->size(1) == rope) && t->size(1) == cos->size(1) &&
                          rope % 2 == 0,
                      "mla: cos and sin must be [", tokens, ", ", rope, "] with a contiguous last dimension");
      check_float("cos and sin", dtype_of(*t));
    }
  }
  return {view_of(cos), view_of(sin), interleaved};
}

// The scales of int8 queries, one for each head.
View head_scales(const Optional& q_nope_scale, int64_t heads) {
  check_vector("q_nope_scale", q_nope_scale, heads);
  if (q_nope_scale) check_dtype("q_nope_scale", *q_nope_scale, DType::f32);
  return view_of(q_nope_scale);
}

float or_one(const char* name, const Optional& t) { return t ? number("mla", name, t) : 1.0f; }

// Where finished queries go: two tensors, or one whose rows hold both parts, as a joint cache has them.
class CheckedQueries {
 public:
  CheckedQueries(const char* op, const Tensor& wuk, const Tensor& q_out, const Optional& q_rope,
                 const Optional& q_nope_scale, int64_t tokens, int64_t rope, const Rotation& rotation)
      : sizes_{{tokens, wuk.size(0), wuk.size(2)}, {tokens, wuk.size(0), rope}},
        queries_{view_of(wuk), head_scales(q_nope_scale, wuk.size(0)), view_of(q_out),
                 view_of(q_rope ? *q_rope : q_out), rotation} {
    const DType dtype = dtype_of(wuk);
    const int64_t latent = sizes_[0][2];
    check_dtype("q_out", q_out, q_nope_scale ? DType::i8 : dtype);
    STD_TORCH_CHECK(q_rope || !q_nope_scale, op, ": int8 queries and their rope part are two tensors");
    const auto fits = [&](const Tensor& t, int64_t width) {
      return t.dim() == 3 && t.size(0) == tokens && t.size(1) == sizes_[0][1] && t.size(2) == width &&
             (width == 0 || dense(t));
    };
    if (q_rope) {
      check_dtype("q_rope", *q_rope, dtype);
      STD_TORCH_CHECK(fits(q_out, latent) && fits(*q_rope, rope), op,
                      ": q_out must be [T, H, kv_lora] and q_rope [T, H, rope]");
    } else {
      STD_TORCH_CHECK(fits(q_out, latent + rope), op,
                      ": q_out without q_rope must be [T, H, kv_lora + rope]");
      queries_.q_out.sizes = sizes_[0];
      queries_.q_rope.sizes = sizes_[1];
      queries_.q_rope.data = static_cast<char*>(queries_.q_rope.data) +
                             latent * (dtype == DType::f32 ? 4 : 2);
    }
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
  check_float_vector("gamma2", gamma2, kv_lora);
  const int64_t width = keys.rope_size;
  const bool tiled = keys.tiled;
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
  check_ids("slots", slots, 1);
  STD_TORCH_CHECK(slots.size(0) == tokens, "mla: a slot for each token");
  const int64_t end = latent.size(0) * size, bad = bad_slot(view_of(slots), end);
  STD_TORCH_CHECK(bad < 0, "mla: slot_mapping must lie in [0, ", end, ") or be -1; it does not for token ",
                  bad, "; nothing was written");
  keys.gamma2 = view_of(gamma2);
  keys.slots = view_of(slots);
  keys.latent = view_of(latent);
  keys.rope = view_of(rope);
  keys.ctkv_scale = or_one("ctkv_scale", ctkv_scale);
  return keys;
}

void kv_epilogue_op(const Tensor& a, const Tensor& gamma2, const Optional& cos, const Optional& sin,
                    const Tensor& slots, int64_t rope_size, bool interleaved, bool tiled, double eps,
                    const Optional& ctkv_scale, const Tensor& latent, const Optional& rope) {
  STD_TORCH_CHECK(
      is_matrix(a) && gamma2.dim() == 1 && rope_size >= 0 && a.size(1) >= gamma2.size(0) + rope_size,
      "mla_kv_epilogue: a must be [T, kv_lora + rope or more] with a contiguous last dimension");
  check_float("a", dtype_of(a));
  const Keys keys{.rotation = rotation(cos, sin, interleaved, a.size(0), rope_size),
                  .rope_size = rope_size,
                  .tiled = tiled,
                  .eps = float(eps)};
  kv_epilogue(view_of(a),
              checked(keys, dtype_of(a), a.size(0), gamma2.size(0), gamma2, slots, latent, rope, ctkv_scale));
}

void q_epilogue_op(const Tensor& q, const Tensor& wuk, const Optional& cos, const Optional& sin,
                   bool interleaved, const Optional& q_nope_scale, const Tensor& q_out,
                   const Optional& q_rope) {
  STD_TORCH_CHECK(q.dim() == 3 && dense(q) && wuk.dim() == 3 && wuk.is_contiguous() &&
                      q.size(1) == wuk.size(0) && q.size(2) >= wuk.size(1),
                  "mla_q_epilogue: q must be [T, H, nope + rope] and wuk [H, nope, kv_lora]");
  check_float("q", dtype_of(q));
  check_dtype("wuk", wuk, dtype_of(q));
  const int64_t tokens = q.size(0), rope = q.size(2) - wuk.size(1);
  const CheckedQueries queries("mla_q_epilogue", wuk, q_out, q_rope, q_nope_scale, tokens, rope,
                               rotation(cos, sin, interleaved, tokens, rope));
  q_epilogue(view_of(q), *queries);
}

Projection projection(const char* name, const Tensor& weight, const Optional& bias, const Optional& descale,
                      const Optional& scale, const Optional& offset, Quant quant, DType dtype,
                      int64_t depth) {
  const int64_t n = weight.size(0);
  check_dtype(name, weight, quant == Quant::none ? dtype : DType::i8);
  if (bias) {
    check_vector("bias", bias, n);
    check_dtype("bias", *bias, quant == Quant::per_tensor ? DType::i32 : dtype);
    STD_TORCH_CHECK(quant != Quant::per_token, "mla: no bias per token");
  }
  Projection p{view_of(weight), view_of(bias), view_of(descale)};
  if (quant == Quant::none) return p;
  STD_TORCH_CHECK(descale && dtype_of(*descale) == DType::f32, "mla: descale must be float32");
  if (quant == Quant::weight_int4) {
    const int64_t groups = descale->dim() == 2 ? descale->size(1) : 0, half = weight.size(1);
    STD_TORCH_CHECK(groups > 0 && descale->size(0) == n && descale->is_contiguous() && half % groups == 0 &&
                        half / groups % 16 == 0 && depth <= 2 * half && 2 * half <= (depth + 63) / 64 * 64,
                    "mla: descale must be [N, groups], and the weight [N, K / 2] with K in whole groups");
  } else {
    check_vector("descale", descale, n);
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
      is_matrix(x) && is_matrix(wdqkv) && is_matrix(wuq) && wuk.dim() == 3 && wuk.is_contiguous(),
      "mla_preprocess: x, wdqkv, wuq must be matrices and wuk 3-dimensional, dense in their last dimension");
  STD_TORCH_CHECK(0 <= quant && quant <= int64_t(Quant::weight_int4), "mla_preprocess: no form ", quant);
  const DType dtype = dtype_of(x);
  check_float("x", dtype);
  check_dtype("wuk", wuk, dtype);
  const int64_t tokens = x.size(0), hidden = x.size(1), heads = wuk.size(0), nope = wuk.size(1),
                kv_lora = wuk.size(2);
  STD_TORCH_CHECK(
      heads > 0 && nope > 0 && kv_lora > 0 && wuq.size(0) % heads == 0 && wuq.size(0) / heads >= nope,
      "mla_preprocess: wuq must have heads * (nope + rope) rows");
  const int64_t width = wuq.size(0) / heads - nope, inner = gamma1 ? wdqkv.size(0) - kv_lora - width : hidden;
  const bool packed = Quant(quant) == Quant::weight_int4;
  STD_TORCH_CHECK((packed || (wdqkv.size(1) == hidden && wuq.size(1) == inner)) && inner >= 0 &&
                      (gamma1 || wdqkv.size(0) == kv_lora + width),
                  "mla_preprocess: wdqkv and wuq do not fit x and each other");
  check_float_vector("gamma0", gamma0, hidden);
  check_float_vector("beta0", beta0, hidden);
  check_float_vector("gamma1", gamma1, inner);
  check_float_vector("beta1", beta1, inner);
  for (const Optional* t : {&cos, &sin}) {
    STD_TORCH_CHECK(!*t || dtype_of(**t) == dtype || dtype_of(**t) == DType::f32,
                    "mla_preprocess: cos and sin must be float32 or in x's dtype");
  }
  STD_TORCH_CHECK(!latent_q || (gamma1 && is_matrix(*latent_q) && latent_q->size(0) == tokens &&
                                latent_q->size(1) == inner && dtype_of(*latent_q) == dtype),
                  "mla_preprocess: latent_q must be [T, q_lora]");
  const Rotation turn = rotation(cos, sin, interleaved, tokens, width);
  const CheckedQueries queries("mla_preprocess", wuk, q_out, q_rope, q_nope_scale, tokens, width, turn);
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
  auto fits = [&](const Tensor& t, int64_t n, DType wanted) {
    return t.dim() == 4 && t.size(0) == latent.size(0) && t.size(1) == latent.size(1) &&
           t.size(2) * t.size(3) == n && dense(t) && dtype_of(t) == wanted;
  };
  STD_TORCH_CHECK(latent.dim() == 4 && bool(ctkv_scale) == bool(q_nope_scale) &&
                      fits(latent, q_nope.size(2), held) && fits(rope, q_rope.size(2), dtype),
                  "mla_attention: the cache does not fit the queries");
  check_ids("block_tables", tables, 2);
  check_ids("seq_lens", lens, 1);
  const int64_t sequences = lens.size(0), size = latent.size(1);
  STD_TORCH_CHECK(
      tables.size(0) == sequences && (sequences > 0 ? tokens % sequences == 0 : tokens == 0),
      "mla_attention: block_tables must be [S, n] and seq_lens [S], as many tokens for each of S");
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
  attention({.q_nope = view_of(q_nope),
             .q_rope = view_of(q_rope),
             .latent = view_of(latent),
             .rope = view_of(rope),
             .tables = view_of(tables),
             .lens = view_of(lens),
             .scale = float(scale),
             .ctkv_scale = or_one("ctkv_scale", ctkv_scale),
             .q_nope_scale = head_scales(q_nope_scale, heads),
             .wuv = view_of(wuv),
             .latent_out = view_of(latent_out),
             .out = view_of(out)});
}

// Where the tasks' times of MLA pre-processing are written. Returns how many tasks there were since tracing began; those that
// found no room are counted too.
int64_t trace_op(const Tensor& rows, bool on) {
  STD_TORCH_CHECK(
      rows.dim() == 2 && rows.size(1) == 4 && rows.is_contiguous() && dtype_of(rows) == DType::i64,
      "mla_trace: rows must be a contiguous int64 matrix of 4 columns");
  trace_state.rows.store(nullptr, std::memory_order_release);
  const int64_t used = trace_state.used.exchange(0);
  if (on) {
    trace_state.capacity = rows.size(0);
    trace_state.threads.store(0);
    trace_state.rows.store(static_cast<int64_t*>(rows.data_ptr()), std::memory_order_release);
  }
  return used;
}

}  // namespace
}  // namespace opsmith::mla

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  using namespace opsmith;
  offer(m, "mla_preprocess", kernel<&mla::preprocess_op>);
  offer(m, "mla_kv_epilogue", kernel<&mla::kv_epilogue_op>);
  offer(m, "mla_q_epilogue", kernel<&mla::q_epilogue_op>);
  offer(m, "mla_attention", kernel<&mla::attention_op>);
  offer(m, "mla_trace", kernel<&mla::trace_op>);
}
