// y = exp(s - max(s)) / sum(exp(s - max(s))) along rows, with s = scale * x + mask, and causal rows cut.
//
// A row in local memory is read once. A longer one is read twice: the first time its maximum and its sum are kept
// online, piece by piece, and the sum is brought to each new maximum. To subtract the maximum costs no memory traffic
// here, so the automatic method is the stable one; only "fast" leaves the maximum out.
#include "rows.h"
#include "softmax_tiling.h"

namespace opsmith {

using namespace AscendC;

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
    pipe->InitBuffer(statistics, kSoftmaxStatistics + t.rowsPerTile * kLanes * sizeof(float));
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
    const Floats s = statistics.template Get<float>();
    largest = s, sum = s[kSoftmaxMaxRows], next = s[2 * kSoftmaxMaxRows], part = s[3 * kSoftmaxMaxRows];
    ones = s[4 * kSoftmaxMaxRows], blocks = s[8 * kSoftmaxMaxRows], lanes = s[16 * kSoftmaxMaxRows];
    Duplicate(s, 1.0f, 8 * kSoftmaxMaxRows);
  }

  __aicore__ inline void Process() {
    const uint64_t tiles = CeilDiv(t.rows, t.rowsPerTile);
    const uint64_t first = tiles * GetBlockIdx() / t.blocks, last = tiles * (GetBlockIdx() + 1) / t.blocks;
    for (uint64_t i = first; i < last; ++i) {
      row = i * t.rowsPerTile;
      Rows();
    }
  }

 private:
  // Rows that fit local memory are one piece, which stays there. A longer row is read twice.
  __aicore__ inline void Rows() {
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Arrive(c);
      const Floats v = Load(c);
      Gather(v, c);
      if (t.columnsPerTile == t.columns) {
        Inverse();
        return Finish(v, c);
      }
      Drop();
    }
    Inverse();
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Arrive(c);
      const Floats v = Load(c);
      Power(v);
      Finish(v, c);
    }
  }

  // The maximum of the pieces so far, and the sum of powers below it; the sum so far is of powers above its maximum so far.
  __aicore__ inline void Gather(const Floats& v, uint32_t column) {
    const uint32_t n = Eights();
    if (!t.fast) {
      MaxOfRows(column ? next : largest, v, lanes, tile);
      if (column) {
        Max(next, next, largest, n);
        Sub(part, largest, next, n);
        Exp(part, part, n);
        Mul(sum, sum, part, n);
        Muls(largest, next, 1.0f, n);
      } else {
        Maxs(largest, largest, kLowest, n);
      }
    }
    Power(v);
    SumOfRows(column ? part : sum, v, lanes, tile);
    if (column) Add(sum, sum, part, n);
  }

  __aicore__ inline void Power(const Floats& v) {
    if (!t.fast) Apply<Minus>(v, Whole(v, tile), PerRow(largest, blocks, tile), tile);
    Exp(v, v, tile.rows * tile.width);
  }

  __aicore__ inline uint32_t Eights() const { return RoundedUp(tile.rows, kBlock); }

  __aicore__ inline void Arrive(uint32_t column) {
    tile = RowsOf<T>(opsmith::Min(t.rowsPerTile, t.rows - row),
                     opsmith::Min(t.columnsPerTile, t.columns - column));
    Fetch(inQueue, xGlobal[row * t.columns + column], tile, t.columns);
    if (!t.mask) return;
    LocalTensor<T> m = inQueue.template AllocTensor<T>();
    for (uint32_t r = 0; r < tile.rows; ++r) {
      const uint64_t matrix = (row + r) / t.inner;
      const uint64_t at = matrix / t.middle * t.maskOuter + matrix % t.middle * t.maskMiddle +
                          (row + r) % t.inner * t.maskInner;
      CopyIn(m[r * tile.width], maskGlobal[at + column], Line(tile.size), tile.size);
    }
    inQueue.EnQue(m);
  }

  // scale * x + mask in float32, minus infinity where the causal rule hides a column. What float32 tensors hold is
  // worked on where the queue put it, until Drop().
  __aicore__ inline Floats Load(uint32_t column) {
    const uint32_t n = tile.rows * tile.width;
    held = inQueue.template DeQue<T>();
    const Floats v = Widen(held, wide, n);
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
        Muls(seen, place, -1.0f, tile.size);
        Adds(seen, seen, float(limit) + 0.5f, tile.size);
        Muls(seen, seen, kInfinity, tile.size);
        Min(v[r * tile.width], v[r * tile.width], seen, tile.size);
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

  __aicore__ inline void Finish(const Floats& v, uint32_t column) {
    LocalTensor<T> y = outQueue.template AllocTensor<T>();
    Floats last = v;  // where the last operation writes
    if constexpr (kIsFloat<T>) last = y;
    Apply<Times>(last, Whole(v, tile), PerRow(sum, blocks, tile), tile);
    if constexpr (!kIsFloat<T>) Cast(y, v, RoundMode::CAST_RINT, tile.rows * tile.width);
    Drop();
    outQueue.EnQue(y);
    Leave(yGlobal[row * t.columns + column], outQueue, tile, t.columns);
  }

  SoftmaxTilingData t;
  GlobalTensor<T> xGlobal, maskGlobal, yGlobal;
  TQue<TPosition::VECIN, kBufferNum> inQueue;
  TQue<TPosition::VECOUT, kBufferNum> outQueue;
  TBuf<TPosition::VECCALC> inside, statistics, places;
  Floats wide, other, blocks, lanes, place, seen;
  Floats largest, sum, next, part, ones;  // a number a row
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
