// What MLA does to the rows of a token between its matmuls: rotation and, of the keys, the way into the cache.
#pragma once

#include "mla.h"
#include "rms_norm/quantized_row.h"
#include "rope_row.h"

namespace opsmith::mla {

// Rotates `n` floats of one token into T, or copies them where there is no table. `row` holds 2 n floats of the table.
template <class T>
inline void rotate(const float* x, int64_t n, const Rotation& rotation, const float* row, T* to) {
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
inline void table_row(const Rotation& rotation, int64_t t, int64_t n, float* row) {
  if (!rotation.cos.defined() || n == 0) return;
  const int64_t width = rotation.cos.sizes[1];
  for (const View* v : {&rotation.cos, &rotation.sin}) {
    read_floats(*v, t * v->strides[0], width, row);
    if (width < n) std::memcpy(row + width, row, size_t(width) * sizeof(float));
    row += n;
  }
}

// n numbers of a token to their place in one tensor of the cache.
template <class S>
inline void place(const View& v, bool tiled, int64_t slot, int64_t begin, int64_t n, const S* from) {
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

// Writes keys, of rows that begin with [ckv | k_pe]. `memory` holds as many floats as it says.
class KeyWriter {
 public:
  explicit KeyWriter(const Keys& keys)
      : c_(keys), gamma2_(keys.gamma2), latent_(keys.gamma2.sizes[0]), rope_(keys.rope_size) {}

  int64_t memory() const { return 2 * latent_ + 4 * rope_ + 4 * W; }

  // The key of token t.
  template <class T>
  void write(const T* a, int64_t t, float* memory) const {
    const int64_t slot = integer_at(c_.slots, t * c_.slots.strides[0]);
    if (slot < 0) return;
    float *const norm = memory, *const table = memory + latent_, *const turned = table + 2 * rope_;
    T* const key = reinterpret_cast<T*>(turned + rope_);
    norm_row(a, latent_, gamma2_.data(), nullptr, c_.eps, norm);
    if (c_.latent.dtype == DType::i8) {
      int8_t* const q = reinterpret_cast<int8_t*>(key);
      quantize_row(norm, latent_, c_.ctkv_scale, 0.0f, q);
      place(c_.latent, c_.tiled, slot, 0, latent_, q);
    } else {
      for_lanes(latent_, [&](int64_t i, auto k) { store(key + i, load(norm + i, k), k); });
      place(c_.latent, c_.tiled, slot, 0, latent_, key);
    }
    if (rope_ == 0) return;
    table_row(c_.rotation, t, rope_, table);
    for_lanes(rope_, [&](int64_t i, auto k) { store(turned + i, load(a + latent_ + i, k), k); });
    rotate(turned, rope_, c_.rotation, table, key);
    if (c_.rope.defined()) {
      place(c_.rope, c_.tiled, slot, 0, rope_, key);
    } else {
      place(c_.latent, false, slot, latent_, rope_, key);
    }
  }

 private:
  const Keys& c_;
  const FloatVector gamma2_;
  const int64_t latent_, rope_;
};

}  // namespace opsmith::mla
