// What MLA does to the rows of a token between its matmuls: rotation and, of the keys, the way into the cache.
#pragma once

#include "mla.h"
#include "rms_norm/quantized_row.h"
#include "rope_row.h"

namespace opsmith {

// Rotates `n` floats of one token into T, or copies them where there is no table. `row` holds 2 n floats of the table.
template <class T>
inline void mla_rotate(const float* x, int64_t n, const MlaRotation& rotation, const float* row, T* to) {
  if (!rotation.cos.defined()) {
    for_lanes(n, [&](int64_t i, auto k) { store(to + i, load(x + i, k), k); });
    return;
  }
  const int64_t half = n / 2;
  const TableRow<float> t{row, row + n, row + half, row + n + half};
  if (rotation.interleaved) {
    rotate_row<true, false, 1>(x, 0, to, 0, t, half, false, 0);
  } else {
    rotate_row<false, false, 1>(x, 0, to, 0, t, half, false, 0);
  }
}

// The row of the table of token t: n cosines, then n sines; what is half as wide serves both of a pair.
inline void mla_table_row(const MlaRotation& rotation, int64_t t, int64_t n, float* row) {
  if (!rotation.cos.defined() || n == 0) return;
  const int64_t width = rotation.cos.sizes[1];
  for (const View* v : {&rotation.cos, &rotation.sin}) {
    read_floats(*v, t * v->strides[0], width, row);
    if (width < n) std::memcpy(row + width, row, size_t(width) * sizeof(float));
    row += n;
  }
}

inline int64_t mla_slot(const View& slots, int64_t t) {
  const int64_t at = t * slots.strides[0];
  return slots.dtype == DType::i32 ? slots.as<int32_t>()[at] : slots.as<int64_t>()[at];
}

// n numbers of a token to their place in one tensor of the cache.
template <class S>
inline void mla_place(const View& v, bool tiled, int64_t slot, int64_t begin, int64_t n, const S* from) {
  const int64_t size = v.sizes[tiled ? 2 : 1], block = slot / size, offset = slot % size;
  S* const base = v.as<S>() + block * v.strides[0];
  if (!tiled) {
    std::memcpy(base + offset * v.sizes[3] + begin, from, size_t(n) * sizeof(S));
    return;
  }
  const int64_t tile = v.sizes[3];
  for (int64_t i = 0; i < n; i += tile) {
    std::memcpy(base + (i / tile * size + offset) * tile, from + i, size_t(tile) * sizeof(S));
  }
}

// The keys of token t, of a row that begins with [ckv | k_pe]. `memory` holds 2 kv_lora + 4 rope floats.
template <class T>
inline void mla_write_key(const T* a, int64_t kv_lora, int64_t rope, const float* gamma2,
                          const MlaRotation& rotation, int64_t t, int64_t slot, float eps,
                          const MlaCacheView& cache, float* memory) {
  if (slot < 0) return;
  float *const norm = memory, *const table = memory + kv_lora, *const turned = table + 2 * rope;
  T* const key = reinterpret_cast<T*>(turned + rope);
  norm_row(a, kv_lora, gamma2, nullptr, eps, norm);
  if (cache.latent.dtype == DType::i8) {
    int8_t* const q = reinterpret_cast<int8_t*>(key);
    for_lanes(kv_lora, [&](int64_t i, auto k) { store_q8(q + i, load(norm + i, k) / cache.ctkv_scale, k); });
    mla_place(cache.latent, cache.tiled, slot, 0, kv_lora, q);
  } else {
    for_lanes(kv_lora, [&](int64_t i, auto k) { store(key + i, load(norm + i, k), k); });
    mla_place(cache.latent, cache.tiled, slot, 0, kv_lora, key);
  }
  if (rope == 0) return;
  mla_table_row(rotation, t, rope, table);
  for_lanes(rope, [&](int64_t i, auto k) { store(turned + i, load(a + kv_lora + i, k), k); });
  mla_rotate(turned, rope, rotation, table, key);
  if (cache.rope.defined()) {
    mla_place(cache.rope, cache.tiled, slot, 0, rope, key);
  } else {
    mla_place(cache.latent, false, slot, kv_lora, rope, key);
  }
}

inline int64_t mla_key_memory(int64_t kv_lora, int64_t rope) { return 2 * kv_lora + 4 * rope + 4 * W; }

}  // namespace opsmith
