// What rope_custom.cpp, compiled by the host's compiler, knows of rope_custom.cu, compiled by nvcc.
#pragma once

#include "types.h"

namespace rope_custom {

void forward(opsmith::View x, opsmith::View cos, opsmith::View sin, opsmith::View y, void* stream);
void backward(opsmith::View dy, opsmith::View x, opsmith::View cos, opsmith::View sin, opsmith::View dx,
              void* stream);

}  // namespace rope_custom
