// What function.cpp, compiled by g++, knows of function.cu, compiled by nvcc.
#pragma once

#include "types.h"

namespace cuda_layer_norm {

// How the work is cut: a row is a block's, its elements are dealt to the block's threads, who keep the first few of
// theirs in registers.
struct Tile {
  static constexpr int kept = 8;         // elements in a thread's registers
  static constexpr int most = 1024;      // threads, which hold 8192 elements together
  static constexpr int grid = 1 << 20;   // blocks at most: they take another row when they are done
  int threads;
  int blocks;

  Tile(int64_t rows, int64_t n);
};

void forward(opsmith::View x, opsmith::View weight, opsmith::View bias, double eps, opsmith::View y,
             void* stream);

// Any of the last three may be undefined: nobody asked for it.
void backward(opsmith::View dy, opsmith::View x, opsmith::View weight, double eps, opsmith::View dx,
              opsmith::View dweight, opsmith::View dbias, void* stream);

}  // namespace cuda_layer_norm
