// y = gate * sigmoid(gate) * up: one pass, every element read once and written once.
#include "rows.h"
#include "silu_mul_tiling.h"

using namespace AscendC;

template <typename T>
class SiluMul {
 public:
  __aicore__ inline void Init(GM_ADDR gate, GM_ADDR up, GM_ADDR y, const SiluMulTilingData& tiling,
                              TPipe* pipe) {
    t = tiling;
    gateGlobal.SetGlobalBuffer((__gm__ T*)gate);
    upGlobal.SetGlobalBuffer(tiling.packed ? (__gm__ T*)gate + tiling.columns : (__gm__ T*)up);
    yGlobal.SetGlobalBuffer((__gm__ T*)y);
    length = t.rowsPerTile * opsmith::Padded<T>(t.columnsPerTile);
    pipe->InitBuffer(gateQueue, opsmith::kBufferNum, length * sizeof(T));
    pipe->InitBuffer(upQueue, opsmith::kBufferNum, length * sizeof(T));
    pipe->InitBuffer(yQueue, opsmith::kBufferNum, length * sizeof(T));
    pipe->InitBuffer(wide, (opsmith::kIsFloat<T> ? 1 : 2) * length * sizeof(float));
  }

  __aicore__ inline void Process() {
    const uint64_t across = opsmith::CeilDiv(t.columns, t.columnsPerTile);
    const uint64_t tiles = opsmith::CeilDiv(t.rows, t.rowsPerTile) * across;
    const uint64_t first = tiles * GetBlockIdx() / t.blocks, last = tiles * (GetBlockIdx() + 1) / t.blocks;
    for (uint64_t i = first; i < last; ++i) {
      row = i / across * t.rowsPerTile;
      column = i % across * t.columnsPerTile;
      tile = opsmith::RowsOf<T>(opsmith::Min(t.rowsPerTile, t.rows - row),
                                opsmith::Min(t.columnsPerTile, t.columns - column));
      opsmith::Fetch(gateQueue, gateGlobal[row * t.stride + column], tile, t.stride);
      opsmith::Fetch(upQueue, upGlobal[row * t.stride + column], tile, t.stride);
      Compute(tile.rows * tile.width);
      opsmith::Leave(yGlobal[row * t.columns + column], yQueue, tile, t.columns);
    }
  }

 private:
  __aicore__ inline void Compute(uint32_t count) {
    LocalTensor<T> gate = gateQueue.template DeQue<T>();
    const LocalTensor<float> spare = wide.template Get<float>();
    const LocalTensor<float> room = spare[opsmith::kIsFloat<T> ? 0 : length];
    const LocalTensor<float> g = opsmith::Widen(gate, room, count);
    // silu(g) = g / (1 + exp(-g)); where the exponential overflows, this is 0 as it should be.
    Muls(spare, g, -1.0f, count);
    Exp(spare, spare, count);
    Adds(spare, spare, 1.0f, count);
    Div(spare, g, spare, count);
    gateQueue.FreeTensor(gate);
    LocalTensor<T> up = upQueue.template DeQue<T>(), y = yQueue.template AllocTensor<T>();
    if constexpr (opsmith::kIsFloat<T>) {
      Mul(y, spare, up, count);
    } else {
      Mul(spare, spare, opsmith::Widen(up, room, count), count);
      Cast(y, spare, RoundMode::CAST_RINT, count);
    }
    upQueue.FreeTensor(up);
    yQueue.EnQue(y);
  }

  SiluMulTilingData t;
  GlobalTensor<T> gateGlobal, upGlobal, yGlobal;
  TQue<TPosition::VECIN, opsmith::kBufferNum> gateQueue, upQueue;
  TQue<TPosition::VECOUT, opsmith::kBufferNum> yQueue;
  TBuf<TPosition::VECCALC> wide;
  opsmith::Tile tile;
  uint64_t row, column;
  uint32_t length;
};

extern "C" __global__ __aicore__ void silu_mul(GM_ADDR gate, GM_ADDR up, GM_ADDR y, GM_ADDR workspace,
                                               GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(SiluMulTilingData);
  GET_TILING_DATA_WITH_STRUCT(SiluMulTilingData, data, tiling);
  TPipe pipe;
  SiluMul<DTYPE_GATE> kernel;
  kernel.Init(gate, up, y, data, &pipe);
  kernel.Process();
}
