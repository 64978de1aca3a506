// How softmax divides its rows.
#pragma once

#include "tiling.h"

struct SoftmaxTilingData {
  uint64_t rows;
  uint64_t inner, middle;  // row r is row r % inner of matrix r / inner, and that is matrix % middle
  uint64_t maskOuter, maskMiddle,
      maskInner;  // elements of the mask from one of each to the next; 0: the same
  uint32_t columns;
  uint32_t blocks;
  uint32_t rowsPerTile;
  uint32_t columnsPerTile;  // less than columns where a row does not fit local memory: it is then read twice
  uint32_t mask, causal, fast;
  float scale;
};

namespace opsmith {

constexpr uint32_t kSoftmaxStatistics = 4096;  // bytes: numbers of rows, and a data block of each
constexpr uint32_t kSoftmaxMaxRows = 64;  // of a tile: their numbers fit one vector

}  // namespace opsmith

// A tile of n elements, of rows of p padded columns, needs local memory for
//     x, mask         2 buffers x n x elementBytes, 4 with a mask
//     y               2 buffers x n x elementBytes
//     float32 inside  16-bit tensors: n x 4, and n x 4 more with a mask; float32: none
//     causal          2 x p x 4: the columns' numbers, and which of them a row sees
//     lanes           256 for each row, to fold it into
//     statistics      4096, and 512 to round up
// For bfloat16 without a mask, 192 KiB hold (196608 - 4608 - 256) / (2 x 2 x 2 + 4) = 15978 columns; longer rows are cut.
inline SoftmaxTilingData SoftmaxTiling(uint64_t rows, uint64_t middle, uint64_t inner, uint32_t columns,
                                       uint32_t elementBytes, uint32_t mask, uint64_t maskOuter,
                                       uint64_t maskMiddle, uint64_t maskInner, uint32_t causal,
                                       uint32_t fast, float scale, opsmith::Platform platform) {
  using namespace opsmith;
  SoftmaxTilingData t{};
  t.rows = rows, t.middle = middle, t.inner = inner, t.columns = columns;
  t.mask = mask, t.maskOuter = maskOuter, t.maskMiddle = maskMiddle, t.maskInner = maskInner;
  t.causal = causal, t.fast = fast, t.scale = scale;
  const uint64_t padded = AlignUp(columns, kDataBlockBytes / elementBytes);
  const uint64_t element = (mask ? 6 : 4) * elementBytes + (elementBytes == 4 ? 0 : mask ? 8 : 4);
  const uint64_t local = platform.localBytes - kSoftmaxStatistics - 512, forColumns = causal ? 8 * padded : 0;
  const uint64_t fit = local > forColumns ? (local - forColumns) / (padded * element + 256) : 0;
  if (fit) {
    t.columnsPerTile = columns;
    const uint64_t share = CeilDiv(rows, platform.cores);
    t.rowsPerTile = uint32_t(TileOf(share, Min(fit, kSoftmaxMaxRows), padded * elementBytes));
  } else {
    t.rowsPerTile = 1;
    t.columnsPerTile = uint32_t(AlignDown((local - 256) / (element + (causal ? 8 : 0)), kRepeatBytes / 4));
  }
  t.blocks = uint32_t(Min(platform.cores, CeilDiv(rows, t.rowsPerTile)));
  return t;
}
