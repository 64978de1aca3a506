// What the kernels share: rows between global and local memory, and float32 inside whatever the tensors hold.
#pragma once

#include "kernel_operator.h"

namespace opsmith {

using AscendC::DataCopyExtParams;
using AscendC::DataCopyPad;
using AscendC::DataCopyPadExtParams;
using AscendC::GlobalTensor;
using AscendC::LocalTensor;
using AscendC::RoundMode;

constexpr int32_t kBufferNum = 2;  // a queue fills one buffer while the other is worked on

template <typename T, typename U>
struct IsSame {
  static constexpr bool value = false;
};
template <typename T>
struct IsSame<T, T> {
  static constexpr bool value = true;
};
template <typename T>
constexpr bool kIsFloat = IsSame<T, float>::value;

// Elements of a row in local memory, where every row begins with a data block.
template <typename T>
__aicore__ inline uint32_t Padded(uint32_t columns) {
  constexpr uint32_t inBlock = 32 / sizeof(T);
  return (columns + inBlock - 1) / inBlock * inBlock;
}

// `rows` rows of `columns` elements, `stride` elements apart in global memory; what is left of the last data block of
// each is zero, so that vectors may go over whole tiles.
template <typename T>
__aicore__ inline void CopyRowsIn(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t rows,
                                  uint32_t columns, uint64_t stride) {
  const DataCopyExtParams copy(rows, columns * sizeof(T), (stride - columns) * sizeof(T), 0, 0);
  const DataCopyPadExtParams<T> pad(true, 0, Padded<T>(columns) - columns, T(0.0f));
  DataCopyPad(to, from, copy, pad);
}

template <typename T>
__aicore__ inline void CopyRowsOut(const GlobalTensor<T>& to, const LocalTensor<T>& from, uint32_t rows,
                                   uint32_t columns, uint64_t stride) {
  const DataCopyExtParams copy(rows, columns * sizeof(T), 0, (stride - columns) * sizeof(T), 0);
  DataCopyPad(to, from, copy);
}

// float32 of what a queue brought: the tensor itself where it holds float32, else a conversion into `room`.
template <typename T>
__aicore__ inline LocalTensor<float> Widen(const LocalTensor<T>& from, const LocalTensor<float>& room,
                                           uint32_t count) {
  if constexpr (kIsFloat<T>) {
    return from;
  } else {
    AscendC::Cast(room, from, RoundMode::CAST_NONE, count);
    return room;
  }
}

}  // namespace opsmith
