// y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias, with s = x, or s = x + residual, which is then returned too.
#include "layer_norm_tiling.h"
#include "norm.h"

using namespace AscendC;

extern "C" __global__ __aicore__ void layer_norm(GM_ADDR x, GM_ADDR residual, GM_ADDR weight, GM_ADDR bias,
                                                 GM_ADDR y, GM_ADDR summed, GM_ADDR workspace,
                                                 GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(LayerNormTilingData);
  GET_TILING_DATA_WITH_STRUCT(LayerNormTilingData, data, tiling);
  TPipe pipe;
  opsmith::Norm<DTYPE_X, DTYPE_WEIGHT, true> kernel;
  kernel.Init({x, residual, weight, bias, y, summed}, data, &pipe);
  kernel.Process();
}
