// Memory of the calling thread between calls: fresh pages cost more than what is done with a matrix of a layer's size.
#pragma once

#include <cstdint>
#include <memory>

namespace opsmith {

// At least `bytes` bytes, aligned to a cache line, until the object is gone. Of one slot, one user at a time.
template <int slot>
class Kept {
 public:
  explicit Kept(int64_t bytes) {
    static thread_local std::unique_ptr<Line[]> memory;
    static thread_local int64_t capacity = 0;
    const int64_t lines = (bytes + 63) / 64;
    if (lines > kMost) {
      own_.reset(new Line[size_t(lines)]);
      data_ = own_.get();
      return;
    }
    if (lines > capacity) {
      memory.reset();
      capacity = 0;
      memory.reset(new Line[size_t(lines)]);
      capacity = lines;
    }
    data_ = memory.get();
  }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

 private:
  struct alignas(64) Line {
    char bytes[64];
  };
  static constexpr int64_t kMost = (32 << 20) / 64;  // more is given back at once

  std::unique_ptr<Line[]> own_;
  Line* data_;
};

}  // namespace opsmith
