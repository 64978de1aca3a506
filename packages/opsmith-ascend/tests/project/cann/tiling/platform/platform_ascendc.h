// Declarations of what op_host asks of the processor; see register/op_def_registry.h.
#pragma once

#include <cstdint>

namespace platform_ascendc {

enum class CoreMemType { UB };

class PlatformAscendC {
 public:
  explicit PlatformAscendC(void* info);
  uint32_t GetCoreNumAiv() const;
  void GetCoreMemSize(const CoreMemType& type, uint64_t& bytes) const;
};

}  // namespace platform_ascendc
