// Instructions that kernels by hand may use and ours do not: each writes eight numbers of `to`.
#include "kernel_operator.h"

using namespace AscendC;

extern "C" __global__ __aicore__ void reductions(GM_ADDR x, GM_ADDR to, GM_ADDR workspace, GM_ADDR tiling) {
  GlobalTensor<float> given, wanted;
  given.SetGlobalBuffer((__gm__ float*)x);
  wanted.SetGlobalBuffer((__gm__ float*)to);
  TPipe pipe;
  TQue<TPosition::VECIN, 1> in;
  TQue<TPosition::VECOUT, 1> out;
  TBuf<TPosition::VECCALC> room;
  pipe.InitBuffer(in, 1, 200 * sizeof(float));
  pipe.InitBuffer(out, 1, 48 * sizeof(float));
  pipe.InitBuffer(room, 32);
  LocalTensor<float> a = in.AllocTensor<float>();
  DataCopy(a, given, DataCopyParams(1, 25, 0, 0));
  in.EnQue(a);
  a = in.DeQue<float>();
  LocalTensor<float> y = out.AllocTensor<float>(), work = room.Get<float>();
  Duplicate(y, 0.0f, uint64_t(48), 1, 1, 8);
  ReduceSum(y, a, work, 200);
  ReduceMax(y[8], a, work, 200);
  ReduceMin(y[16], a, work, 200);
  BlockReduceSum(y[24], a, 1, 64, 1, 1, 8);
  BlockReduceMax(y[32], a, 1, 64, 1, 1, 8);
  Axpy(y[40], a, 2.0f, 8);
  in.FreeTensor(a);
  out.EnQue(y);
  y = out.DeQue<float>();
  DataCopy(wanted, y, 48);
  out.FreeTensor(y);
}
