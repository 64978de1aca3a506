// One fault for each number in the tiling, on the line that bears its name; number 0 is the same work without a fault.
#include "kernel_operator.h"

using namespace AscendC;

constexpr uint32_t N = 64;  // floats of x and y that a block works on

struct FaultyTilingData {
  uint32_t fault;
};

class Faulty {
 public:
  __aicore__ inline Faulty(GM_ADDR x, GM_ADDR y) {
    xGlobal.SetGlobalBuffer((__gm__ float*)x);
    yGlobal.SetGlobalBuffer((__gm__ float*)y);
    start = GetBlockIdx() * N;
  }

  __aicore__ inline void Run(uint32_t fault) {
    if (fault == 1) pipe.InitBuffer(large, 100 * 1024);
    if (fault == 1) pipe.InitBuffer(spare, 100 * 1024);  // local memory
    if (fault == 2) pipe.InitBuffer(many, 7, 32);  // events for queues
    pipe.InitBuffer(in, 2, N * sizeof(float));
    pipe.InitBuffer(out, 2, N * sizeof(float));
    pipe.InitBuffer(work, 4 * N * sizeof(float));
    LocalTensor<float> w = work.Get<float>();

    LocalTensor<float> x = in.AllocTensor<float>(), none;
    if (fault == 40) DataCopy(none, xGlobal[start], 8);  // no memory
    if (fault == 3) DataCopy(x, xGlobal[start], 5);  // unaligned size
    if (fault == 4) DataCopy(x[1], xGlobal[start], 8);  // unaligned address of a copy
    if (fault == 5) DataCopy(x, xGlobal[start + N - 8], 16);  // read outside a tensor
    if (fault == 6) DataCopy(x, xGlobal[start], 2 * N);  // write outside local memory of a queue
    if (fault == 7) DataCopyPad(x, xGlobal[start], DataCopyExtParams(4096, 4, 0, 0, 0), {});  // too many rows
    if (fault == 8) DataCopyPad(x, xGlobal[start], DataCopyExtParams(1, 20, 0, 0, 0), {});
    if (fault != 8) DataCopy(x, xGlobal[start], N);
    if (fault == 9) Muls(w, x, 2.0f, N);  // no queue between copy and vector
    in.EnQue(x);
    if (fault == 10) in.EnQue(x);  // queued twice
    if (fault == 11) in.FreeTensor(x);  // given back while queued
    x = in.DeQue<float>();
    if (fault == 12) x = in.DeQue<float>();  // nothing in the queue
    if (fault == 8) Muls(w, x, 2.0f, 8);  // read of padding
    if (fault == 13) Muls(w, w[N], 2.0f, N);  // read of what nobody wrote
    if (fault == 14) Add(w, x, x[1], 8);  // unaligned address of a vector
    if (fault == 15) Muls(w, x, 2.0f, 65, 1, UnaryRepeatParams(1, 1, 8, 8));  // mask
    if (fault == 16) Muls(w, x, 2.0f, 8, 256, UnaryRepeatParams(1, 1, 0, 0));  // repeats
    if (fault == 17) Muls(w, x, 2.0f, 8, 2, UnaryRepeatParams(1, 1, 256, 1));  // stride
    if (fault == 18) Muls(w, x, 2.0f, 0);  // no elements
    if (fault == 19) Muls(w[3 * N + 8], x, 2.0f, N);  // write outside local memory of a buffer
    if (fault == 20) Muls(x[8], x, 2.0f, 16);  // overlap
    if (fault == 21) WaitFlag<HardEvent::V_S>(0);  // event never set

    LocalTensor<float> y = out.AllocTensor<float>();
    Muls(y, x, 2.0f, N);
    if (fault == 22) value = y.GetValue(0);  // scalar read behind a vector
    if (fault == 23) SetFlag<HardEvent::V_S>(0);  // event never waited for
    if (fault == 24) SetFlag<HardEvent::V_S>(0);
    if (fault == 24) SetFlag<HardEvent::V_S>(0);  // event set twice
    in.FreeTensor(x);
    if (fault == 25) Muls(y, x, 2.0f, N);  // used after it was given back
    if (fault == 26) DataCopy(yGlobal[start], y, N);  // no queue between vector and copy
    out.EnQue(y);
    y = out.DeQue<float>();
    if (fault == 27) DataCopy(yGlobal[start + N], y, N);  // write outside a tensor
    if (fault == 28) DataCopy(xGlobal[start], y, N);  // write to an input
    if (fault == 29) DataCopy(yGlobal[0], y, N);  // two blocks, one place
    if (fault == 30 && GetBlockIdx() == 1)
      DataCopy(in.AllocTensor<float>(), yGlobal[0], N);  // read across blocks
    if (fault != 31) DataCopy(yGlobal[start], y, N);
    if (fault == 32) Muls(y, y, 2.0f, N);  // a vector writes what a copy still reads
    if (fault != 33) out.FreeTensor(y);
    if (fault == 34) out.FreeTensor(y);  // given back twice
    if (fault == 35) in.AllocTensor<float>();  // never given back
    if (fault == 36) in.AllocTensor<float>(), in.AllocTensor<float>();
    if (fault == 36) in.AllocTensor<float>();  // no buffer left
    if (fault == 37) work.Get<float>(4 * N + 1);  // more than the buffer
    if (fault == 38) Duplicate(w, 1.0f, N);
    if (fault == 38) Cast(w[N].ReinterpretCast<half>(), w, RoundMode::CAST_FLOOR, N);  // rounding
    if (fault == 39) (void)pipe.AllocEventID<HardEvent::MTE2_V>(), Events();
  }

  float value = 0;

 private:
  __aicore__ inline void Events() {
    for (int i = 0; i < 8; ++i) pipe.AllocEventID<HardEvent::MTE2_V>();  // no event left
  }

  TPipe pipe;
  GlobalTensor<float> xGlobal, yGlobal;
  TQue<TPosition::VECIN, 2> in, many;
  TQue<TPosition::VECOUT, 2> out;
  TBuf<TPosition::VECCALC> work, large, spare;
  uint64_t start;
};

extern "C" __global__ __aicore__ void faulty(GM_ADDR x, GM_ADDR y, GM_ADDR workspace, GM_ADDR tiling) {
  GET_TILING_DATA_WITH_STRUCT(FaultyTilingData, data, tiling);
  Faulty(x, y).Run(data.fault);
}
