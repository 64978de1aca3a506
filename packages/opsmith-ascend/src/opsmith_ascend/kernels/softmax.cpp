// y = exp(s - max(s)) / sum(exp(s - max(s))) along rows, with s = scale * x + mask, and causal rows cut.
//
// A row in local memory is read once. A longer one is read twice: the first time its maximum and its sum are kept
// online, piece by piece, and the sum is brought to each new maximum. To subtract the maximum costs no memory traffic
// here, so the automatic method is the stable one; only "fast" leaves the maximum out.
#include "rows.h"
#include "softmax_tiling.h"

namespace opsmith {

using namespace AscendC;

constexpr float kInfinity = __builtin_huge_valf();
constexpr float kLowest = -3.4e38f;  // stands for the maximum of a row in which everything is masked

template <typename T>
class Softmax {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR mask, GM_ADDR y, const SoftmaxTilingData& tiling,
                              TPipe* pipe) {
    t = tiling;
    xGlobal.SetGlobalBuffer((__gm__ T*)x);
    maskGlobal.SetGlobalBuffer((__gm__ T*)mask);
    yGlobal.SetGlobalBuffer((__gm__ T*)y);
    const uint32_t padded = Padded<T>(t.columnsPerTile), length = t.rowsPerTile * padded;
    pipe->InitBuffer(inQueue, t.mask ? 2 * kBufferNum : kBufferNum, length * sizeof(T));
    pipe->InitBuffer(outQueue, kBufferNum, length * sizeof(T));
    pipe->InitBuffer(statistics, 8 * kStatBytes + kSpreadBytes + 1024);
    if constexpr (!kIsFloat<T>) {
      pipe->InitBuffer(inside, (t.mask ? 2 : 1) * length * sizeof(float));
      wide = inside.template Get<float>();
      other = wide[t.mask ? length : 0];
    }
    if (t.causal) {
      pipe->InitBuffer(places, 2 * padded * sizeof(float));
      place = places.template Get<float>();
      seen = place[padded];
      CreateVecIndex(place, 0.0f, padded);
    }
    const LocalTensor<float> s = statistics.template Get<float>();
    largest = s, sum = s[kMaxRows], next = s[2 * kMaxRows], part = s[3 * kMaxRows], ones = s[4 * kMaxRows];
    spread = s[8 * kMaxRows], work = s[16 * kMaxRows];
    Duplicate(s, 1.0f, 8 * kMaxRows);
  }

  __aicore__ inline void Process() {
    const uint64_t tiles = CeilDiv(t.rows, t.rowsPerTile);
    const uint64_t first = tiles * GetBlockIdx() / t.blocks, last = tiles * (GetBlockIdx() + 1) / t.blocks;
    for (uint64_t i = first; i < last; ++i) {
      row = i * t.rowsPerTile;
      if (t.columnsPerTile == t.columns) {
        tile = {uint32_t(Min(t.rowsPerTile, t.rows - row)), t.columns, Padded<T>(t.columns)};
        WholeRows();
      } else {
        LongRow();
      }
    }
  }

 private:
  __aicore__ inline void WholeRows() {
    CopyIn(0);
    const LocalTensor<float> v = Load(0);
    if (!t.fast) {
      FoldRows<Largest>(largest, v, spread, work, tile);
      Maxs(largest, largest, kLowest, Eights());
      SpreadRows(spread, largest, tile.rows);
      WithRowNumber<Minus>(v, v, spread, tile);
    }
    Exp(v, v, tile.rows * tile.padded);
    FoldRows<Sum>(sum, v, spread, work, tile);
    Inverse();
    Finish(v, 0);
  }

  __aicore__ inline void LongRow() {
    Duplicate(largest, t.fast ? 0.0f : kLowest, 8);
    Duplicate(sum, 0.0f, 8);
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Piece(c);
      CopyIn(c);
      const LocalTensor<float> v = Load(c);
      if (!t.fast) {
        FoldRows<Largest>(next, v, spread, work, tile);
        Max(next, next, largest, 8);
        Sub(part, largest, next, 8);  // the sum so far is of exponentials above the maximum so far
        Exp(part, part, 8);
        Mul(sum, sum, part, 8);
        Muls(largest, next, 1.0f, 8);
        SpreadRows(spread, largest, 1);
        WithRowNumber<Minus>(v, v, spread, tile);
      }
      Exp(v, v, tile.padded);
      FoldRows<Sum>(part, v, spread, work, tile);
      Add(sum, sum, part, 8);
      Drop();
    }
    Inverse();
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Piece(c);
      CopyIn(c);
      const LocalTensor<float> v = Load(c);
      if (!t.fast) {
        SpreadRows(spread, largest, 1);
        WithRowNumber<Minus>(v, v, spread, tile);
      }
      Exp(v, v, tile.padded);
      Finish(v, c);
    }
  }

  __aicore__ inline void Piece(uint32_t column) {
    const uint32_t columns = Min(t.columnsPerTile, t.columns - column);
    tile = {1, columns, Padded<T>(columns)};
  }

  __aicore__ inline uint32_t Eights() const { return (tile.rows + 7) / 8 * 8; }

  __aicore__ inline void CopyIn(uint32_t column) {
    LocalTensor<T> x = inQueue.template AllocTensor<T>();
    CopyRowsIn(x, xGlobal[row * t.columns + column], tile.rows, tile.columns, t.columns);
    inQueue.EnQue(x);
    if (!t.mask) return;
    LocalTensor<T> m = inQueue.template AllocTensor<T>();
    for (uint32_t r = 0; r < tile.rows; ++r) {
      const uint64_t matrix = (row + r) / t.inner;
      const uint64_t at = matrix / t.middle * t.maskOuter + matrix % t.middle * t.maskMiddle +
                          (row + r) % t.inner * t.maskInner;
      CopyRowsIn(m[r * tile.padded], maskGlobal[at + column], 1, tile.columns, tile.columns);
    }
    inQueue.EnQue(m);
  }

  // scale * x + mask in float32, minus infinity where the causal rule hides a column. What float32 tensors hold is
  // worked on where the queue put it, until Drop().
  __aicore__ inline LocalTensor<float> Load(uint32_t column) {
    const uint32_t n = tile.rows * tile.padded;
    held = inQueue.template DeQue<T>();
    const LocalTensor<float> v = Widen(held, wide, n);
    if constexpr (!kIsFloat<T>) inQueue.FreeTensor(held);
    if (t.scale != 1.0f) Muls(v, v, t.scale, n);
    if (t.mask) {
      LocalTensor<T> m = inQueue.template DeQue<T>();
      Add(v, v, Widen(m, other, n), n);
      inQueue.FreeTensor(m);
    }
    if (t.causal) {
      for (uint32_t r = 0; r < tile.rows; ++r) {
        // Column j is seen by row l of inner up to j = l + columns - inner: plus or minus infinity by the sign
        // of what is left, and the smaller of that and the element.
        const int64_t limit = int64_t((row + r) % t.inner) + t.columns - int64_t(t.inner) - column;
        Muls(seen, place, -1.0f, tile.columns);
        Adds(seen, seen, float(limit) + 0.5f, tile.columns);
        Muls(seen, seen, kInfinity, tile.columns);
        Min(v[r * tile.padded], v[r * tile.padded], seen, tile.columns);
      }
    }
    return v;
  }

  __aicore__ inline void Drop() {
    if constexpr (kIsFloat<T>) inQueue.FreeTensor(held);
  }

  // sum = 1 / sum. The largest element of a row gives 1, so less means that everything was masked: then zeros.
  __aicore__ inline void Inverse() {
    Maxs(sum, sum, t.fast ? 1.0e-37f : 1.0f, Eights());
    Div(sum, ones, sum, Eights());
  }

  __aicore__ inline void Finish(const LocalTensor<float>& v, uint32_t column) {
    SpreadRows(spread, sum, tile.rows);
    LocalTensor<T> y = outQueue.template AllocTensor<T>();
    if constexpr (kIsFloat<T>) {
      WithRowNumber<Times>(y, v, spread, tile);
    } else {
      WithRowNumber<Times>(v, v, spread, tile);
      Cast(y, v, RoundMode::CAST_RINT, tile.rows * tile.padded);
    }
    Drop();
    outQueue.EnQue(y);
    y = outQueue.template DeQue<T>();
    CopyRowsOut(yGlobal[row * t.columns + column], y, tile.rows, tile.columns, t.columns);
    outQueue.FreeTensor(y);
  }

  SoftmaxTilingData t;
  GlobalTensor<T> xGlobal, maskGlobal, yGlobal;
  TQue<TPosition::VECIN, kBufferNum> inQueue;
  TQue<TPosition::VECOUT, kBufferNum> outQueue;
  TBuf<TPosition::VECCALC> inside, statistics, places;
  LocalTensor<float> wide, other, spread, work, place, seen;
  LocalTensor<float> largest, sum, next, part, ones;  // a number a row
  LocalTensor<T> held;
  Tile tile;
  uint64_t row;
};

}  // namespace opsmith

using namespace AscendC;

extern "C" __global__ __aicore__ void softmax(GM_ADDR x, GM_ADDR mask, GM_ADDR y, GM_ADDR workspace,
                                              GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(SoftmaxTilingData);
  GET_TILING_DATA_WITH_STRUCT(SoftmaxTilingData, data, tiling);
  TPipe pipe;
  opsmith::Softmax<DTYPE_X> kernel;
  kernel.Init(x, mask, y, data, &pipe);
  kernel.Process();
}
