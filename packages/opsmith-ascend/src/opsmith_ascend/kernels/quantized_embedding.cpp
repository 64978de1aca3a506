// y[i] = table[ids[i]] * scale[ids[i]]: rows of int8, by id, dequantized while they are gathered.
#include "quantized_embedding_tiling.h"
#include "rows.h"

using namespace AscendC;

template <typename I, typename T>
class QuantizedEmbedding {
 public:
  __aicore__ inline void Init(GM_ADDR ids, GM_ADDR table, GM_ADDR scale, GM_ADDR y,
                              const QuantizedEmbeddingTilingData& tiling, TPipe* pipe) {
    t = tiling;
    idGlobal.SetGlobalBuffer((__gm__ I*)ids);
    tableGlobal.SetGlobalBuffer((__gm__ int8_t*)table);
    scaleGlobal.SetGlobalBuffer((__gm__ float*)scale);
    yGlobal.SetGlobalBuffer((__gm__ T*)y);
    const uint32_t elements = t.tokensPerTile * t.pitch;
    pipe->InitBuffer(rowQueue, opsmith::kBufferNum, elements);
    pipe->InitBuffer(scaleQueue, opsmith::kBufferNum, t.tokensPerTile * opsmith::kDataBlock);
    pipe->InitBuffer(yQueue, opsmith::kBufferNum, elements * sizeof(T));
    pipe->InitBuffer(wideBuf, elements * sizeof(float));
    pipe->InitBuffer(halfBuf, elements * sizeof(half));
    pipe->InitBuffer(spreadBuf, (t.tokensPerTile + 7) * opsmith::kDataBlock);
    pipe->InitBuffer(idBuf, t.tokensPerTile * sizeof(int64_t));
  }

  __aicore__ inline void Process() {
    const uint64_t across = opsmith::CeilDiv(t.columns, t.columnsPerTile);
    const uint64_t tiles = opsmith::CeilDiv(t.tokens, t.tokensPerTile) * across;
    const uint64_t first = tiles * GetBlockIdx() / t.blocks, last = tiles * (GetBlockIdx() + 1) / t.blocks;
    for (uint64_t i = first; i < last; ++i) {
      token = i / across * t.tokensPerTile;
      column = i % across * t.columnsPerTile;
      tile = {uint32_t(opsmith::Min(t.tokensPerTile, t.tokens - token)),
              uint32_t(opsmith::Min(t.columnsPerTile, t.columns - column)), t.pitch};
      CopyIn();
      Compute();
      opsmith::Leave(yGlobal[token * t.columns + column], yQueue, tile, t.columns);
    }
  }

 private:
  // The scalar pipe reads the ids and starts a copy for each row and its scale; the copies are many in flight.
  __aicore__ inline void CopyIn() {
    const LocalTensor<I> ids = idBuf.template Get<I>();
    opsmith::CopyIn(ids, idGlobal[token], opsmith::Line(tile.rows), tile.rows);
    opsmith::Order<HardEvent::MTE2_S>();
    LocalTensor<int8_t> rows = rowQueue.template AllocTensor<int8_t>();
    LocalTensor<float> scales = scaleQueue.template AllocTensor<float>();
    const DataCopyExtParams row(1, tile.size, 0, 0, 0), number(1, sizeof(float), 0, 0, 0);
    const uint32_t behind = opsmith::Padded<int8_t>(tile.size) - tile.size;
    const DataCopyPadExtParams<int8_t> zeros(true, 0, behind, int8_t(0));
    const DataCopyPadExtParams<float> padded(true, 0, opsmith::kBlock - 1, 0.0f);
    for (uint32_t r = 0; r < tile.rows; ++r) {
      const uint64_t id = uint64_t(ids.GetValue(r));
      DataCopyPad(rows[r * t.pitch], tableGlobal[id * t.stride + column], row, zeros);
      DataCopyPad(scales[r * opsmith::kBlock], scaleGlobal[id * t.scaleStride], number, padded);
    }
    rowQueue.EnQue(rows);
    scaleQueue.EnQue(scales);
  }

  __aicore__ inline void Compute() {
    const LocalTensor<float> wide = wideBuf.template Get<float>(), spread = spreadBuf.template Get<float>();
    const LocalTensor<half> narrow = halfBuf.template Get<half>();
    LocalTensor<float> scales = scaleQueue.template DeQue<float>();
    // Each scale is the first of 8 numbers, which become 8 data blocks: the first is it eight times, the others of
    // zeros, which the next scale overwrites.
    for (uint32_t r = 0; r < tile.rows; ++r)
      Brcb(spread[r * opsmith::kBlock], scales[r * opsmith::kBlock], 1, BrcbRepeatParams(1, 8));
    scaleQueue.FreeTensor(scales);
    LocalTensor<int8_t> rows = rowQueue.template DeQue<int8_t>();
    // At the end of rows in pieces, tiles have fewer columns and gaps behind them, which hold nothing.
    const bool whole = opsmith::Padded<int8_t>(tile.size) == t.pitch;
    const uint32_t parts = whole ? 1 : tile.rows, count = whole ? tile.rows * t.pitch : tile.size;
    for (uint32_t r = 0; r < parts; ++r) {
      Cast(narrow[r * t.pitch], rows[r * t.pitch], RoundMode::CAST_NONE, count);
      Cast(wide[r * t.pitch], narrow[r * t.pitch], RoundMode::CAST_NONE, count);
    }
    rowQueue.FreeTensor(rows);
    LocalTensor<T> y = yQueue.template AllocTensor<T>();
    if constexpr (opsmith::kIsFloat<T>) {
      opsmith::Apply<opsmith::Times>(y, opsmith::Whole(wide, tile), opsmith::Blocks(spread), tile);
    } else {
      opsmith::Apply<opsmith::Times>(wide, opsmith::Whole(wide, tile), opsmith::Blocks(spread), tile);
      for (uint32_t r = 0; r < parts; ++r)
        Cast(y[r * t.pitch], wide[r * t.pitch], RoundMode::CAST_RINT, count);
    }
    yQueue.EnQue(y);
  }

  QuantizedEmbeddingTilingData t;
  opsmith::Tile tile;
  GlobalTensor<I> idGlobal;
  GlobalTensor<int8_t> tableGlobal;
  GlobalTensor<float> scaleGlobal;
  GlobalTensor<T> yGlobal;
  TQue<TPosition::VECIN, opsmith::kBufferNum> rowQueue, scaleQueue;
  TQue<TPosition::VECOUT, opsmith::kBufferNum> yQueue;
  TBuf<TPosition::VECCALC> wideBuf, halfBuf, spreadBuf, idBuf;
  uint64_t token, column;
};

extern "C" __global__ __aicore__ void quantized_embedding(GM_ADDR ids, GM_ADDR table, GM_ADDR scale,
                                                          GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(QuantizedEmbeddingTilingData);
  GET_TILING_DATA_WITH_STRUCT(QuantizedEmbeddingTilingData, data, tiling);
  TPipe pipe;
  QuantizedEmbedding<DTYPE_IDS, DTYPE_Y> kernel;
  kernel.Init(ids, table, scale, y, data, &pipe);
  kernel.Process();
}
