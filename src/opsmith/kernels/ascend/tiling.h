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
constexpr uint32_t kRepeatBytes = 256;    // and vectors are this long

constexpr uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
constexpr uint64_t AlignUp(uint64_t a, uint64_t to) { return CeilDiv(a, to) * to; }
constexpr uint64_t AlignDown(uint64_t a, uint64_t to) { return a / to * to; }
constexpr uint64_t Min(uint64_t a, uint64_t b) { return a < b ? a : b; }
constexpr uint64_t Max(uint64_t a, uint64_t b) { return a > b ? a : b; }

}  // namespace opsmith
