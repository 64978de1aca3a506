// How rms_norm and layer_norm divide their rows.
#pragma once

#include "tiling.h"

struct NormTilingData {
  uint64_t rows;
  uint32_t columns;
  uint32_t blocks;
  uint32_t rowsPerTile;
  uint32_t columnsPerTile;  // less than columns where a row does not fit local memory: it is then read twice
  uint32_t buffers;  // of the queues for x and residual, and for y and their sum
  uint32_t residual, weight, bias, roundBeforeWeight;
  float eps, weightOffset;
  float unused;
};

namespace opsmith {

constexpr uint32_t kNormStatistics = 4096;  // bytes: numbers of rows, and a data block of each
constexpr uint32_t kNormMaxRows = 64;  // of a tile: their numbers fit one vector

// A tile of n elements, of rows of p padded columns, needs local memory for
//     x, residual     `buffers` x n x elementBytes, one queue: 2 buffers, 4 with a residual where they fit
//     y, sum          the same again
//     float32 inside  16-bit tensors: 2 x n x 4 (the row, and its squares or the weight); float32: 1 x n x 4
//     weight, bias    p x weightBytes each, read once a core
//     lanes           256 for each row, to fold it into
//     statistics      4096, and 512 to round up
// For bfloat16 rows with a weight, 192 KiB hold (196608 - 4608 - 256) / (2 x 2 x 2 + 8 + 2) = 10652 columns; longer rows
// are cut: their weights are read with each piece, into 2 buffers.
inline NormTilingData TileNorm(uint64_t rows, uint32_t columns, uint32_t elementBytes, uint32_t weightBytes,
                               uint32_t residual, uint32_t weight, uint32_t bias, Platform platform) {
  NormTilingData t{};
  t.rows = rows;
  t.columns = columns;
  t.residual = residual, t.weight = weight, t.bias = bias;
  const uint64_t padded = AlignUp(columns, kDataBlockBytes / elementBytes);
  const uint64_t inside = elementBytes == 4 ? 4 : 8, vectors = (weight + bias) * weightBytes;
  const uint64_t local = platform.localBytes - kNormStatistics - 512;
  for (t.buffers = residual ? 4 : 2; t.buffers >= 2; t.buffers -= 2) {
    const uint64_t forVectors = (weight + bias) * AlignUp(columns * weightBytes, kDataBlockBytes);
    const uint64_t row = padded * (2 * t.buffers * elementBytes + inside) + 256;
    const uint64_t fit = local > forVectors ? (local - forVectors) / row : 0;
    if (fit) {
      t.columnsPerTile = columns;
      const uint64_t share = CeilDiv(rows, platform.cores);
      t.rowsPerTile = uint32_t(TileOf(share, Min(fit, kNormMaxRows), padded * elementBytes));
      break;
    }
  }
  if (!t.columnsPerTile) {
    t.buffers = 2;
    t.rowsPerTile = 1;
    const uint64_t most = (local - 256) / (4 * elementBytes + inside + (vectors ? 2 * weightBytes : 0));
    t.columnsPerTile = uint32_t(AlignDown(most, kRepeatBytes / 4));
  }
  t.blocks = uint32_t(Min(platform.cores, CeilDiv(rows, t.rowsPerTile)));
  return t;
}

}  // namespace opsmith
