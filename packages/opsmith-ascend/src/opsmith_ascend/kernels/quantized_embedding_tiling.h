// How the work of quantized_embedding is divided.
#pragma once

#include "tiling.h"

struct QuantizedEmbeddingTilingData {
  uint64_t tokens;
  uint64_t columns;
  uint64_t stride;       // elements from one row of the table to the next
  uint64_t scaleStride;  // and from one scale to the next
  uint32_t blocks;
  uint32_t tokensPerTile;
  uint32_t columnsPerTile;
  uint32_t pitch;  // of a row in local memory
};

// Tiles are tokens times columns of the table, all columns where they fit, and each core takes a range of tiles. For p
// elements of pitch (columns, up to a multiple of 32), a token of a tile takes
//     row      2 buffers x p x 1
//     y        2 buffers x p x elementBytes
//     scale    2 buffers x 32: a data block of its own for each, as it is fetched alone
//     float32  p x 4, and half precision, through which int8 becomes float32, p x 2
//     its scale, spread over a data block: 32; its id: 8
// so t = (localBytes - 1024) / (p x (2 + 2 x elementBytes + 6) + 104), with 1024 to round up and for the last scale: of
// 192 KiB, for 512 columns to bfloat16, 195584 / (512 x 12 + 104) = 31 tokens.
inline QuantizedEmbeddingTilingData QuantizedEmbeddingTiling(uint64_t tokens, uint64_t columns,
                                                             uint64_t stride, uint64_t scaleStride,
                                                             uint32_t elementBytes,
                                                             opsmith::Platform platform) {
  using namespace opsmith;
  QuantizedEmbeddingTilingData t{tokens, columns, stride, scaleStride};
  const uint64_t bytes = 8 + 2 * elementBytes, local = platform.localBytes - 1024;
  const uint64_t most = AlignDown((local - 104) / bytes, 512);  // a piece of a row that is too long
  t.columnsPerTile = uint32_t(Min(columns, most));
  t.pitch = uint32_t(AlignUp(t.columnsPerTile, 32));
  t.tokensPerTile = uint32_t(
      Max(1, Min(Min(local / (t.pitch * bytes + 104), 248), CeilDiv(tokens, platform.cores))));
  const uint64_t tiles = CeilDiv(tokens, t.tokensPerTile) * CeilDiv(columns, t.columnsPerTile);
  t.blocks = uint32_t(Min(platform.cores, tiles));
  return t;
}
