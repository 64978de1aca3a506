// Multi-head latent attention. Shapes and dtypes are the operators' contracts (ops/mla/*.py); an undefined View is None.
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith::mla {

enum class Quant { none, per_tensor, per_token, weight_int8, weight_int4 };

// A projection [N, K] of y: in x's dtype, or int8 with a float32 `descale` for each row of it. In weight_int4 two numbers a
// byte, 8 added to each, the even one in the low bits: [N, K / 2], K padded to whole groups, and descale [N, groups].
struct Projection {
  View weight, bias, descale;
  float scale = 1.0f, offset = 0.0f;  // of the activations, per tensor
};

struct Rotation {
  View cos, sin;  // [T, rope or rope / 2], or undefined
  bool interleaved = false;
};

// Where keys go, and what is done to them on the way: the latent rows [B, bs, 1, n], or in tiles [B, n / tile, bs, tile]; rope
// undefined: behind the latent in its rows.
struct Keys {
  View gamma2, slots;
  Rotation rotation;
  View latent, rope;
  int64_t rope_size = 0;
  bool tiled = false;
  float eps = 0, ctkv_scale = 1.0f;  // which int8 rows are divided by
};

// Where queries go, [T, H, kv_lora] and [T, H, rope], and what is done to them on the way; q_out int8 with q_nope_scale [H].
struct Queries {
  View wuk, q_nope_scale, q_out, q_rope;
  Rotation rotation;
  bool streaming = false;  // q_out past the cache; a fence is due at the end
};

struct PreprocessCall {
  View x, gamma0, beta0, gamma1, beta1;
  Projection down, up;
  Quant quant = Quant::none;
  Keys keys;
  Queries queries;
  View latent_q;
  float eps = 0;
  int64_t first = 0, tokens = 0;  // those of a region
};

// Of any number of tokens, as many at a time as keep their activations in cache: a region reads every weight once.
void preprocess(PreprocessCall call);

// Of those, what follows each projection: a [T, kv_lora + rope or more] into the cache, q [T, H, nope + rope] into the latent space.
void kv_epilogue(View a, const Keys& keys);
void q_epilogue(View q, const Queries& queries);

struct AttentionCall {
  View q_nope, q_rope;  // [T, H, kv_lora], int8 with q_nope_scale [H]; [T, H, rope]
  View latent, rope;  // [B, bs, n / tile, tile], of any strides but the last
  View tables, lens;  // [S, n], [S]
  float scale = 1, ctkv_scale = 1;
  View q_nope_scale, wuv;
  View latent_out, out;  // [T, H, kv_lora]; with wuv [T, H, v]
};

void attention(const AttentionCall& call);

}  // namespace opsmith::mla
