// Attention: what the binding calls.
//
// q [B, H, L, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], out [B, H, L, Dv]; mask boolean (true: attend) or additive
// [B, H, L, S], or undefined; row_sums float32 [B, H, L, 2], or undefined: what each row's weights are made with again,
// the score that their exponents count from and their sum; any strides, the last dimension of all but the mask
// contiguous. Query i stands at key position i + S - L.
#pragma once

#include "types.h"

namespace opsmith {

struct AttentionOptions {
  float scale;
  bool causal;
  int64_t window;  // keys at a distance below it are visible; 0 or less: all
  float softcap;  // 0 or less: none
};

void attention(const View& q, const View& k, const View& v, const View& mask, const AttentionOptions& options,
               const View& out, const View& row_sums);

void attention_backward(const View& dout, const View& q, const View& k, const View& v, const View& out,
                        const View& row_sums, const View& mask, const AttentionOptions& options,
                        const View& dq, const View& dk, const View& dv);

// Where the sequences of packed tensors begin: two lists of count + 1 offsets, from 0 to the length, not decreasing.
struct Sequences {
  int64_t count;
  View query_starts, key_starts;  // int32 or int64

  int64_t query(int64_t i) const { return at(query_starts, i); }
  int64_t key(int64_t i) const { return at(key_starts, i); }
  int64_t queries(int64_t i) const { return query(i + 1) - query(i); }
  int64_t keys(int64_t i) const { return key(i + 1) - key(i); }

  static int64_t at(const View& x, int64_t i) {
    i *= x.strides[0];
    return x.dtype == DType::i32 ? x.as<int32_t>()[i] : x.as<int64_t>()[i];
  }
};

// Packed: q [T, H, D], k [S, Hkv, D], v [S, Hkv, Dv], out [T, H, Dv], row_sums [T, H, 2].
void attention_varlen(const View& q, const View& k, const View& v, const Sequences& sequences,
                      const AttentionOptions& options, const View& out, const View& row_sums);

void attention_varlen_backward(const View& dout, const View& q, const View& k, const View& v, const View& out,
                               const View& row_sums, const Sequences& sequences,
                               const AttentionOptions& options, const View& dq, const View& dk,
                               const View& dv);

}  // namespace opsmith
