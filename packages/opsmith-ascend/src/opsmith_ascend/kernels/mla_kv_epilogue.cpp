// cache[slot] = (rms_norm(a[:kv_lora]) * gamma2, rope(a[kv_lora:][:rope])): a token's keys, in one pass, into a paged cache.
#include "mla_kv_epilogue_tiling.h"
#include "rotary.h"

using namespace AscendC;

template <typename T, typename G, typename C, typename I, typename L>
class MlaKvEpilogue {
 public:
  __aicore__ inline void Init(GM_ADDR a, GM_ADDR gamma2, GM_ADDR cos, GM_ADDR sin, GM_ADDR slots,
                              GM_ADDR ctkv, GM_ADDR latent, GM_ADDR rope,
                              const MlaKvEpilogueTilingData& tiling, TPipe* pipe) {
    t = tiling;
    keys = {0, t.kvLora, t.kvPitch};
    turned = {0, t.rope, t.ropePitch};
    aGlobal.SetGlobalBuffer((__gm__ T*)a);
    cosGlobal.SetGlobalBuffer((__gm__ C*)cos);
    sinGlobal.SetGlobalBuffer((__gm__ C*)sin);
    slotGlobal.SetGlobalBuffer((__gm__ I*)slots);
    latentGlobal.SetGlobalBuffer((__gm__ L*)latent);
    // In a joint cache rope stands behind each latent row.
    ropeGlobal.SetGlobalBuffer(t.ropeAt ? (__gm__ T*)latent + t.ropeAt : (__gm__ T*)rope);
    const uint32_t n = t.tokensPerTile, kv = n * t.kvPitch, pe = n * t.ropePitch;
    const uint32_t numbers = uint32_t(opsmith::AlignUp(n, 8));
    pipe->InitBuffer(aQueue, opsmith::kBufferNum, (kv + pe) * sizeof(T));
    pipe->InitBuffer(latentQueue, opsmith::kBufferNum, kv * sizeof(L));
    pipe->InitBuffer(valueBuf, 2 * kv * sizeof(float));
    pipe->InitBuffer(laneBuf, n * opsmith::kLanes * sizeof(float));
    pipe->InitBuffer(spreadBuf, numbers * opsmith::kDataBlock);
    pipe->InitBuffer(numberBuf, numbers * sizeof(float));
    pipe->InitBuffer(slotBuf, n * sizeof(int64_t));
    pipe->InitBuffer(gammaBuf, t.kvPitch * sizeof(float));
    values = valueBuf.template Get<float>();
    squares = values[kv];
    // What lies behind the columns of a row is never a result, but whole tiles go over it.
    Duplicate(values, 0.0f, kv);
    Duplicate(numberBuf.template Get<float>(), 0.0f, numbers);
    GlobalTensor<G> gammaGlobal;
    gammaGlobal.SetGlobalBuffer((__gm__ G*)gamma2);
    opsmith::LoadRow(gammaBuf.template Get<float>(), squares, gammaGlobal, t.kvLora);
    if (t.quantize) {
      GlobalTensor<float> number;
      number.SetGlobalBuffer((__gm__ float*)ctkv);
      step = number.GetValue(0);
    }
    if (t.rope == 0) return;
    pipe->InitBuffer(ropeQueue, opsmith::kBufferNum, pe * sizeof(T));
    pipe->InitBuffer(turnBuf, 5 * pe * sizeof(float));
    pipe->InitBuffer(rotaryBuf, opsmith::Rotary::Bytes(n, t.ropePitch));
    rotary.Init(rotaryBuf.template Get<float>(), n, t.rope, t.ropePitch, t.turn, t.interleaved);
    if (t.turn) pipe->InitBuffer(tableQueue, opsmith::kBufferNum, 2 * pe * sizeof(C));
  }

  __aicore__ inline void Process() {
    const uint64_t tiles = opsmith::CeilDiv(t.tokens, t.tokensPerTile);
    const uint64_t first = tiles * GetBlockIdx() / t.blocks, last = tiles * (GetBlockIdx() + 1) / t.blocks;
    for (uint64_t i = first; i < last; ++i) {
      token = i * t.tokensPerTile;
      keys.rows = turned.rows = uint32_t(opsmith::Min(t.tokensPerTile, t.tokens - token));
      CopyIn();
      Normalize();
      if (t.rope) Turn();
      CopyOut();
    }
  }

 private:
  __aicore__ inline void CopyIn() {
    LocalTensor<T> a = aQueue.template AllocTensor<T>();
    opsmith::CopyIn(a, aGlobal[token * t.stride], keys, t.stride);
    if (t.rope)
      opsmith::CopyIn(a[t.tokensPerTile * t.kvPitch], aGlobal[token * t.stride + t.kvLora], turned, t.stride);
    aQueue.EnQue(a);
    if (t.rope && t.turn) {
      LocalTensor<C> table = tableQueue.template AllocTensor<C>();
      opsmith::CopyIn(table, cosGlobal[token * t.rope], turned, t.rope);
      opsmith::CopyIn(table[t.tokensPerTile * t.ropePitch], sinGlobal[token * t.rope], turned, t.rope);
      tableQueue.EnQue(table);
    }
    // The scalar pipe needs the slots when it starts the copies out.
    opsmith::CopyIn(slotBuf.template Get<I>(), slotGlobal[token], opsmith::Line(keys.rows), keys.rows);
    opsmith::Order<HardEvent::MTE2_S>();
  }

  __aicore__ inline void Normalize() {
    a = aQueue.template DeQue<T>();
    const LocalTensor<float> wide = opsmith::WidenTile(a, values, keys);
    const LocalTensor<float> spread = spreadBuf.template Get<float>(), gamma = gammaBuf.template Get<float>();
    opsmith::OverRootMeanSquares(values, wide, squares, numberBuf.template Get<float>(), spread,
                                 laneBuf.template Get<float>(), t.eps, keys);
    const opsmith::Operand all = opsmith::Whole(values, keys);
    LocalTensor<L> latent = latentQueue.template AllocTensor<L>();
    if constexpr (opsmith::kIsFloat<L>) {
      opsmith::Apply<opsmith::Times>(latent, all, opsmith::Columns(gamma), keys);
    } else {
      opsmith::Apply<opsmith::Times>(values, all, opsmith::Columns(gamma), keys);
      const uint32_t count = keys.rows * t.kvPitch;
      if constexpr (sizeof(L) == 1) {
        Duplicate(spread, step, keys.rows * opsmith::kBlock);
        opsmith::Apply<opsmith::Over>(values, all, opsmith::Blocks(spread), keys);
        opsmith::ToInt8(latent, values, count);
      } else {
        Cast(latent, values, RoundMode::CAST_RINT, count);
      }
    }
    latentQueue.EnQue(latent);
    if (t.rope == 0) aQueue.FreeTensor(a);
  }

  __aicore__ inline void Turn() {
    const uint32_t pe = t.tokensPerTile * t.ropePitch;
    const LocalTensor<float> room = turnBuf.template Get<float>();
    const LocalTensor<float> x = opsmith::WidenTile(a[t.tokensPerTile * t.kvPitch], room, turned);
    LocalTensor<C> table;
    LocalTensor<float> cos, sin;
    if (t.turn) {
      table = tableQueue.template DeQue<C>();
      cos = opsmith::WidenTile(table, room[pe], turned);
      sin = opsmith::WidenTile(table[pe], room[2 * pe], turned);
    }
    LocalTensor<T> rope = ropeQueue.template AllocTensor<T>();
    LocalTensor<float> y = x;
    if constexpr (opsmith::kIsFloat<T>) y = rope;
    // Sines may take the place of the cosines as they came, which are in another by then.
    rotary.Turn(y, x, cos, sin, false, room[3 * pe], room[4 * pe], room[pe], turned);
    opsmith::NarrowTile(rope, y, turned);
    ropeQueue.EnQue(rope);
    aQueue.FreeTensor(a);
    if (t.turn) tableQueue.FreeTensor(table);
  }

  __aicore__ inline void CopyOut() {
    LocalTensor<L> latent = latentQueue.template DeQue<L>();
    LocalTensor<T> rope;
    if (t.rope) rope = ropeQueue.template DeQue<T>();
    const LocalTensor<I> slots = slotBuf.template Get<I>();
    for (uint32_t r = 0; r < keys.rows; ++r) {
      const int64_t slot = int64_t(slots.GetValue(r));
      if (slot < 0) continue;  // this token is not kept
      const uint64_t block = uint64_t(slot) / t.blockSize, at = uint64_t(slot) % t.blockSize;
      Store(latentGlobal[block * t.latentBlock + at * t.latentRow], latent[r * t.kvPitch], t.kvLora,
            t.latentTile);
      if (t.rope)
        Store(ropeGlobal[block * t.ropeBlock + at * t.ropeRow], rope[r * t.ropePitch], t.rope, t.ropeTile);
    }
    latentQueue.FreeTensor(latent);
    if (t.rope) ropeQueue.FreeTensor(rope);
  }

  // One copy a row: in one piece, or in tiles that lie a block's tokens apart.
  template <typename V>
  __aicore__ inline void Store(const GlobalTensor<V>& to, const LocalTensor<V>& from, uint32_t width,
                               uint32_t piece) {
    const uint32_t bytes = (piece ? piece : width) * sizeof(V);
    DataCopyPad(to, from,
                DataCopyExtParams(piece ? width / piece : 1, bytes, 0,
                                  piece ? uint64_t(t.blockSize - 1) * bytes : 0, 0));
  }

  MlaKvEpilogueTilingData t;
  opsmith::Tile keys, turned;
  opsmith::Rotary rotary;
  GlobalTensor<T> aGlobal, ropeGlobal;
  GlobalTensor<C> cosGlobal, sinGlobal;
  GlobalTensor<I> slotGlobal;
  GlobalTensor<L> latentGlobal;
  TQue<TPosition::VECIN, opsmith::kBufferNum> aQueue, tableQueue;
  TQue<TPosition::VECOUT, opsmith::kBufferNum> latentQueue, ropeQueue;
  TBuf<TPosition::VECCALC> valueBuf, laneBuf, spreadBuf, numberBuf, slotBuf, gammaBuf, turnBuf, rotaryBuf;
  LocalTensor<float> values, squares;
  LocalTensor<T> a;
  uint64_t token;
  float step = 1.0f;
};

extern "C" __global__ __aicore__ void mla_kv_epilogue(GM_ADDR a, GM_ADDR gamma2, GM_ADDR cos, GM_ADDR sin,
                                                      GM_ADDR slots, GM_ADDR ctkv, GM_ADDR latent,
                                                      GM_ADDR rope, GM_ADDR latent_out, GM_ADDR rope_out,
                                                      GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(MlaKvEpilogueTilingData);
  GET_TILING_DATA_WITH_STRUCT(MlaKvEpilogueTilingData, data, tiling);
  TPipe pipe;
  MlaKvEpilogue<DTYPE_A, DTYPE_GAMMA2, DTYPE_COS, DTYPE_SLOTS, DTYPE_LATENT_OUT> kernel;
  kernel.Init(a, gamma2, cos, sin, slots, ctkv, latent_out, rope_out, data, &pipe);
  kernel.Process();
}
