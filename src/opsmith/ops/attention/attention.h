// Attention: what the bindings call.
//
// q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], out [B, H, L, Dv]; mask boolean (true: attend) or additive
// [B, H, L, S], or undefined; row_sums float32 [B, H, L, 2], or undefined: what each row's weights are made with again,
// the score that their exponents count from and their sum; any strides, the last dimension of all but the mask
// contiguous. Query i stands at key position i + S - L. Packed sequences are one batch whose L and S are all their tokens.
#pragma once

#include "types.h"

namespace opsmith {

struct AttentionOptions {
  float scale;
  bool causal;
  int64_t window;  // keys at a distance below it are visible; 0 or less: all
  float softcap;  // 0 or less: none
};

// Where packed sequences begin: two lists of count + 1 offsets, from 0 to the length, not decreasing.
struct Sequences {
  View query_starts, key_starts;  // int32 or int64; undefined: the tensors are not packed

  bool defined() const { return query_starts.defined(); }
  int64_t count() const { return query_starts.sizes[0] - 1; }
  int64_t query(int64_t i) const { return integer_at(query_starts, i * query_starts.strides[0]); }
  int64_t key(int64_t i) const { return integer_at(key_starts, i * key_starts.strides[0]); }
};

struct AttentionCall {
  View q, k, v, mask;
  Sequences sequences;
  AttentionOptions options;
  View out, row_sums;
};

struct AttentionGradients {
  View dout, dq, dk, dv;
};

void attention(const AttentionCall& call);
void attention_backward(const AttentionCall& call, const AttentionGradients& gradients);

}  // namespace opsmith
