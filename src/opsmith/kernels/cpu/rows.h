// What the row-wise kernels share: dtype dispatch, scratch memory, how to split rows, when to write past the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <new>
#include <string>

#include "schedules/shares.h"
#include "simd.h"

namespace opsmith {

// Calls f with a null pointer of the element type, so that a lambda can name it: `[&]<class T>(T*)`.
template <class F>
inline void with_float_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::bf16: return f(static_cast<bfloat16*>(nullptr));
    case DType::f16: return f(static_cast<float16*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}

// A thread's scratch memory, 64-byte aligned, kept between calls and only ever grown. One user at a time.
inline float* scratch(int64_t floats) {
  struct Free {
    void operator()(float* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  static thread_local std::unique_ptr<float, Free> memory;
  static thread_local int64_t capacity = 0;
  if (floats > capacity) {
    memory.reset();
    capacity = 0;
    memory.reset(static_cast<float*>(::operator new(size_t(floats) * sizeof(float), std::align_val_t(64))));
    capacity = floats;
  }
  return memory.get();
}

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Rows per task, so that a task is worth a thread's wake-up.
inline int64_t row_grain(int64_t n, int64_t elements) {
  return std::max<int64_t>(1, elements / std::max<int64_t>(1, n));
}

// Bytes of the first core's last-level cache. From Linux itself: sysconf in virtual machines may say ten times the truth.
inline int64_t last_level_cache() {
  int64_t found = 0;
  for (int index = 0; index < 8; ++index) {
    const std::string path = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
    std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "r"), std::fclose);
    long long size = 0;
    char unit = 0;
    if (!file || std::fscanf(file.get(), "%lld%c", &size, &unit) < 1) continue;
    found = std::max<int64_t>(found, size << (unit == 'K' ? 10 : unit == 'M' ? 20 : 0));
  }
  return found > 0 ? found : int64_t{32} << 20;
}

// Whether results are gone from the cache before anyone reads them: then writing them past the cache saves reading each line
// before it is overwritten. So it is where all that a call reads and writes, `tensors` of so many bytes, has no room there.
inline bool outlives_cache(int64_t bytes, int64_t tensors = 2) {
  static const int64_t cache = last_level_cache();
  return bytes * tensors > cache;
}

// Stores past the cache wait for the address of a new page, and what comes after them with them: it is looked up one page
// ahead. For element i of what is written at p.
template <class T>
inline void look_ahead(const T* p, int64_t i) {
  constexpr int64_t page = 4096;
  if (i * int64_t(sizeof(T)) % page == 0) prefetch(reinterpret_cast<const char*>(p + i) + page);
}

// The same for whole rows of n elements, many of which share a page: at the one that begins in it first.
template <class T>
inline void look_ahead_of_row(const T* p, int64_t n) {
  constexpr int64_t page = 4096;
  if (int64_t(reinterpret_cast<uintptr_t>(p) % page) < n * int64_t(sizeof(T)))
    prefetch(reinterpret_cast<const char*>(p) + page);
}

// Store, past the cache where the row allows it.
template <class T>
inline void put(T* p, Vec v, Full, bool streaming) {
  if (streaming) {
    stream(p, v);
  } else {
    store(p, v, Full{});
  }
}
template <class T>
inline void put(T* p, Vec v, Part k, bool) {
  store(p, v, k);
}

}  // namespace opsmith
