// Attention: what the binding calls.
//
// q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], out [B, H, L, Dv]; mask boolean (true: attend) or additive
// [B, H, L, S], or undefined; lse float32 [B, H, L], or [B, H, L, 2] where the second number is what rounding the
// first one lost, or undefined; any strides, the last dimension of all but the mask contiguous. Query i stands at
// key position i + S - L.
#pragma once

#include "types.h"

namespace opsmith {

struct AttentionOptions {
  float scale;
  bool causal;
  int64_t window;  // keys at a distance below it are visible; 0 or less: all
  float softcap;   // 0 or less: none
};

void attention(const View& q, const View& k, const View& v, const View& mask, const AttentionOptions& options,
               const View& out, const View& lse);

void attention_backward(const View& dout, const View& q, const View& k, const View& v, const View& out,
                        const View& lse, const View& mask, const AttentionOptions& options, const View& dq,
                        const View& dk, const View& dv);

}  // namespace opsmith
