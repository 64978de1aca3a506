// How the work of rms_norm_quant is divided.
#pragma once

#include "tiling.h"

struct RmsNormQuantTilingData {
  uint64_t rows;
  uint64_t stride;  // elements from one row of x to the next
  uint32_t columns;
  uint32_t normalize, bias;
  uint32_t fixed;  // one scale for all rows: scale and offset are given
  float eps;
  uint32_t pitch;  // of a row in local memory
  uint32_t blocks;
  uint32_t rowsPerTile;
};

// Tiles are whole rows, and each core takes a range of them. For p elements of pitch (columns, up to a multiple of 32)
// and of r rows a tile, local memory holds
//     x            2 buffers x r x p x elementBytes
//     q            2 buffers x r x p x 1
//     float32      r x p x 4 for the values, as many for their squares
//     weight, bias p x 4 each
//     a row's own  64 x 4 for its lanes, 32 for its number spread, 5 x 4 for numbers: 308
//     of all       p / 64 x 4 to reduce, and less than 1024 to round up
// so r = (localBytes - 1024 - p x (8 + 1/16)) / (p x (2 x elementBytes + 10) + 308): with 7168 columns of bfloat16 in
// 192 KiB, (196608 - 1024 - 57792) / 100660 = 1 row; with 512, (196608 - 1024 - 4128) / 7476 = 25.
inline RmsNormQuantTilingData RmsNormQuantTiling(uint64_t rows, uint64_t columns, uint64_t stride,
                                                 uint32_t elementBytes, uint32_t normalize, uint32_t bias,
                                                 uint32_t fixed, float eps, opsmith::Platform platform) {
  using namespace opsmith;
  RmsNormQuantTilingData t{rows, stride, uint32_t(columns), normalize, bias, fixed, eps};
  t.pitch = uint32_t(AlignUp(columns, 32));
  const uint64_t kept = 1024 + t.pitch * 8 + t.pitch / 16;
  if (kept >= platform.localBytes) return t;  // no blocks: a row is too long for local memory
  const uint64_t room = (platform.localBytes - kept) / (t.pitch * (2 * elementBytes + 10) + 308);
  if (room == 0) return t;
  t.rowsPerTile = uint32_t(Min(Min(room, 248), CeilDiv(rows, platform.cores)));  // a repeat a row: 255 at most
  t.blocks = uint32_t(Min(platform.cores, CeilDiv(rows, t.rowsPerTile)));
  return t;
}
