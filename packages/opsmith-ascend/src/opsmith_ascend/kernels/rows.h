// Reductions along the rows of a tile, and operations with one number a row or one vector for all rows.
//
// A tile is `rows` rows of `padded` float32, of which the first `columns` count. A vector instruction costs its start
// and then a cycle for each 256 bytes, so the loop goes over whichever is fewer: rows, each a long instruction, or
// columns in vectors of 64, each with one repeat a row.
#pragma once

#include "common.h"

namespace opsmith {

using AscendC::BinaryRepeatParams;

constexpr uint32_t kLanes = 64;  // float32 in a vector
constexpr uint32_t kMaxRows = 64;  // of a tile: the numbers of its rows fit one vector
constexpr uint32_t kStatBytes = kMaxRows * sizeof(float);  // one number a row
constexpr uint32_t kSpreadBytes = kMaxRows * 32;  // one data block a row
constexpr uint32_t kMaxRepeats = 255;

struct Tile {
  uint32_t rows, columns, padded;

  // Vectors down the columns take `padded` as their stride between repeats, in data blocks, which is a byte.
  __aicore__ inline bool Far() const { return padded / 8 > kMaxRepeats; }
  __aicore__ inline bool Down() const { return rows * kLanes > padded && !Far(); }
};

__aicore__ inline uint32_t Lanes(const Tile& tile, uint32_t column) {
  return tile.columns - column < kLanes ? tile.columns - column : kLanes;
}

#define OPSMITH_OP(Name, Instruction)                 \
  struct Name {                                       \
    template <typename... A>                          \
    __aicore__ inline static void Do(const A&... a) { \
      AscendC::Instruction(a...);                     \
    }                                                 \
  };
OPSMITH_OP(Plus, Add)
OPSMITH_OP(Minus, Sub)
OPSMITH_OP(Times, Mul)
OPSMITH_OP(Over, Div)
OPSMITH_OP(Larger, Max)
#undef OPSMITH_OP

struct Sum {
  using Both = Plus;
  __aicore__ inline static void Vector(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                       uint32_t mask, uint32_t repeats, uint32_t stride) {
    AscendC::WholeReduceSum(dst, src, mask, repeats, 1, 1, stride);
  }
  __aicore__ inline static void Row(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                    const LocalTensor<float>& work, uint32_t count) {
    AscendC::ReduceSum(dst, src, work, count);
  }
};

struct Largest {
  using Both = Larger;
  __aicore__ inline static void Vector(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                       uint32_t mask, uint32_t repeats, uint32_t stride) {
    AscendC::WholeReduceMax(dst, src, mask, repeats, 1, 1, stride, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
  }
  __aicore__ inline static void Row(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                    const LocalTensor<float>& work, uint32_t count) {
    AscendC::ReduceMax(dst, src, work, count);
  }
};

// dst[r] = the fold of row r. `spread` has a data block a row; `work` a number for each vector of a row.
template <typename Fold>
__aicore__ inline void FoldRows(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                const LocalTensor<float>& spread, const LocalTensor<float>& work,
                                const Tile& tile) {
  if (tile.Down()) {
    for (uint32_t c = 0; c < tile.columns; c += kLanes) {
      const LocalTensor<float> part = c ? work : dst;
      Fold::Vector(part, src[c], Lanes(tile, c), tile.rows, tile.padded / 8);
      if (c) Fold::Both::Do(dst, dst, work, int32_t(tile.rows));
    }
    return;
  }
  // A row's result begins a data block; the other seven numbers there are zero, so a sum over the block moves it.
  const uint32_t eights = (tile.rows + 7) / 8;
  AscendC::Duplicate(spread, 0.0f, eights * kLanes);
  for (uint32_t r = 0; r < tile.rows; ++r) Fold::Row(spread[r * 8], src[r * tile.padded], work, tile.columns);
  AscendC::BlockReduceSum(dst, spread, eights, kLanes, 1, 1, 8);
}

// A data block for each row, filled with the row's number; `numbers` is defined up to a multiple of eight.
__aicore__ inline void SpreadRows(const LocalTensor<float>& spread, const LocalTensor<float>& numbers,
                                  uint32_t rows) {
  AscendC::Brcb(spread, numbers, (rows + 7) / 8, AscendC::BrcbRepeatParams(1, 8));
}

// dst = src op the row's number.
template <typename Op>
__aicore__ inline void WithRowNumber(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                     const LocalTensor<float>& spread, const Tile& tile) {
  const uint32_t step = tile.padded / 8;
  if (tile.Down()) {
    for (uint32_t c = 0; c < tile.columns; c += kLanes)
      Op::Do(dst[c], src[c], spread, uint64_t(Lanes(tile, c)), tile.rows,
             BinaryRepeatParams(1, 1, 0, step, step, 1));
    return;
  }
  for (uint32_t r = 0; r < tile.rows; ++r) {
    const uint32_t at = r * tile.padded, whole = tile.columns / kLanes, rest = tile.columns % kLanes;
    for (uint32_t v = 0; v < whole; v += kMaxRepeats) {
      const uint32_t repeats = whole - v < kMaxRepeats ? whole - v : kMaxRepeats;
      Op::Do(dst[at + v * kLanes], src[at + v * kLanes], spread[r * 8], uint64_t(kLanes), repeats,
             BinaryRepeatParams(1, 1, 0, 8, 8, 0));
    }
    if (rest)
      Op::Do(dst[at + whole * kLanes], src[at + whole * kLanes], spread[r * 8], uint64_t(rest), 1,
             BinaryRepeatParams(1, 1, 0, 8, 8, 0));
  }
}

// dst = src op a vector that all rows share.
template <typename Op>
__aicore__ inline void WithVector(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                  const LocalTensor<float>& vector, const Tile& tile) {
  const uint32_t step = tile.padded / 8;
  if (tile.Down()) {
    for (uint32_t c = 0; c < tile.columns; c += kLanes)
      Op::Do(dst[c], src[c], vector[c], uint64_t(Lanes(tile, c)), tile.rows,
             BinaryRepeatParams(1, 1, 1, step, step, 0));
    return;
  }
  for (uint32_t r = 0; r < tile.rows; ++r)
    Op::Do(dst[r * tile.padded], src[r * tile.padded], vector, int32_t(tile.columns));
}

}  // namespace opsmith
