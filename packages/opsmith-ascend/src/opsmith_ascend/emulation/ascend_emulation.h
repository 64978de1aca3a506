// An Ascend vector core on a CPU: enough of Ascend C to compile a kernel file as it stands, run every block of its
// launch, and stop at the first thing that a board would punish. Written from the public documentation of the API.
//
// What such a core is, in the order in which to read the headers:
//   types.h    its numbers: half, bfloat16, and the names of positions, rounding modes and events
//   core.h     its pipes. One program feeds four of them: S (scalars), MTE2 (global memory to local), V (vectors) and
//              MTE3 (local to global). Each runs by itself, so what one writes the next may read only after an event;
//              here every 32 bytes of memory remember who wrote and read them last, and an access that no event
//              orders is a fault. So is a read of what nobody wrote
//   memory.h   GlobalTensor and LocalTensor: 192 KiB of local memory, in data blocks of 32 bytes
//   queue.h    TPipe, TQue, TBuf: who owns local memory when; EnQue and DeQue are events with a buffer attached
//   copy.h     DataCopy and DataCopyPad, the only ways between the memories
//   vector.h   vector instructions: 256 bytes a repeat, at most 255 repeats, strides in data blocks
//   reduce.h   those that fold a repeat, gather, or compare
// launch.h is the host's side: it runs the blocks and reports.
//
// Instructions run at once and in the program's order. That is one of the orders a board may choose; the checks of
// core.h refuse a kernel for which another order could give another result. Results are emulated, times estimated:
// neither says anything about a board.
#pragma once

#include "copy.h"
#include "core.h"
#include "memory.h"
#include "queue.h"
#include "reduce.h"
#include "types.h"
#include "vector.h"

#define __global__ __attribute__((visibility("default")))
#define __aicore__
#define __gm__
#define __ubuf__

using GM_ADDR = uint8_t*;

// A kernel reads its tiling, a plain struct, from global memory.
#define REGISTER_TILING_DEFAULT(Struct) \
  static_assert(sizeof(Struct) % 4 == 0, #Struct " is made of whole words")
#define GET_TILING_DATA_WITH_STRUCT(Struct, name, tiling) \
  const Struct name = ::AscendC::emulation::read_tiling<Struct>(tiling)
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(true, "vector cores are all there is here")
