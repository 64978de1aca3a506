// MLA pre-processing. Shapes and dtypes are the operator's contract (ops/mla/preprocess.py); an undefined View is None.
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith {

enum class MlaQuant { none, per_tensor, per_token, weight_int8, weight_int4 };

// A projection [N, K] of y: in x's dtype, or int8 with a float32 `descale` for each row of it. In weight_int4 two numbers a
// byte, 8 added to each, the even one in the low bits: [N, K / 2], K padded to whole groups, and descale [N, groups].
struct MlaProjection {
  View weight, bias, descale;
  float scale = 1.0f, offset = 0.0f;  // of the activations, per tensor
};

// The latent rows [B, bs, 1, n], or in tiles [B, n / tile, bs, tile]; rope undefined: behind the latent in its rows.
struct MlaCacheView {
  View latent, rope;
  bool tiled = false;
  float ctkv_scale = 1.0f;  // that int8 rows are divided by
};

struct MlaRotation {
  View cos, sin;  // [T, rope or rope / 2], or undefined
  bool interleaved = false;
};

// The first slot that is neither -1 nor in [0, end), or -1.
int64_t mla_bad_slot(View slots, int64_t end);

// a [T, kv_lora + rope or more]: the keys go into the cache.
void mla_kv_epilogue(View a, View gamma2, MlaRotation rotation, View slots, int64_t rope, float eps,
                     MlaCacheView cache);

struct MlaCall {
  View x, gamma0, beta0, gamma1, beta1, gamma2, wuk;
  MlaProjection down, up;
  MlaQuant quant = MlaQuant::none;
  MlaRotation rotation;
  View slots, q_nope_scale;
  float eps = 0;
  MlaCacheView cache;
  View q_out, q_rope, latent_q;  // q_out int8 with q_nope_scale
};

// For as many tokens as keep their activations in cache: every weight is read once, by one thread.
void mla_preprocess(const MlaCall& call);

// q [T, H, nope + rope]: absorbed into the latent space, and rotated.
void mla_q_epilogue(View q, View wuk, MlaRotation rotation, View q_nope_scale, View q_out, View q_rope);

struct MlaAttentionCall {
  View q_nope, q_rope;  // [T, H, kv_lora], int8 with q_nope_scale [H]; [T, H, rope]
  View latent, rope;  // [B, bs, n / tile, tile], of any strides but the last
  View tables, lens;  // [S, n], [S]
  float scale = 1, ctkv_scale = 1;
  View q_nope_scale, wuv;
  View latent_out, out;  // [T, H, kv_lora]; with wuv [T, H, v]
};

void mla_attention(const MlaAttentionCall& call);

}  // namespace opsmith
