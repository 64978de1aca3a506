// What the kernels by hand share beside formula.h: tiles of rows of other types, made float32 and narrow again.
#pragma once

#include "formula.h"
#include "tiling.h"

namespace opsmith {

using namespace formula;
using AscendC::GlobalTensor;
using AscendC::LocalTensor;

constexpr int32_t kBufferNum = 2;  // a queue fills one buffer while the other is worked on

// Rows that follow each other in local memory, each from a data block on.
template <typename T>
__aicore__ inline Tile RowsOf(uint32_t rows, uint32_t size) {
  return Tile(rows, size, Padded<T>(size));
}

// A tile on its way from global memory into a queue.
template <typename T, class Queue>
__aicore__ inline void Fetch(Queue& queue, const GlobalTensor<T>& from, const Tile& tile, uint64_t stride) {
  LocalTensor<T> to = queue.template AllocTensor<T>();
  CopyIn(to, from, tile, stride);
  queue.EnQue(to);
}

// And one out of a queue, where it is whole.
template <typename T, class Queue>
__aicore__ inline void Leave(const GlobalTensor<T>& to, Queue& queue, const Tile& tile, uint64_t stride) {
  LocalTensor<T> from = queue.template DeQue<T>();
  CopyOut(to, from, tile, stride);
  queue.FreeTensor(from);
}

// float32 of what a queue brought: the tensor itself where it holds float32, else a conversion into `room`.
template <typename T>
__aicore__ inline Floats Widen(const LocalTensor<T>& from, const Floats& room, uint32_t count) {
  if constexpr (kIsFloat<T>) {
    return from;
  } else {
    AscendC::Cast(room, from, RoundMode::CAST_NONE, count);
    return room;
  }
}

// The same of a tile with gaps between its rows, in which nothing is: an instruction for each 64 columns, which goes down
// the rows, or one for each row where that is too far.
template <typename T>
__aicore__ inline Floats WidenTile(const LocalTensor<T>& from, const Floats& room, const Tile& t) {
  if constexpr (kIsFloat<T>) {
    return from;
  } else {
    const bool far = t.width / kBlock > 255;
    const UnaryRepeatParams down(1, 1, t.width / kBlock, t.width * sizeof(T) / kDataBlock);
    for (uint32_t r = 0; far && r < t.rows; ++r)
      AscendC::Cast(room[r * t.width], from[r * t.width], RoundMode::CAST_NONE, t.size);
    for (uint32_t c = 0; !far && c < t.size; c += kLanes)
      AscendC::Cast(room[c], from[c], RoundMode::CAST_NONE, uint64_t(Smaller(kLanes, t.size - c)), t.rows,
                    down);
    return room;
  }
}

// float32 into the type of a result, rounded once; where that is float32, it is there already.
template <typename T>
__aicore__ inline void NarrowTile(const LocalTensor<T>& to, const Floats& from, const Tile& t) {
  const UnaryRepeatParams down(1, 1, t.width * sizeof(T) / kDataBlock, t.width / kBlock);
  if constexpr (!kIsFloat<T>)
    for (uint32_t c = 0; c < t.size; c += kLanes)
      AscendC::Cast(to[c], from[c], RoundMode::CAST_RINT, uint64_t(Smaller(kLanes, t.size - c)), t.rows,
                    down);
}

// A row of global memory in float32, which stays: a weight. `room` takes it as it comes; two bytes an element are enough.
template <typename T>
__aicore__ inline void LoadRow(const Floats& to, const Floats& room, const GlobalTensor<T>& from,
                               uint32_t size) {
  if constexpr (kIsFloat<T>) {
    CopyIn(to, from, Line(size), size);
    Order<AscendC::HardEvent::MTE2_V>();
  } else {
    const LocalTensor<T> narrow = room.template ReinterpretCast<T>();
    CopyIn(narrow, from, Line(size), size);
    Order<AscendC::HardEvent::MTE2_V>();
    AscendC::Cast(to, narrow, RoundMode::CAST_NONE, size);
  }
}

// x over the root of each row's mean square and eps: RMSNorm before its weight. `squares` has room for the tile, `numbers`
// for one of each row, `blocks` for a data block of each, `lanes` for 64 numbers of each.
__aicore__ inline void OverRootMeanSquares(const Floats& to, const Floats& x, const Floats& squares,
                                           const Floats& numbers, const Floats& blocks, const Floats& lanes,
                                           float eps, const Tile& t) {
  Apply<Times>(squares, Whole(x, t), Whole(x, t), t);
  SumOfRows(numbers, squares, lanes, t);
  AscendC::Muls(numbers, numbers, 1.0f / float(t.size), t.rows);
  AscendC::Adds(numbers, numbers, eps, t.rows);
  AscendC::Sqrt(numbers, numbers, t.rows);
  Apply<Over>(to, Whole(x, t), PerRow(numbers, blocks, t), t);
}

// For each of n elements of a row of neighbors: where its number stands in a table, in bytes: at i / 2, and that of the
// second one of a pair so much further `behind`.
__aicore__ inline void FindColumns(const LocalTensor<int32_t>& columns, const Floats& room, uint32_t size,
                                   uint32_t behind, uint32_t n) {
  const LocalTensor<int32_t> second = room.ReinterpretCast<int32_t>();
  AscendC::CreateVecIndex(second, 0, n);
  AscendC::ShiftRight(columns, second, 1, n);
  AscendC::Sub(second, second, columns, n);
  AscendC::Sub(second, second, columns, n);  // i % 2
  AscendC::Muls(second, second, int32_t(behind), n);
  AscendC::Add(columns, columns, second, n);
  AscendC::Mins(columns, columns, int32_t(size) - 1, n);  // behind the row anything that is there will do
  AscendC::Muls(columns, columns, int32_t(sizeof(float)), n);
}

// Rounds float32 to integers, to even in the middle, within int8's range; `values` is spent.
__aicore__ inline void ToInt8(const LocalTensor<int8_t>& q, const Floats& values, uint32_t count) {
  AscendC::Mins(values, values, 127.0f, count);
  AscendC::Maxs(values, values, -128.0f, count);
  AscendC::Cast(values, values, RoundMode::CAST_RINT, count);
  const LocalTensor<half> narrow = values.template ReinterpretCast<half>();
  AscendC::Cast(narrow, values, RoundMode::CAST_RINT, count);  // exact: half holds every integer to 2048
  AscendC::Cast(q, narrow, RoundMode::CAST_RINT, count);
}

}  // namespace opsmith
