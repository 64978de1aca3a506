// What the tiling functions share. Plain C++ without a header of CANN: the host of a board and the emulation call the
// same functions.
#pragma once

#include <cstdint>

namespace opsmith {

// What a launch may use: vector cores, and bytes of local memory on each (on a board, GetCoreNumAiv and GetCoreMemSize).
struct Platform {
  uint32_t cores;
  uint32_t localBytes;
};

constexpr uint32_t kDataBlockBytes = 32;  // local memory is addressed in these
constexpr uint32_t kRepeatBytes = 256;  // and vectors are this long

constexpr uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
constexpr uint64_t AlignUp(uint64_t a, uint64_t to) { return CeilDiv(a, to) * to; }
constexpr uint64_t AlignDown(uint64_t a, uint64_t to) { return a / to * to; }
constexpr uint64_t Min(uint64_t a, uint64_t b) { return a < b ? a : b; }
constexpr uint64_t Max(uint64_t a, uint64_t b) { return a > b ? a : b; }

// Of a core's share, how much one tile takes: what fits, but no more than a quarter, so that copies and vectors work at
// the same time; no less than 8 KiB, for a copy to be worth its start; and all tiles alike. In units of `bytes` each.
constexpr uint64_t TileOf(uint64_t share, uint64_t fit, uint64_t bytes) {
  const uint64_t most = Max(1, Min(Min(fit, share), Max(CeilDiv(share, 4), 8192 / bytes)));
  return CeilDiv(share, CeilDiv(share, most));
}

}  // namespace opsmith
