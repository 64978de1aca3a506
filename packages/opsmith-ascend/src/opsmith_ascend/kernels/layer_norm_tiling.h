// How the work of layer_norm is divided: norm_tiling.h.
#pragma once

#include "norm_tiling.h"

using LayerNormTilingData = NormTilingData;

inline LayerNormTilingData LayerNormTiling(uint64_t rows, uint32_t columns, uint32_t elementBytes,
                                           uint32_t weightBytes, uint32_t residual, uint32_t weight,
                                           uint32_t bias, float eps, opsmith::Platform platform) {
  LayerNormTilingData t = opsmith::TileNorm(rows, columns, elementBytes, weightBytes, residual, weight, bias,
                                            platform);
  t.eps = eps;
  return t;
}
