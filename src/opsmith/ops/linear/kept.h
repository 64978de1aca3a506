// Memory of the calling thread between calls: fresh pages cost more than what is done with a matrix of a layer's size.
#pragma once

#include <cstdint>
#include <memory>
#include <new>

namespace opsmith {

// At least `bytes` bytes, aligned to a cache line, until the object is gone. Of one slot, one user at a time.
template <int slot>
class Kept {
 public:
  explicit Kept(int64_t bytes) {
    static thread_local Memory memory;
    static thread_local int64_t capacity = 0;
    if (bytes > kMost) {
      own_ = allocate(bytes);
      data_ = own_.get();
      return;
    }
    if (bytes > capacity) {
      memory.reset();
      capacity = 0;
      memory = allocate(bytes);
      capacity = bytes;
    }
    data_ = memory.get();
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  struct Free {
    void operator()(void* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  using Memory = std::unique_ptr<void, Free>;
  static constexpr int64_t kMost = 32 << 20;  // more is given back at once

  static Memory allocate(int64_t bytes) {
    return Memory(::operator new(size_t(bytes), std::align_val_t(64)));
  }

  Memory own_;
  void* data_;
};

}  // namespace opsmith
