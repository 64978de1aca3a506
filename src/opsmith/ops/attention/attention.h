// Attention: what the bindings call.
//
// q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], out [B, H, L, Dv]; mask boolean (true: attend) or additive
// [B, H, L, S], or undefined; row_sums float32 [B, H, L, 2], or undefined: what each row's weights are made with again,
// the score that their exponents count from and their sum; any strides, the last dimension of all but the mask
// contiguous. Query i stands at key position i + S - L, from which ALiBi counts. Packed sequences are one batch whose L and
// S are all their tokens.
#pragma once

#include "types.h"

namespace opsmith {

struct AttentionOptions {
  float scale;
  bool causal;
  int64_t window;  // keys at a distance below it are visible; 0 or less: all
  float softcap;  // 0 or less: none
  View sinks, alibi;  // a number for each query head, or undefined

  float sink(int64_t head) const { return of_head(sinks, head); }
  float alibi_slope(int64_t head) const { return of_head(alibi, head); }

 private:
  static float of_head(const View& x, int64_t head) {
    const int64_t at = head * x.strides[0];
    if (x.dtype == DType::f32) return x.as<float>()[at];
    return x.dtype == DType::bf16 ? to_float(x.as<bfloat16>()[at]) : to_float(x.as<float16>()[at]);
  }
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
  View dsinks;  // as the sinks are, or undefined
};

void attention(const AttentionCall& call);
void attention_backward(const AttentionCall& call, const AttentionGradients& gradients);

}  // namespace opsmith
