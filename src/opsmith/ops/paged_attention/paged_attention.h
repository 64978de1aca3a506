// Attention of a few queries on keys and values in blocks, and what fills the blocks: what the bindings call.
#pragma once

#include "attention/attention.h"

namespace opsmith {

// Keys [blocks, block size, Hkv, D] and values [blocks, block size, Hkv, Dv]: float32, bfloat16 or float16; or int8, with
// float32 scales [blocks, block size, Hkv]. Any strides, the last dimension contiguous.
struct PagedCache {
  View keys, values, key_scale, value_scale;
  View table;  // [B, most blocks] int32 or int64: the blocks of a sequence; undefined: sequence b is block b
  View lengths;  // [B] int32 or int64: keys of a sequence; undefined: all of its block

  int64_t block_size() const { return keys.sizes[1]; }
  int64_t length(int64_t sequence) const {
    return lengths.defined() ? integer_at(lengths, sequence * lengths.strides[0]) : block_size();
  }
  int64_t block(int64_t sequence, int64_t i) const {
    return table.defined() ? integer_at(table, sequence * table.strides[0] + i * table.strides[1]) : sequence;
  }
};

// The first key that some of `queries` queries, the last of `length` positions, sees.
inline int64_t first_visible(int64_t length, int64_t queries, int64_t window) {
  const int64_t first = length - queries - window + 1;
  return window > 0 && first > 0 ? first : 0;
}

// q [B, L, H, D], out [B, L, H, Dv], any strides, the last dimension contiguous. Query i of L stands at position
// length - L + i and sees the keys up to it, causal or not. Lengths and blocks are the binding's to check.
void paged_attention(const View& q, const PagedCache& cache, const AttentionOptions& options,
                     const View& out);

// k [B, L, Hkv, D] and v [B, L, Hkv, Dv] to their slots [B * L], block * block size + place in it; none at -1. The cache's table and
// lengths are not used; slots are the binding's to check.
void reshape_and_cache(const View& k, const View& v, const View& slots, const PagedCache& cache);

}  // namespace opsmith
