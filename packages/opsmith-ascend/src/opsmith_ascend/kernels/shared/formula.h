// What Ascend C kernels are written in, by hand or from a formula: tiles of rows in local memory, arithmetic between tiles,
// rows and columns, and statistics along rows. `opsmith new` puts a copy beside each kernel, as CANN's build has no other
// place for it.
//
// A tile lies row by row, `width` elements apart; a row that fits is read from global memory once. A value of a row is one
// float, and the values of a tile's rows lie together; Brcb spreads them to a data block each where a tile meets them.
// Everything is float32, widened when it was read and rounded once before it is written.
#pragma once

#include "kernel_operator.h"

namespace formula {

using AscendC::BinaryRepeatParams;
using AscendC::CMPMODE;
using AscendC::RoundMode;
using AscendC::SELMODE;
using AscendC::TBuf;
using AscendC::TPipe;
using AscendC::UnaryRepeatParams;
using Floats = AscendC::LocalTensor<float>;

constexpr uint32_t kDataBlock = 32;  // bytes, of local memory and of its alignment
constexpr uint32_t kBlock = 8;  // floats in a data block
constexpr uint32_t kLanes = 64;  // floats in a repeat of an instruction
constexpr uint32_t kMostRows = 256;  // of a tile, one more than an instruction repeats
constexpr float kInfinity = __builtin_inff();

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;
template <class T>
constexpr bool kIsFloat = kSame<T, float>;
template <class T>
struct InMemory {
  using Type = T;
};
template <>
struct InMemory<bool> {  // a byte of 0 or 1
  using Type = uint8_t;
};

__aicore__ inline constexpr uint32_t RoundedUp(uint32_t n, uint32_t unit) {
  return (n + unit - 1) / unit * unit;
}
// Elements of a row in local memory, where every row begins with a data block.
template <class T>
__aicore__ inline constexpr uint32_t Padded(uint32_t size) {
  return RoundedUp(size, kDataBlock / sizeof(T));
}
template <class T>
__aicore__ inline T Smaller(T a, T b) {
  return a < b ? a : b;
}

// What the pipe named last does from here on comes after what the other has done.
template <AscendC::HardEvent event>
__aicore__ inline void Order() {
  const auto id = AscendC::GetTPipePtr()->FetchEventID(event);
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

// What a tile holds: rows of `size` elements, `width` apart.
struct Tile {
  uint32_t rows = 0, size = 0, width = 0;
  __aicore__ inline Tile() {}
  __aicore__ inline Tile(uint32_t rows, uint32_t size, uint32_t width)
      : rows(rows), size(size), width(width) {}
  // How far an instruction goes that does not care where rows begin.
  __aicore__ inline uint32_t count() const { return rows == 1 ? size : rows * width; }
  __aicore__ inline uint32_t chunks() const { return (size + kLanes - 1) / kLanes; }
};

// One value for each row of a tile, or `size` elements that lie together.
__aicore__ inline Tile Line(uint32_t size) { return Tile(1, size, RoundedUp(size, kDataBlock)); }

// Data blocks between two rows that copying leaves as they are.
template <class T>
__aicore__ inline uint32_t Gap(const Tile& tile) {
  return tile.rows > 1 ? (tile.width * sizeof(T) - RoundedUp(tile.size * sizeof(T), kDataBlock)) / kDataBlock
                       : 0;
}

// The rows of a tile, `stride` elements apart in global memory; what is left of the last data block of each is zero, so
// that vectors may go over whole tiles.
template <class T>
__aicore__ inline void CopyIn(const AscendC::LocalTensor<T>& to, const AscendC::GlobalTensor<T>& from,
                              const Tile& tile, uint64_t stride) {
  const uint32_t bytes = tile.size * sizeof(T), filled = RoundedUp(bytes, kDataBlock);
  const AscendC::DataCopyExtParams params(tile.rows, bytes, (stride - tile.size) * sizeof(T), Gap<T>(tile),
                                          0);
  const AscendC::DataCopyPadExtParams<T> pad(filled > bytes, 0, (filled - bytes) / sizeof(T),
                                             static_cast<T>(0.0f));
  AscendC::DataCopyPad(to, from, params, pad);
}
template <class T>
__aicore__ inline void CopyOut(const AscendC::GlobalTensor<T>& to, const AscendC::LocalTensor<T>& from,
                               const Tile& tile, uint64_t stride) {
  const AscendC::DataCopyExtParams params(tile.rows, tile.size * sizeof(T), Gap<T>(tile),
                                          (stride - tile.size) * sizeof(T), 0);
  AscendC::DataCopyPad(to, from, params);
}

// A tensor that is read, in two buffers: the next tile arrives while one is computed with.
template <class Element, int kBuffers = 2>
class Input {
 public:
  using T = typename InMemory<Element>::Type;

  __aicore__ inline void Init(TPipe& pipe, GM_ADDR address, uint32_t elements) {
    global_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
    pipe.InitBuffer(queue_, kBuffers, elements * sizeof(T));
    if constexpr (!kIsFloat<T>) pipe.InitBuffer(wide_, elements * sizeof(float));
    if constexpr (sizeof(T) == 1) pipe.InitBuffer(between_, elements * sizeof(half));
  }

  // Rows that follow each other in global memory, from element `at` on.
  __aicore__ inline void Load(int64_t at, const Tile& tile) {
    Begin(tile);
    LoadRows(0, at, tile.rows, tile);
    End();
  }

  // The same in pieces: rows that lie together, or one row for several.
  __aicore__ inline void Begin(const Tile& tile) {
    raw_ = queue_.template AllocTensor<T>();
    if (Gap<T>(tile) > 0) {  // beside a narrower type, rows may lie further apart than copying fills
      AscendC::Duplicate(raw_.template ReinterpretCast<uint32_t>(), 0u,
                         tile.rows * tile.width * sizeof(T) / 4);
      Order<AscendC::HardEvent::V_MTE2>();
    }
  }
  __aicore__ inline void LoadRows(uint32_t row, int64_t at, uint32_t rows, const Tile& tile) {
    CopyIn(raw_[row * tile.width], global_[at], Tile(rows, tile.size, tile.width), tile.size);
  }
  __aicore__ inline void LoadOneRow(uint32_t row, int64_t at, uint32_t rows, const Tile& tile) {
    for (uint32_t i = 0; i < rows; ++i) LoadRows(row + i, at, 1, tile);
  }
  __aicore__ inline void End() { queue_.EnQue(raw_); }

  __aicore__ inline void Open(const Tile& tile) {
    raw_ = queue_.template DeQue<T>();
    if constexpr (sizeof(T) == 1) {
      const auto between = between_.template Get<half>();
      AscendC::Cast(between, raw_, RoundMode::CAST_NONE, tile.count());
      AscendC::Cast(wide_.template Get<float>(), between, RoundMode::CAST_NONE, tile.count());
    } else if constexpr (!kIsFloat<T>) {
      AscendC::Cast(wide_.template Get<float>(), raw_, RoundMode::CAST_NONE, tile.count());
    }
  }
  __aicore__ inline Floats Value() {
    if constexpr (kIsFloat<T>) {
      return raw_;
    } else {
      return wide_.template Get<float>();
    }
  }
  __aicore__ inline void Close() { queue_.FreeTensor(raw_); }

 private:
  AscendC::GlobalTensor<T> global_;
  AscendC::TQue<AscendC::QuePosition::VECIN, kBuffers> queue_;
  TBuf<AscendC::QuePosition::VECCALC> wide_, between_;
  AscendC::LocalTensor<T> raw_;
};

// The one number of a tensor, read by the scalar pipe.
template <class T>
__aicore__ inline float OnlyNumber(GM_ADDR address) {
  AscendC::GlobalTensor<T> tensor;
  tensor.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
  if constexpr (kSame<T, bfloat16_t>) {
    return AscendC::ToFloat(tensor.GetValue(0));
  } else {
    return static_cast<float>(tensor.GetValue(0));
  }
}

// Local memory for values between instructions. It begins as zeros: some instructions read whole repeats, and those that go
// over whole tiles the gaps between rows.
class Values {
 public:
  __aicore__ inline void Init(TPipe& pipe, uint32_t elements) {
    pipe.InitBuffer(buffer_, elements * sizeof(float));
    AscendC::Duplicate(Get(), 0.0f, elements);
  }
  __aicore__ inline Floats Get() { return buffer_.Get<float>(); }

 private:
  TBuf<AscendC::QuePosition::VECCALC> buffer_;
};

// A tensor that is written, in two buffers: a tile leaves while the next is computed.
template <class T>
class Output {
 public:
  __aicore__ inline void Init(TPipe& pipe, GM_ADDR address, uint32_t elements) {
    global_.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(address));
    pipe.InitBuffer(queue_, 2, elements * sizeof(T));
    if constexpr (!kIsFloat<T>) wide_.Init(pipe, elements);
  }
  // Where the next tile is computed.
  __aicore__ inline Floats Open() {
    raw_ = queue_.template AllocTensor<T>();
    if constexpr (kIsFloat<T>) {
      return raw_;
    } else {
      return wide_.Get();
    }
  }
  __aicore__ inline void Close(const Tile& tile) {
    if constexpr (!kIsFloat<T>) AscendC::Cast(raw_, wide_.Get(), RoundMode::CAST_RINT, tile.count());
    queue_.EnQue(raw_);
  }
  __aicore__ inline void Store(int64_t at, const Tile& tile) {
    raw_ = queue_.template DeQue<T>();
    CopyOut(global_[at], raw_, tile, tile.size);
    queue_.FreeTensor(raw_);
  }

 private:
  AscendC::GlobalTensor<T> global_;
  AscendC::TQue<AscendC::QuePosition::VECOUT, 2> queue_;
  Values wide_;
  AscendC::LocalTensor<T> raw_;
};

// One side of an instruction over a tile: a step in floats to the next row, and to the next element.
struct Operand {
  Floats values;
  uint32_t row, element;
  __aicore__ inline Operand(const Floats& values, uint32_t row, uint32_t element)
      : values(values), row(row), element(element) {}
  __aicore__ inline Floats At(uint32_t r, uint32_t at) const { return values[r * row + at * element]; }
  __aicore__ inline uint16_t Blocks() const { return element; }
  __aicore__ inline uint8_t AlongRow() const { return element * kBlock; }
  __aicore__ inline uint8_t ToNextRow() const { return row / kBlock; }
};
__aicore__ inline Operand Whole(const Floats& tile, const Tile& of) { return Operand(tile, of.width, 1); }
__aicore__ inline Operand Columns(const Floats& columns) { return Operand(columns, 0, 1); }
// A number for each row, which has a data block of its own.
__aicore__ inline Operand Blocks(const Floats& blocks) { return Operand(blocks, kBlock, 0); }
__aicore__ inline Operand PerRow(const Floats& rows, const Floats& blocks, const Tile& of) {
  AscendC::Brcb(blocks, rows, (of.rows + kBlock - 1) / kBlock, AscendC::BrcbRepeatParams(1, kBlock));
  return Blocks(blocks);
}

#define FORMULA_BINARY(Name, Instruction)                                                               \
  struct Name {                                                                                         \
    static __aicore__ inline void Do(const Floats& to, const Floats& a, const Floats& b, uint64_t mask, \
                                     uint8_t repeats, const BinaryRepeatParams& params) {               \
      AscendC::Instruction(to, a, b, mask, repeats, params);                                            \
    }                                                                                                   \
  };
FORMULA_BINARY(Plus, Add)
FORMULA_BINARY(Minus, Sub)
FORMULA_BINARY(Times, Mul)
FORMULA_BINARY(Over, Div)
FORMULA_BINARY(Larger, Max)
FORMULA_BINARY(Lesser, Min)
#undef FORMULA_BINARY

// to = a op b where not both are whole tiles. Few long rows: an instruction for each, which repeats along it. Many short
// ones: an instruction for each 64 columns, which repeats down the rows.
template <class Op>
__aicore__ inline void Apply(const Floats& to, const Operand& a, const Operand& b, const Tile& tile) {
  if (tile.rows < tile.chunks()) {
    const BinaryRepeatParams params(1, a.Blocks(), b.Blocks(), kBlock, a.AlongRow(), b.AlongRow());
    const uint32_t repeats = tile.size / kLanes, done = repeats * kLanes;
    for (uint32_t r = 0; r < tile.rows; ++r) {
      if (repeats > 0) Op::Do(to[r * tile.width], a.At(r, 0), b.At(r, 0), kLanes, repeats, params);
      if (done < tile.size) {
        Op::Do(to[r * tile.width + done], a.At(r, done), b.At(r, done), tile.size - done, 1, params);
      }
    }
  } else {
    const BinaryRepeatParams params(1, a.Blocks(), b.Blocks(), tile.width / kBlock, a.ToNextRow(),
                                    b.ToNextRow());
    for (uint32_t at = 0; at < tile.size; at += kLanes) {
      Op::Do(to[at], a.At(0, at), b.At(0, at), Smaller(kLanes, tile.size - at), tile.rows, params);
    }
  }
}

// The 64 lanes of each row's repeats, folded: lanes[row * 64 + i] is over elements i, i + 64, i + 128 ... of the row.
template <class Op>
__aicore__ inline void FoldToLanes(const Floats& lanes, const Floats& x, float neutral, const Tile& tile) {
  const bool down = tile.rows >= tile.chunks(), begun = down && tile.size >= kLanes;
  if (begun) {  // with the first of them
    AscendC::Adds(lanes, x, 0.0f, kLanes, tile.rows, UnaryRepeatParams(1, 1, kBlock, tile.width / kBlock));
  } else {
    AscendC::Duplicate(lanes, neutral, tile.rows * kLanes);
  }
  if (!down) {
    const BinaryRepeatParams params(1, 1, 1, 0, 0, kBlock);  // every repeat into the same lanes
    const uint32_t repeats = tile.size / kLanes, done = repeats * kLanes;
    for (uint32_t r = 0; r < tile.rows; ++r) {
      const Floats mine = lanes[r * kLanes];
      if (repeats > 0) Op::Do(mine, mine, x[r * tile.width], kLanes, repeats, params);
      if (done < tile.size) Op::Do(mine, mine, x[r * tile.width + done], tile.size - done, 1, params);
    }
  } else {
    const BinaryRepeatParams params(1, 1, 1, kBlock, kBlock, tile.width / kBlock);
    for (uint32_t at = begun ? kLanes : 0; at < tile.size; at += kLanes) {
      Op::Do(lanes, lanes, x[at], Smaller(kLanes, tile.size - at), tile.rows, params);
    }
  }
}
__aicore__ inline void SumOfRows(const Floats& to, const Floats& x, const Floats& lanes, const Tile& tile) {
  FoldToLanes<Plus>(lanes, x, 0.0f, tile);
  AscendC::WholeReduceSum(to, lanes, kLanes, tile.rows, 1, 1, kBlock);
}
__aicore__ inline void MaxOfRows(const Floats& to, const Floats& x, const Floats& lanes, const Tile& tile) {
  FoldToLanes<Larger>(lanes, x, -kInfinity, tile);
  AscendC::WholeReduceMax(to, lanes, kLanes, tile.rows, 1, 1, kBlock, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
}
__aicore__ inline void MinOfRows(const Floats& to, const Floats& x, const Floats& lanes, const Tile& tile) {
  FoldToLanes<Lesser>(lanes, x, kInfinity, tile);
  AscendC::WholeReduceMin(to, lanes, kLanes, tile.rows, 1, 1, kBlock, AscendC::ReduceOrder::ORDER_ONLY_VALUE);
}

}  // namespace formula
