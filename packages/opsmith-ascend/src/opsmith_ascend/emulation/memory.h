// Tensors: names for memory. A GlobalTensor has an address in global memory, a LocalTensor one in this core's own.
#pragma once

#include "core.h"

namespace AscendC {

namespace emulation {

// Whether a piece of a local tensor that has `size` bytes of a buffer may be used now.
void inside(const char* does, int64_t offset, int64_t bytes, int64_t size, const Buffer* buffer,
            uint32_t generation);
void aligned(const char* operand, int64_t address, uint32_t to);

}  // namespace emulation

template <class T>
class GlobalTensor {
 public:
  using PrimType = T;
  void SetGlobalBuffer(T* address, uint64_t = 0) { address_ = address; }
  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor part;
    part.address_ = address_ + offset;
    return part;
  }
  const T* GetPhyAddr() const { return address_; }
  const T* GetPhyAddr(uint64_t offset) const { return address_ + offset; }

  // One number, by the scalar pipe.
  T GetValue(uint64_t offset, Here here = Here::now()) const {
    emulation::Core& core = emulation::core();
    core.begin(PIPE_S, "GetValue", here);
    core.spend(emulation::kScalarCycles);
    core.read_global(reinterpret_cast<const uint8_t*>(address_ + offset), sizeof(T));
    return address_[offset];
  }

  T* raw() const { return address_; }

 private:
  T* address_ = nullptr;
};

template <class T>
class LocalTensor {
 public:
  using PrimType = T;
  LocalTensor() = default;
  LocalTensor(uint32_t address, uint32_t bytes, emulation::Buffer* buffer)
      : address_(address), bytes_(bytes), buffer_(buffer), generation_(buffer ? buffer->generation : 0) {}

  LocalTensor operator[](uint32_t offset) const {
    LocalTensor part = *this;
    part.address_ += int64_t(offset) * int64_t(sizeof(T));
    part.bytes_ -= int64_t(offset) * int64_t(sizeof(T));
    return part;
  }
  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    LocalTensor<U> other;
    other.take(address_, bytes_, buffer_, generation_);
    return other;
  }
  uint32_t GetSize() const { return uint32_t(bytes_ / int64_t(sizeof(T))); }

  // One number, by the scalar pipe.
  T GetValue(uint32_t offset, Here here = Here::now()) const {
    emulation::Core& core = emulation::core();
    core.begin(PIPE_S, "GetValue", here);
    core.spend(emulation::kScalarCycles);
    T value;
    std::memcpy(&value, read(int64_t(offset) * sizeof(T), sizeof(T)), sizeof(T));
    return value;
  }
  void SetValue(uint32_t offset, T value, Here here = Here::now()) const {
    emulation::Core& core = emulation::core();
    core.begin(PIPE_S, "SetValue", here);
    core.spend(emulation::kScalarCycles);
    std::memcpy(write(int64_t(offset) * sizeof(T), sizeof(T)), &value, sizeof(T));
  }

  // For instructions: bytes from the tensor's beginning, checked and remembered.
  const uint8_t* read(int64_t offset, int64_t bytes) const {
    inside("reads", offset, bytes);
    emulation::core().read_local(uint32_t(address_ + offset), uint32_t(bytes));
    return emulation::core().local.data() + address_ + offset;
  }
  uint8_t* write(int64_t offset, int64_t bytes) const {
    inside("writes", offset, bytes);
    emulation::core().write_local(uint32_t(address_ + offset), uint32_t(bytes));
    return emulation::core().local.data() + address_ + offset;
  }
  void spoil(int64_t offset, int64_t bytes) const {
    inside("writes", offset, bytes);
    emulation::core().spoil_local(uint32_t(address_ + offset), uint32_t(bytes));
  }
  void aligned(const char* operand, uint32_t to = emulation::kDataBlock) const {
    emulation::aligned(operand, address_, to);
  }
  int64_t address() const { return address_; }
  emulation::Buffer* buffer() const { return buffer_; }
  uint32_t generation() const { return generation_; }
  void take(int64_t address, int64_t bytes, emulation::Buffer* buffer, uint32_t generation) {
    address_ = address, bytes_ = bytes, buffer_ = buffer, generation_ = generation;
  }

 private:
  int64_t address_ = 0, bytes_ = 0;
  emulation::Buffer* buffer_ = nullptr;
  uint32_t generation_ = 0;

  void inside(const char* does, int64_t offset, int64_t bytes) const {
    emulation::inside(does, offset, bytes, bytes_, buffer_, generation_);
  }
};

}  // namespace AscendC
