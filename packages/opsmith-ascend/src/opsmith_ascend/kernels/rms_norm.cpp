// y = s / sqrt(mean(s^2) + eps) * (weight + offset), with s = x, or s = x + residual, which is then returned too.
#include "norm.h"
#include "rms_norm_tiling.h"

using namespace AscendC;

extern "C" __global__ __aicore__ void rms_norm(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR y,
                                               GM_ADDR summed, GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(RmsNormTilingData);
  GET_TILING_DATA_WITH_STRUCT(RmsNormTilingData, data, tiling);
  TPipe pipe;
  opsmith::Norm<DTYPE_X, DTYPE_WEIGHT, false> kernel;
  kernel.Init({x, residual, weight, nullptr, y, summed}, data, &pipe);
  kernel.Process();
}
