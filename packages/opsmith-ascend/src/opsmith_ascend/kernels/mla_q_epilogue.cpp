// q_out[t, h] = q[t, h, :nope] @ wuk[h], q_rope[t, h] = rope(q[t, h, nope:]): queries, brought to where the cache is. For the
// few tokens of decoding, which wait for the weight's way from memory: vector cores read it once, and multiply by rows.
#include "mla_q_epilogue_tiling.h"
#include "rotary.h"

using namespace AscendC;

template <typename T, typename C, typename L>
class MlaQEpilogue {
 public:
  __aicore__ inline void Init(GM_ADDR q, GM_ADDR wuk, GM_ADDR cos, GM_ADDR sin, GM_ADDR scale, GM_ADDR q_out,
                              GM_ADDR q_rope, const MlaQEpilogueTilingData& tiling, TPipe* pipe) {
    t = tiling;
    qGlobal.SetGlobalBuffer((__gm__ T*)q);
    weightGlobal.SetGlobalBuffer((__gm__ T*)wuk);
    cosGlobal.SetGlobalBuffer((__gm__ C*)cos);
    sinGlobal.SetGlobalBuffer((__gm__ C*)sin);
    scaleGlobal.SetGlobalBuffer((__gm__ float*)scale);
    outGlobal.SetGlobalBuffer((__gm__ L*)q_out);
    ropeGlobal.SetGlobalBuffer(t.joint ? (__gm__ T*)q_out + t.kvLora : (__gm__ T*)q_rope);
    const uint32_t weight = t.nope * t.columnPitch, result = t.tokensPerTile * t.columnPitch;
    pipe->InitBuffer(weightQueue, opsmith::kBufferNum, weight * sizeof(T));
    pipe->InitBuffer(qQueue, opsmith::kBufferNum, t.tokensPerTile * t.nopePitch * sizeof(T));
    pipe->InitBuffer(outQueue, opsmith::kBufferNum, result * sizeof(L));
    pipe->InitBuffer(sumBuf, result * sizeof(float));
    if (!opsmith::kIsFloat<T>) pipe->InitBuffer(wideBuf, weight * sizeof(float));
    pipe->InitBuffer(qBuf, t.tokensPerTile * t.nopePitch * sizeof(float));
    pipe->InitBuffer(spreadBuf, (t.nope + 7) / 8 * 8 * opsmith::kDataBlock);
    pipe->InitBuffer(productBuf, t.nope * opsmith::kLanes * sizeof(float));
    if (sizeof(L) == 1) pipe->InitBuffer(roundBuf, result * sizeof(T));
    // What lies behind the columns of a row is never a result, but whole tiles go over it.
    Duplicate(sumBuf.template Get<float>(), 0.0f, result);
    if (t.rope == 0) return;
    const uint32_t turned = t.headsPerTile * t.ropePitch;
    pipe->InitBuffer(xQueue, opsmith::kBufferNum, turned * sizeof(T));
    pipe->InitBuffer(ropeQueue, opsmith::kBufferNum, turned * sizeof(T));
    pipe->InitBuffer(turnBuf, (2 * turned + 4 * t.ropePitch) * sizeof(float));
    pipe->InitBuffer(rotaryBuf, opsmith::Rotary::Bytes(t.headsPerTile, t.ropePitch));
    rotary.Init(rotaryBuf.template Get<float>(), t.headsPerTile, t.rope, t.ropePitch, t.turn, t.interleaved);
    if (t.turn) pipe->InitBuffer(tableQueue, opsmith::kBufferNum, 2 * t.ropePitch * sizeof(C));
  }

  __aicore__ inline void Process() {
    const uint64_t across = opsmith::CeilDiv(t.kvLora, t.columnsPerTile), products = t.heads * across;
    for (uint64_t i = Share(products, 0); i < Share(products, 1); ++i) {
      head = uint32_t(i / across);
      column = uint32_t(i % across) * t.columnsPerTile;
      weightTile = {t.nope, uint32_t(opsmith::Min(t.columnsPerTile, t.kvLora - column)), t.columnPitch};
      Absorb();
    }
    if (t.rope == 0) return;
    const uint64_t groups = opsmith::CeilDiv(t.heads, t.headsPerTile), turns = t.tokens * groups;
    for (uint64_t i = Share(turns, 0); i < Share(turns, 1); ++i) {
      token = i / groups;
      head = uint32_t(i % groups) * t.headsPerTile;
      Turn({uint32_t(opsmith::Min(t.headsPerTile, t.heads - head)), t.rope, t.ropePitch});
    }
  }

 private:
  __aicore__ inline uint64_t Share(uint64_t units, uint64_t after) const {
    return units * (GetBlockIdx() + after) / t.blocks;
  }

  // All tokens through some columns of one head's weight.
  __aicore__ inline void Absorb() {
    opsmith::Fetch(weightQueue, weightGlobal[uint64_t(head) * t.nope * t.kvLora + column], weightTile,
                   t.kvLora);
    LocalTensor<T> weight = weightQueue.template DeQue<T>();
    LocalTensor<float> wide;
    if constexpr (opsmith::kIsFloat<T>) {
      wide = weight;
    } else {
      wide = opsmith::WidenTile(weight, wideBuf.template Get<float>(), weightTile);
    }
    for (token = 0; token < t.tokens; token += t.tokensPerTile) {
      tile = {uint32_t(opsmith::Min(t.tokensPerTile, t.tokens - token)), weightTile.size, t.columnPitch};
      const LocalTensor<float> q = Queries();
      for (uint32_t r = 0; r < tile.rows; ++r) Multiply(r, q[r * t.nopePitch], wide);
      Finish();
      opsmith::Leave(outGlobal[(token * t.heads + head) * t.outRow + column], outQueue, tile,
                     uint64_t(t.heads) * t.outRow);
    }
    weightQueue.FreeTensor(weight);
  }

  // The tokens' queries of this head in float32, zeros behind them.
  __aicore__ inline LocalTensor<float> Queries() {
    const uint64_t stride = uint64_t(t.heads) * (t.nope + t.rope);
    opsmith::Fetch(qQueue, qGlobal[token * stride + uint64_t(head) * (t.nope + t.rope)],
                   {tile.rows, t.nope, t.nopePitch}, stride);
    LocalTensor<T> q = qQueue.template DeQue<T>();
    const LocalTensor<float> wide = qBuf.template Get<float>();
    if constexpr (opsmith::kIsFloat<T>) {
      DataCopy(wide, q, tile.rows * t.nopePitch);
    } else {
      Cast(wide, q, RoundMode::CAST_NONE, tile.rows * t.nopePitch);
    }
    qQueue.FreeTensor(q);
    return wide;
  }

  // sums[r] = q @ weight: every row of the weight times its number of q in one instruction for 64 columns; then halves
  // of the products are added, and halves of those: as many additions as rows, of an error that grows with their log.
  __aicore__ inline void Multiply(uint32_t r, const LocalTensor<float>& q, const LocalTensor<float>& weight) {
    const LocalTensor<float> spread = spreadBuf.template Get<float>(),
                             products = productBuf.template Get<float>();
    const LocalTensor<float> sums = sumBuf.template Get<float>();
    Brcb(spread, q, (t.nope + 7) / 8, BrcbRepeatParams(1, 8));
    const uint32_t step = t.columnPitch / opsmith::kBlock;
    for (uint32_t c = 0; c < tile.size; c += opsmith::kLanes) {
      const uint64_t mask = opsmith::Min(opsmith::kLanes, tile.size - c);
      Mul(products, weight[c], spread, mask, t.nope, BinaryRepeatParams(1, 1, 0, 8, step, 1));
      for (uint32_t rows = t.nope; rows > 1; rows -= rows / 2)
        Add(products, products, products[(rows - rows / 2) * opsmith::kLanes], mask, rows / 2,
            BinaryRepeatParams(1, 1, 1, 8, 8, 8));
      Adds(sums[r * t.columnPitch + c], products, 0.0f, mask, 1, UnaryRepeatParams(1, 1, 8, 8));
    }
  }

  __aicore__ inline void Finish() {
    const LocalTensor<float> sums = sumBuf.template Get<float>();
    const uint32_t count = tile.rows * t.columnPitch;
    LocalTensor<L> out = outQueue.template AllocTensor<L>();
    if constexpr (sizeof(L) == 1) {
      // The product is rounded as ever, and what was rounded is quantized.
      if constexpr (!opsmith::kIsFloat<T>) {
        const LocalTensor<T> rounded = roundBuf.template Get<T>();
        Cast(rounded, sums, RoundMode::CAST_RINT, count);
        Cast(sums, rounded, RoundMode::CAST_NONE, count);
      }
      Muls(sums, sums, scaleGlobal.GetValue(head), count);
      opsmith::ToInt8(out, sums, count);
    } else if constexpr (opsmith::kIsFloat<L>) {
      DataCopy(out, sums, count);
    } else {
      Cast(out, sums, RoundMode::CAST_RINT, count);
    }
    outQueue.EnQue(out);
  }

  // Some heads of one token, which share their row of the table.
  __aicore__ inline void Turn(const opsmith::Tile& heads) {
    const uint64_t row = token * t.heads + head;
    opsmith::Fetch(xQueue, qGlobal[row * (t.nope + t.rope) + t.nope], heads, t.nope + t.rope);
    LocalTensor<C> table;
    LocalTensor<float> cos, sin;
    const uint32_t pe = t.headsPerTile * t.ropePitch;
    const LocalTensor<float> room = turnBuf.template Get<float>(), rows = room[2 * pe];
    const opsmith::Tile one = {1, t.rope, t.ropePitch};
    if (t.turn) {
      table = tableQueue.template AllocTensor<C>();
      opsmith::CopyIn(table, cosGlobal[token * t.rope], one, t.rope);
      opsmith::CopyIn(table[t.ropePitch], sinGlobal[token * t.rope], one, t.rope);
      tableQueue.EnQue(table);
      table = tableQueue.template DeQue<C>();
      cos = opsmith::WidenTile(table, rows, one);
      sin = opsmith::WidenTile(table[t.ropePitch], rows[t.ropePitch], one);
    }
    LocalTensor<T> x = xQueue.template DeQue<T>();
    const LocalTensor<float> wide = opsmith::WidenTile(x, room, heads);
    LocalTensor<T> y = ropeQueue.template AllocTensor<T>();
    LocalTensor<float> turned = wide;
    if constexpr (opsmith::kIsFloat<T>) turned = y;
    rotary.Turn(turned, wide, cos, sin, true, room[pe], rows[2 * t.ropePitch], rows[3 * t.ropePitch], heads);
    opsmith::NarrowTile(y, turned, heads);
    xQueue.FreeTensor(x);
    if (t.turn) tableQueue.FreeTensor(table);
    ropeQueue.EnQue(y);
    opsmith::Leave(ropeGlobal[row * t.ropeRow], ropeQueue, heads, t.ropeRow);
  }

  MlaQEpilogueTilingData t;
  opsmith::Tile weightTile, tile;
  opsmith::Rotary rotary;
  GlobalTensor<T> qGlobal, weightGlobal, ropeGlobal;
  GlobalTensor<C> cosGlobal, sinGlobal;
  GlobalTensor<float> scaleGlobal;
  GlobalTensor<L> outGlobal;
  TQue<TPosition::VECIN, opsmith::kBufferNum> weightQueue, qQueue, xQueue, tableQueue;
  TQue<TPosition::VECOUT, opsmith::kBufferNum> outQueue, ropeQueue;
  TBuf<TPosition::VECCALC> sumBuf, wideBuf, qBuf, spreadBuf, productBuf, roundBuf, turnBuf, rotaryBuf;
  uint64_t token;
  uint32_t head, column;
};

extern "C" __global__ __aicore__ void mla_q_epilogue(GM_ADDR q, GM_ADDR wuk, GM_ADDR cos, GM_ADDR sin,
                                                     GM_ADDR scale, GM_ADDR q_out, GM_ADDR q_rope,
                                                     GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(MlaQEpilogueTilingData);
  GET_TILING_DATA_WITH_STRUCT(MlaQEpilogueTilingData, data, tiling);
  TPipe pipe;
  MlaQEpilogue<DTYPE_Q, DTYPE_COS, DTYPE_Q_OUT> kernel;
  kernel.Init(q, wuk, cos, sin, scale, q_out, q_rope, data, &pipe);
  kernel.Process();
}
