// Rows of float32 in local memory, worked on a tile at a time: a repeat for every row, 64 columns an instruction. Numbers
// of rows come and go as vectors, so that the scalar pipe, which would stop the others, has no part in it.
#pragma once

#include "rows.h"
#include "tiling.h"

namespace opsmith {

using AscendC::HardEvent;

constexpr uint32_t kFloatsInBlock = 8;  // in a data block

template <typename T>
__aicore__ inline void CopyTileIn(const LocalTensor<T>& to, const GlobalTensor<T>& from, const Tile& t,
                                  uint64_t stride) {
  const uint32_t gap = t.padded - Padded<T>(t.columns);
  const DataCopyExtParams copy(t.rows, t.columns * sizeof(T), (stride - t.columns) * sizeof(T),
                               gap * sizeof(T) / kDataBlockBytes, 0);
  DataCopyPad(to, from, copy, DataCopyPadExtParams<T>(false, 0, 0, T(0.0f)));
}

template <typename T>
__aicore__ inline void CopyTileOut(const GlobalTensor<T>& to, const LocalTensor<T>& from, const Tile& t,
                                   uint64_t stride) {
  const uint32_t gap = t.padded - Padded<T>(t.columns);
  const DataCopyExtParams copy(t.rows, t.columns * sizeof(T), gap * sizeof(T) / kDataBlockBytes,
                               (stride - t.columns) * sizeof(T), 0);
  DataCopyPad(to, from, copy);
}

// A tile that a queue brought, in float32: in `room`, or itself where it is float32.
template <typename T>
__aicore__ inline LocalTensor<float> WidenTile(const LocalTensor<T>& from, const LocalTensor<float>& room,
                                               const Tile& t) {
  if constexpr (kIsFloat<T>) {
    return from;
  } else {
    const AscendC::UnaryRepeatParams step(1, 1, t.padded / kFloatsInBlock,
                                          t.padded * sizeof(T) / kDataBlockBytes);
    for (uint32_t r = 0; t.Far() && r < t.rows; ++r)
      AscendC::Cast(room[r * t.padded], from[r * t.padded], RoundMode::CAST_NONE, t.columns);
    for (uint32_t c = 0; !t.Far() && c < t.columns; c += kLanes)
      AscendC::Cast(room[c], from[c], RoundMode::CAST_NONE, uint64_t(Min(kLanes, t.columns - c)), t.rows,
                    step);
    return room;
  }
}

// A row of global memory in float32, which stays: a weight. `room` takes it as it comes; two bytes an element are enough.
template <typename T>
__aicore__ inline void LoadRow(const LocalTensor<float>& to, const LocalTensor<float>& room,
                               const GlobalTensor<T>& from, uint32_t columns) {
  const DataCopyExtParams copy(1, columns * sizeof(T), 0, 0, 0);
  const DataCopyPadExtParams<T> none(false, 0, 0, T(0.0f));
  const auto event = AscendC::GetTPipePtr()->FetchEventID(HardEvent::MTE2_V);
  if constexpr (kIsFloat<T>) {
    DataCopyPad(to, from, copy, none);
    AscendC::SetFlag<HardEvent::MTE2_V>(event);
    AscendC::WaitFlag<HardEvent::MTE2_V>(event);
  } else {
    const LocalTensor<T> narrow = room.template ReinterpretCast<T>();
    DataCopyPad(narrow, from, copy, none);
    AscendC::SetFlag<HardEvent::MTE2_V>(event);
    AscendC::WaitFlag<HardEvent::MTE2_V>(event);
    AscendC::Cast(to, narrow, RoundMode::CAST_NONE, columns);
  }
}

// dst = a op b, element by element.
template <typename Op>
__aicore__ inline void WithTile(const LocalTensor<float>& dst, const LocalTensor<float>& a,
                                const LocalTensor<float>& b, const Tile& t) {
  const uint32_t step = t.padded / kFloatsInBlock;
  for (uint32_t c = 0; !t.Far() && c < t.columns; c += kLanes)
    Op::Do(dst[c], a[c], b[c], uint64_t(Lanes(t, c)), t.rows, BinaryRepeatParams(1, 1, 1, step, step, step));
  for (uint32_t at = 0; t.Far() && at < t.rows * t.padded; at += t.padded)
    Op::Do(dst[at], a[at], b[at], int32_t(t.columns));
}

// The sum of each row, or the largest of what must not be negative. `lanes` has room for 64 numbers a row, `work` for one
// of each 64 columns.
template <typename Fold>
__aicore__ inline void FoldLanes(const LocalTensor<float>& numbers, const LocalTensor<float>& src,
                                 const LocalTensor<float>& lanes, const LocalTensor<float>& work,
                                 const Tile& t) {
  AscendC::Duplicate(lanes, 0.0f, t.rows * kLanes);
  for (uint32_t c = 0; !t.Far() && c < t.columns; c += kLanes)
    Fold::Both::Do(lanes, lanes, src[c], uint64_t(Lanes(t, c)), t.rows,
                   BinaryRepeatParams(1, 1, 1, 8, 8, t.padded / kFloatsInBlock));
  for (uint32_t r = 0; t.Far() && r < t.rows; ++r)
    Fold::Row(lanes[r * kLanes], src[r * t.padded], work, t.columns);
  Fold::Vector(numbers, lanes, kLanes, t.rows, 8);
}

// The root of each row's mean square, spread: what RMSNorm divides by. `squares` has room for the tile.
__aicore__ inline void RootMeanSquares(const LocalTensor<float>& blocks, const LocalTensor<float>& numbers,
                                       const LocalTensor<float>& src, const LocalTensor<float>& squares,
                                       const LocalTensor<float>& lanes, const LocalTensor<float>& work,
                                       float eps, const Tile& t) {
  WithTile<Times>(squares, src, src, t);
  FoldLanes<Sum>(numbers, squares, lanes, work, t);
  AscendC::Muls(numbers, numbers, 1.0f / float(t.columns), t.rows);
  AscendC::Adds(numbers, numbers, eps, t.rows);
  AscendC::Sqrt(numbers, numbers, t.rows);
  SpreadRows(blocks, numbers, t.rows);
}

// Rounds float32 to integers, to even in the middle, within int8's range; `values` is spent.
__aicore__ inline void ToInt8(const LocalTensor<int8_t>& q, const LocalTensor<float>& values,
                              uint32_t count) {
  AscendC::Mins(values, values, 127.0f, count);
  AscendC::Maxs(values, values, -128.0f, count);
  AscendC::Cast(values, values, RoundMode::CAST_RINT, count);
  const LocalTensor<half> narrow = values.template ReinterpretCast<half>();
  AscendC::Cast(narrow, values, RoundMode::CAST_RINT, count);  // exact: half holds every integer to 2048
  AscendC::Cast(q, narrow, RoundMode::CAST_RINT, count);
}

}  // namespace opsmith
