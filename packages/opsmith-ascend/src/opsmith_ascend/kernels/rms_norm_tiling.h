// How the work of rms_norm is divided: norm_tiling.h.
#pragma once

#include "norm_tiling.h"

using RmsNormTilingData = NormTilingData;

inline RmsNormTilingData RmsNormTiling(uint64_t rows, uint32_t columns, uint32_t elementBytes,
                                       uint32_t weightBytes, uint32_t residual, uint32_t weight, float eps,
                                       float weightOffset, uint32_t roundBeforeWeight,
                                       opsmith::Platform platform) {
  RmsNormTilingData t = opsmith::TileNorm(rows, columns, elementBytes, weightBytes, residual, weight, 0,
                                          platform);
  t.eps = eps;
  t.weightOffset = weightOffset;
  t.roundBeforeWeight = roundBeforeWeight;
  return t;
}
