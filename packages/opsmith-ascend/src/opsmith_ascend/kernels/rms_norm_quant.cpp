// q = int8(y / scale + offset) of y = x / sqrt(mean(x^2) + eps) * weight + bias, with a scale for all rows or one of each.
#include "rms_norm_quant_tiling.h"
#include "rows.h"

using namespace AscendC;

template <typename T, typename W>
class RmsNormQuant {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR weight, GM_ADDR bias, GM_ADDR scale, GM_ADDR offset,
                              GM_ADDR q, GM_ADDR s, const RmsNormQuantTilingData& tiling, TPipe* pipe) {
    t = tiling;
    tile = {0, t.columns, t.pitch};
    xGlobal.SetGlobalBuffer((__gm__ T*)x);
    qGlobal.SetGlobalBuffer((__gm__ int8_t*)q);
    sGlobal.SetGlobalBuffer((__gm__ float*)s);
    const uint32_t numbers = uint32_t(opsmith::AlignUp(t.rowsPerTile, 8));
    const uint32_t elements = t.rowsPerTile * t.pitch;
    pipe->InitBuffer(xQueue, opsmith::kBufferNum, elements * sizeof(T));
    pipe->InitBuffer(qQueue, opsmith::kBufferNum, elements);
    pipe->InitBuffer(sQueue, opsmith::kBufferNum, numbers * sizeof(float));
    pipe->InitBuffer(valueBuf, elements * sizeof(float));
    pipe->InitBuffer(spareBuf, elements * sizeof(float));
    pipe->InitBuffer(laneBuf, t.rowsPerTile * opsmith::kLanes * sizeof(float));
    pipe->InitBuffer(spreadBuf, numbers * opsmith::kBlock * sizeof(float));
    pipe->InitBuffer(numberBuf, 2 * numbers * sizeof(float));
    values = valueBuf.template Get<float>();
    spare = spareBuf.template Get<float>();
    sums = numberBuf.template Get<float>();
    largest = sums[numbers];
    // What lies behind the columns of a row is never a result, but whole tiles go over it.
    Duplicate(values, 0.0f, elements);
    Duplicate(sums, 0.0f, 2 * numbers);
    if (t.normalize) {
      pipe->InitBuffer(weightBuf, t.pitch * sizeof(float));
      GlobalTensor<W> weightGlobal;
      weightGlobal.SetGlobalBuffer((__gm__ W*)weight);
      opsmith::LoadRow(weightBuf.template Get<float>(), spare, weightGlobal, t.columns);
    }
    if (t.bias) {
      pipe->InitBuffer(biasBuf, t.pitch * sizeof(float));
      GlobalTensor<DTYPE_BIAS> biasGlobal;
      biasGlobal.SetGlobalBuffer((__gm__ DTYPE_BIAS*)bias);
      opsmith::LoadRow(biasBuf.template Get<float>(), spare[t.pitch / 2], biasGlobal, t.columns);
    }
    if (t.fixed) {
      GlobalTensor<float> number;
      number.SetGlobalBuffer((__gm__ float*)scale);
      step = number.GetValue(0);
      number.SetGlobalBuffer((__gm__ float*)offset);
      shift = number.GetValue(0);
    }
  }

  __aicore__ inline void Process() {
    const uint64_t tiles = opsmith::CeilDiv(t.rows, t.rowsPerTile);
    const uint64_t first = tiles * GetBlockIdx() / t.blocks, last = tiles * (GetBlockIdx() + 1) / t.blocks;
    for (uint64_t i = first; i < last; ++i) {
      row = i * t.rowsPerTile;
      tile.rows = uint32_t(opsmith::Min(t.rowsPerTile, t.rows - row));
      opsmith::Fetch(xQueue, xGlobal[row * t.stride], tile, t.stride);
      Compute();
      opsmith::Leave(qGlobal[row * t.columns], qQueue, tile, t.columns);
      if (!t.fixed) opsmith::Leave(sGlobal[row], sQueue, opsmith::Line(tile.rows), tile.rows);
    }
  }

 private:
  __aicore__ inline void Compute() {
    LocalTensor<T> x = xQueue.template DeQue<T>();
    const LocalTensor<float> wide = opsmith::WidenTile(x, values, tile);
    const LocalTensor<float> spread = spreadBuf.template Get<float>();
    const LocalTensor<float> lanes = laneBuf.template Get<float>();
    const uint32_t count = tile.rows * t.pitch;
    const opsmith::Operand all = opsmith::Whole(values, tile);
    if (t.normalize) {
      opsmith::OverRootMeanSquares(values, wide, spare, sums, spread, lanes, t.eps, tile);
      opsmith::Apply<opsmith::Times>(values, all, opsmith::Columns(weightBuf.template Get<float>()), tile);
      if (t.bias)
        opsmith::Apply<opsmith::Plus>(values, all, opsmith::Columns(biasBuf.template Get<float>()), tile);
    } else if constexpr (opsmith::kIsFloat<T>) {
      Duplicate(spread, 1.0f, tile.rows * opsmith::kBlock);
      opsmith::Apply<opsmith::Times>(values, opsmith::Whole(wide, tile), opsmith::Blocks(spread), tile);
    }
    xQueue.FreeTensor(x);
    if (t.fixed) {
      Duplicate(spread, step, tile.rows * opsmith::kBlock);
      opsmith::Apply<opsmith::Over>(values, all, opsmith::Blocks(spread), tile);
      Adds(values, values, shift, count);
    } else {
      LocalTensor<float> s = sQueue.template AllocTensor<float>();
      Abs(spare, values, count);
      opsmith::MaxOfRows(largest, spare, lanes, tile);
      Duplicate(sums, 127.0f, tile.rows);
      Div(s, largest, sums, tile.rows);
      Maxs(largest, s, 1.17549435e-38f, tile.rows);  // a row of zeros is divided by this, and stays one
      opsmith::Apply<opsmith::Over>(values, all, opsmith::PerRow(largest, spread, tile), tile);
      sQueue.EnQue(s);
    }
    LocalTensor<int8_t> q = qQueue.template AllocTensor<int8_t>();
    opsmith::ToInt8(q, values, count);
    qQueue.EnQue(q);
  }

  RmsNormQuantTilingData t;
  opsmith::Tile tile;
  GlobalTensor<T> xGlobal;
  GlobalTensor<int8_t> qGlobal;
  GlobalTensor<float> sGlobal;
  TQue<TPosition::VECIN, opsmith::kBufferNum> xQueue;
  TQue<TPosition::VECOUT, opsmith::kBufferNum> qQueue, sQueue;
  TBuf<TPosition::VECCALC> valueBuf, spareBuf, laneBuf, spreadBuf, numberBuf, weightBuf, biasBuf;
  LocalTensor<float> values, spare, sums, largest;
  uint64_t row;
  float step = 1.0f, shift = 0.0f;
};

extern "C" __global__ __aicore__ void rms_norm_quant(GM_ADDR x, GM_ADDR weight, GM_ADDR bias, GM_ADDR scale,
                                                     GM_ADDR offset, GM_ADDR q, GM_ADDR s, GM_ADDR workspace,
                                                     GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(RmsNormQuantTilingData);
  GET_TILING_DATA_WITH_STRUCT(RmsNormQuantTilingData, data, tiling);
  TPipe pipe;
  RmsNormQuant<DTYPE_X, DTYPE_WEIGHT> kernel;
  kernel.Init(x, weight, bias, scale, offset, q, s, data, &pipe);
  kernel.Process();
}
