// How rope divides its tokens and heads.
#pragma once

#include "tiling.h"

struct RopeTilingData {
  uint64_t batchStride, headStride, tokenStride;  // elements of x and y
  uint64_t tableStride, positionStride;  // elements from a batch's table, or positions, to the next; or 0
  uint32_t batches, heads, tokens;
  uint32_t width, dims;  // of a head: all dimensions, and those that are rotated
  uint32_t tableWidth;  // dims, or dims / 2 where a pair has one column
  uint32_t interleaved, positions;
  uint32_t rowsPerTile;  // tokens of one head, or heads of one token
  uint32_t headRows;  // 1: heads of one token, which lie side by side and share a row of the table
  uint32_t groups;  // of heads: parts of the work that read the same rows of the table
  uint32_t blocks;
};

namespace opsmith {

// Elements that a row takes in local memory, where halves and what is not rotated begin data blocks of their own.
constexpr uint64_t RopeRow(uint64_t width, uint64_t dims, uint64_t elementBytes) {
  const uint64_t block = kDataBlockBytes / elementBytes;
  return 2 * AlignUp(CeilDiv(dims, 2), block) + AlignUp(width - dims, block);
}

}  // namespace opsmith

// A tile of r rows of e padded elements, with t padded columns of the tables, needs local memory for
//     x, y            2 queues x 2 buffers x r x e x elementBytes
//     float32 inside  products, and of 16-bit tensors the row: r x e x 4 or 8; with the queues 20 bytes of float32, else 16
//     cos, sin        2 tensors x 2 buffers x t x tableBytes and 3 x t x 4 for each row, or once for heads of a token
//     interleaved     3 x e x 4: which element is whose partner
// so for bfloat16 heads of 128 with tables in float32, r = (196608 - 512) / (128 x 16 + 128 x 28) = 34 tokens, and of
// heads that share a token's row of the tables r = (196608 - 512 - 128 x 28) / (128 x 16) = 93.
inline RopeTilingData RopeTiling(uint32_t batches, uint32_t heads, uint32_t tokens, uint32_t width,
                                 uint32_t dims, uint32_t tableWidth, uint64_t batchStride,
                                 uint64_t headStride, uint64_t tokenStride, uint64_t tableStride,
                                 uint64_t positionStride, uint32_t interleaved, uint32_t positions,
                                 uint32_t elementBytes, uint32_t tableBytes, opsmith::Platform platform) {
  using namespace opsmith;
  RopeTilingData t{};
  t.batches = batches, t.heads = heads, t.tokens = tokens, t.width = width, t.dims = dims;
  t.tableWidth = tableWidth;
  t.batchStride = batchStride, t.headStride = headStride, t.tokenStride = tokenStride;
  t.tableStride = tableStride, t.positionStride = positionStride;
  t.interleaved = interleaved, t.positions = positions;
  t.headRows = tokens == 1 || headStride < tokenStride;
  const uint64_t e = RopeRow(width, dims, elementBytes);
  const uint64_t table = Max(RopeRow(dims, dims, tableBytes), RopeRow(dims, dims, elementBytes));
  const uint64_t local = platform.localBytes - (interleaved ? 12 * e : 0) - 512;
  const uint64_t element = elementBytes == 4 ? 20 : 16, tables = (4 * tableBytes + 12) * table;
  const uint64_t units = uint64_t(batches) * tokens;  // with a row of the table each
  const uint64_t fit = t.headRows ? (local - tables) / (element * e) : local / (element * e + tables);
  const uint64_t most = Min(fit, 255);  // repeats of an instruction
  if (t.headRows) {
    t.groups = uint32_t(Min(heads, CeilDiv(platform.cores, units)));
    t.rowsPerTile = uint32_t(Min(most, CeilDiv(heads, t.groups)));
    t.blocks = uint32_t(Min(platform.cores, units * t.groups));
  } else {
    t.rowsPerTile = uint32_t(Max(1, Min(most, CeilDiv(units, platform.cores))));
    const uint64_t tiles = batches * CeilDiv(tokens, t.rowsPerTile);
    t.groups = uint32_t(Min(heads, CeilDiv(platform.cores, tiles)));
    t.blocks = uint32_t(Min(platform.cores, tiles * t.groups));
  }
  return t;
}
