// Rotary embedding. Shapes and dtypes are the operator's contract (ops/rope).
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith {

struct Rotation {
  int64_t dims;      // of a head that are rotated, the first ones; even
  bool interleaved;  // pairs are neighbors; else the two halves of the rotated dimensions
  bool inverse;      // the transposed rotation: the backward pass
};

// x and more [B, H, L, D] or [T, H, D], `more` with a number of heads of its own; y and more_y like them, or them.
// cos, sin [rows, dims or dims / 2] or [B or 1, L, ...]; positions [L] or [B or 1, L], or undefined: 0, 1, 2, ...
// Last dimensions are contiguous.
void rope(View x, View more, View cos, View sin, View positions, Rotation rotation, View y, View more_y);

// x, y int8 as above; scale, y_scale float32, a number for each row.
void rope_int8(View x, View scale, View cos, View sin, View positions, Rotation rotation, View y,
               View y_scale);

// x [M, K] times a packed weight [H D + 2 Hkv D, K] (linear.h): q [B, H, L, D], k and v [B, Hkv, L, D] with M = B L, or
// [T, H, D] with M = T; q and k rotated. Heads take `linear_rope_group(D)` panels at a time, kMostGroup at most.
constexpr int64_t kMostGroup = 8;
int64_t linear_rope_group(int64_t head_dim);
void linear_rope(View x, View packed, View bias, View cos, View sin, View positions, Rotation rotation,
                 View q, View k, View v);

inline int64_t position_at(const View& positions, int64_t batch, int64_t token) {
  const int64_t of_batch = positions.dim == 2 && positions.sizes[0] > 1 ? batch * positions.strides[0] : 0;
  return integer_at(positions, of_batch + token * positions.strides[positions.dim - 1]);
}

}  // namespace opsmith
