// How the work of silu_mul is divided.
#pragma once

#include "tiling.h"

struct SiluMulTilingData {
  uint64_t rows;            // 1 where gate and up are tensors of their own, without gaps
  uint64_t columns;
  uint64_t stride;          // elements from one row of gate and up to the next
  uint32_t packed;          // up lies behind gate in the same row
  uint32_t blocks;
  uint32_t rowsPerTile;
  uint32_t columnsPerTile;
};

// Tiles are rows, or pieces of one, and each core takes a range of them.
//
// A tile of n elements needs local memory for
//     gate, up, y     3 queues x 2 buffers x n x elementBytes
//     float32 inside  16-bit tensors: 2 x n x 4 (gate, and up or the exponential); float32: 1 x n x 4
// so n = localBytes / (6 x elementBytes + 8 or 4), down to whole vectors of 64 float32: of 192 KiB
//     196608 / (6 x 2 + 8) = 9830 -> 9792 elements,   196608 / (6 x 4 + 4) = 7021 -> 6976 elements.
inline SiluMulTilingData SiluMulTiling(uint64_t rows, uint64_t columns, uint32_t packed,
                                       uint32_t elementBytes, opsmith::Platform platform) {
  using namespace opsmith;
  const uint64_t bytes = 6 * elementBytes + (elementBytes == 4 ? 4 : 8);
  const uint64_t room = AlignDown(platform.localBytes / bytes, kRepeatBytes / 4);
  const uint64_t padded = AlignUp(columns, kDataBlockBytes / elementBytes);
  SiluMulTilingData t{rows, columns, packed ? 2 * columns : columns, packed};
  if (rows > 1 && padded <= room) {  // whole rows
    const uint64_t share = CeilDiv(rows, platform.cores);
    t.columnsPerTile = uint32_t(columns);
    t.rowsPerTile = uint32_t(TileOf(share, Min(room / padded, 4095), padded * elementBytes));
  } else {  // pieces of a row, in 512 bytes
    const uint64_t unit = 512 / elementBytes, share = CeilDiv(columns, CeilDiv(platform.cores, rows));
    t.rowsPerTile = 1;
    t.columnsPerTile = uint32_t(unit * TileOf(CeilDiv(share, unit), room / unit, 512));
  }
  const uint64_t tiles = CeilDiv(rows, t.rowsPerTile) * CeilDiv(columns, t.columnsPerTile);
  t.blocks = uint32_t(Min(platform.cores, tiles));
  return t;
}
