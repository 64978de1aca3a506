// Rows of float32 in local memory, worked on a tile at a time: a repeat for every row, 64 columns an instruction. Numbers
// of rows come and go as vectors, so that the scalar pipe, which would stop the others, has no part in it.
#pragma once

#include "common.h"
#include "tiling.h"

namespace opsmith {

using AscendC::BinaryRepeatParams;
using AscendC::BrcbRepeatParams;
using AscendC::HardEvent;

constexpr uint32_t kLanes = 64;  // float32 in a repeat
constexpr uint32_t kFloatsInBlock = 8;  // in a data block
constexpr uint32_t kMaxRepeats = 255;

// `pitch` elements from one row to the next: whole data blocks of every type, for which 32 of them are enough.
struct RowTile {
  uint32_t rows, columns, pitch;

  // Whether rows lie too far apart for the stride of a repeat, a byte of data blocks: then row after row.
  __aicore__ inline bool Far() const { return pitch / kFloatsInBlock > 255; }
};

template <typename T>
__aicore__ inline void CopyTileIn(const LocalTensor<T>& to, const GlobalTensor<T>& from, const RowTile& t,
                                  uint64_t stride) {
  const uint32_t gap = t.pitch - Padded<T>(t.columns);
  const DataCopyExtParams copy(t.rows, t.columns * sizeof(T), (stride - t.columns) * sizeof(T),
                               gap * sizeof(T) / kDataBlockBytes, 0);
  DataCopyPad(to, from, copy, DataCopyPadExtParams<T>(false, 0, 0, T(0.0f)));
}

template <typename T>
__aicore__ inline void CopyTileOut(const GlobalTensor<T>& to, const LocalTensor<T>& from, const RowTile& t,
                                   uint64_t stride) {
  const uint32_t gap = t.pitch - Padded<T>(t.columns);
  const DataCopyExtParams copy(t.rows, t.columns * sizeof(T), gap * sizeof(T) / kDataBlockBytes,
                               (stride - t.columns) * sizeof(T), 0);
  DataCopyPad(to, from, copy);
}

// A tile that a queue brought, in float32: in `room`, or itself where it is float32.
template <typename T>
__aicore__ inline LocalTensor<float> WidenTile(const LocalTensor<T>& from, const LocalTensor<float>& room,
                                               const RowTile& t) {
  if constexpr (kIsFloat<T>) {
    return from;
  } else {
    const AscendC::UnaryRepeatParams step(1, 1, t.pitch / kFloatsInBlock,
                                          t.pitch * sizeof(T) / kDataBlockBytes);
    for (uint32_t r = 0; t.Far() && r < t.rows; ++r)
      AscendC::Cast(room[r * t.pitch], from[r * t.pitch], RoundMode::CAST_NONE, t.columns);
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

enum class Op : uint8_t { kAdd, kMul, kDiv, kMax };

template <Op op>
__aicore__ inline void Apply(const LocalTensor<float>& dst, const LocalTensor<float>& a,
                             const LocalTensor<float>& b, uint64_t mask, uint32_t repeats,
                             const BinaryRepeatParams& step) {
  if constexpr (op == Op::kAdd) AscendC::Add(dst, a, b, mask, repeats, step);
  if constexpr (op == Op::kMul) AscendC::Mul(dst, a, b, mask, repeats, step);
  if constexpr (op == Op::kDiv) AscendC::Div(dst, a, b, mask, repeats, step);
  if constexpr (op == Op::kMax) AscendC::Max(dst, a, b, mask, repeats, step);
}

// dst = src op the row's number, of which `numbers` has a data block for each row.
template <Op op>
__aicore__ inline void WithNumbers(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                                   const LocalTensor<float>& numbers, const RowTile& t) {
  const uint32_t step = t.pitch / kFloatsInBlock;
  for (uint32_t c = 0; !t.Far() && c < t.columns; c += kLanes)
    Apply<op>(dst[c], src[c], numbers, Min(kLanes, t.columns - c), t.rows,
              BinaryRepeatParams(1, 1, 0, step, step, 1));
  for (uint32_t r = 0; t.Far() && r < t.rows; ++r) {
    uint32_t c = 0;
    for (; c + kLanes <= t.columns; c += uint32_t(Min((t.columns - c) / kLanes, kMaxRepeats)) * kLanes)
      Apply<op>(dst[r * t.pitch + c], src[r * t.pitch + c], numbers[r * kFloatsInBlock], kLanes,
                Min((t.columns - c) / kLanes, kMaxRepeats), BinaryRepeatParams(1, 1, 0, 8, 8, 0));
    if (c < t.columns)
      Apply<op>(dst[r * t.pitch + c], src[r * t.pitch + c], numbers[r * kFloatsInBlock], t.columns - c, 1,
                BinaryRepeatParams(1, 1, 0, 8, 8, 0));
  }
}

// dst = src op `row`, the same for every row.
template <Op op>
__aicore__ inline void WithRow(const LocalTensor<float>& dst, const LocalTensor<float>& src,
                               const LocalTensor<float>& row, const RowTile& t) {
  const uint32_t step = t.pitch / kFloatsInBlock;
  for (uint32_t c = 0; !t.Far() && c < t.columns; c += kLanes)
    Apply<op>(dst[c], src[c], row[c], Min(kLanes, t.columns - c), t.rows,
              BinaryRepeatParams(1, 1, 1, step, step, 0));
  for (uint32_t r = 0; t.Far() && r < t.rows; ++r) {
    if constexpr (op == Op::kMul) AscendC::Mul(dst[r * t.pitch], src[r * t.pitch], row, t.columns);
    if constexpr (op == Op::kAdd) AscendC::Add(dst[r * t.pitch], src[r * t.pitch], row, t.columns);
  }
}

// dst = a op b, element by element.
template <Op op>
__aicore__ inline void WithTile(const LocalTensor<float>& dst, const LocalTensor<float>& a,
                                const LocalTensor<float>& b, const RowTile& t) {
  const uint32_t step = t.pitch / kFloatsInBlock;
  for (uint32_t c = 0; !t.Far() && c < t.columns; c += kLanes)
    Apply<op>(dst[c], a[c], b[c], Min(kLanes, t.columns - c), t.rows,
              BinaryRepeatParams(1, 1, 1, step, step, step));
  for (uint32_t r = 0; t.Far() && r < t.rows; ++r) {
    const uint32_t at = r * t.pitch;
    if constexpr (op == Op::kMul) AscendC::Mul(dst[at], a[at], b[at], t.columns);
    if constexpr (op == Op::kAdd) AscendC::Add(dst[at], a[at], b[at], t.columns);
  }
}

// The sum of each row, or the largest of what must not be negative. `lanes` has room for 64 numbers a row, `work` for one
// of each 64 columns.
template <Op op>
__aicore__ inline void FoldRows(const LocalTensor<float>& numbers, const LocalTensor<float>& src,
                                const LocalTensor<float>& lanes, const LocalTensor<float>& work,
                                const RowTile& t) {
  AscendC::Duplicate(lanes, 0.0f, t.rows * kLanes);
  for (uint32_t c = 0; !t.Far() && c < t.columns; c += kLanes)
    Apply<op>(lanes, lanes, src[c], Min(kLanes, t.columns - c), t.rows,
              BinaryRepeatParams(1, 1, 1, 8, 8, t.pitch / kFloatsInBlock));
  for (uint32_t r = 0; t.Far() && r < t.rows; ++r) {
    if constexpr (op == Op::kAdd) AscendC::ReduceSum(lanes[r * kLanes], src[r * t.pitch], work, t.columns);
    if constexpr (op == Op::kMax) AscendC::ReduceMax(lanes[r * kLanes], src[r * t.pitch], work, t.columns);
  }
  if constexpr (op == Op::kAdd) AscendC::WholeReduceSum(numbers, lanes, kLanes, t.rows, 1, 1, 8);
  if constexpr (op == Op::kMax)
    AscendC::WholeReduceMax(numbers, lanes, kLanes, t.rows, 1, 1, 8, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
}

// A data block for each row, of its number eight times.
__aicore__ inline void Spread(const LocalTensor<float>& blocks, const LocalTensor<float>& numbers,
                              uint32_t rows) {
  AscendC::Brcb(blocks, numbers, CeilDiv(rows, 8), BrcbRepeatParams(1, 8));
}

// The root of each row's mean square, spread: what RMSNorm divides by. `squares` has room for the tile.
__aicore__ inline void RootMeanSquares(const LocalTensor<float>& blocks, const LocalTensor<float>& numbers,
                                       const LocalTensor<float>& src, const LocalTensor<float>& squares,
                                       const LocalTensor<float>& lanes, const LocalTensor<float>& work,
                                       float eps, const RowTile& t) {
  WithTile<Op::kMul>(squares, src, src, t);
  FoldRows<Op::kAdd>(numbers, squares, lanes, work, t);
  AscendC::Muls(numbers, numbers, 1.0f / float(t.columns), t.rows);
  AscendC::Adds(numbers, numbers, eps, t.rows);
  AscendC::Sqrt(numbers, numbers, t.rows);
  Spread(blocks, numbers, t.rows);
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
