// What a kernel file knows about a tensor. No torch header: kernels see pointers, sizes and strides only.
#pragma once

#include <cstdint>

namespace opsmith {

// The first three are what operators compute in; the others are masks and ids.
enum class DType { f32, bf16, f16, boolean, i32, i64 };

// A borrowed tensor. Sizes and strides are in elements and live as long as the tensor does.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;

  bool defined() const { return sizes != nullptr; }  // false for an optional tensor that was not given
  template <class T>
  T* as() const { return static_cast<T*>(data); }
};

}  // namespace opsmith
