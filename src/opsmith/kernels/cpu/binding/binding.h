// From PyTorch's tensors to what kernels take. Only binding*.cpp may include this.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "binding_tensor.h"
#include "types.h"

namespace opsmith {

using Optional = std::optional<Tensor>;

inline Tensor lent(const torch::stable::Tensor& t) {
  const auto device = t.device();
  return {t.data_ptr(),    t.sizes().data(), t.strides().data(), t.dim(),
          t.scalar_type(), device.type(),    device.index()};
}

inline std::optional<Tensor> lent(const std::optional<torch::stable::Tensor>& t) {
  return t ? std::optional<Tensor>(lent(*t)) : std::nullopt;
}

template <class T>
inline T lent(T given) {
  return given;
}

// How an argument of a binding comes: as PyTorch's boxes hold it, and from a direct call, tensors and options as addresses.
template <class T>
struct Argument {
  using Stable = T;
  static T read(uint64_t value) {
    T given;
    std::memcpy(&given, &value, sizeof(T));
    return given;
  }
};

template <>
struct Argument<Tensor> {
  using Stable = torch::stable::Tensor;
  static const Tensor& read(uint64_t value) { return *reinterpret_cast<const Tensor*>(value); }
};

template <class T>
struct Argument<std::optional<T>> {
  using Stable = std::optional<typename Argument<T>::Stable>;
  static std::optional<T> read(uint64_t value) {
    return value ? std::optional<T>(*reinterpret_cast<const T*>(value)) : std::nullopt;
  }
};

template <auto op, class F = decltype(op)>
struct Entry;

template <auto op, class R, class... A>
struct Entry<op, R (*)(A...)> {
  static R stable(typename Argument<std::decay_t<A>>::Stable... given) { return op(lent(given)...); }
  static void direct(const uint64_t* values) { spread(values, std::index_sequence_for<A...>{}); }

 private:
  template <size_t... i>
  static void spread(const uint64_t* values, std::index_sequence<i...>) {
    op(Argument<std::decay_t<A>>::read(values[i])...);
  }
};

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);
using Direct = void (*)(const uint64_t*);

// A binding as PyTorch's dispatcher calls it, and as a direct call does.
struct Kernel {
  Boxed boxed;
  Direct direct;
};

template <auto op>
inline constexpr Kernel kernel{TORCH_BOX(&Entry<op>::stable), &Entry<op>::direct};

// Registers a kernel with PyTorch, and keeps it by name for a caller that needs nothing of PyTorch's dispatcher.
void offer(torch::stable::detail::StableLibrary& library, const char* name, const Kernel& kernel);

inline DType dtype_of(const Tensor& t) {
  using torch::headeronly::ScalarType;
  switch (t.scalar_type()) {
    case ScalarType::Float: return DType::f32;
    case ScalarType::BFloat16: return DType::bf16;
    case ScalarType::Half: return DType::f16;
    case ScalarType::Bool: return DType::boolean;
    case ScalarType::Int: return DType::i32;
    case ScalarType::Long: return DType::i64;
    case ScalarType::Char: return DType::i8;
    default:
      STD_TORCH_CHECK(false,
                      "opsmith: kernels take float32, bfloat16, float16, bool, int8, int32 and int64, not ",
                      torch::headeronly::toString(t.scalar_type()), "; convert the tensor first");
  }
}

inline bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16;
}

inline View view_of(const Tensor& t) {
  return View{t.data_ptr(), dtype_of(t), t.dim(), t.sizes().data(), t.strides().data()};
}

inline View view_of(const std::optional<Tensor>& t) { return t ? view_of(*t) : View{}; }

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto one = a.sizes(), other = b.sizes();
  return one.size() == other.size() && std::equal(one.begin(), one.end(), other.begin());
}

inline void check_vector(const char* op, const char* name, const std::optional<Tensor>& t, int64_t n,
                         bool float32) {
  if (!t) return;
  STD_TORCH_CHECK(
      t->dim() == 1 && t->size(0) == n && t->is_contiguous() && (!float32 || dtype_of(*t) == DType::f32), op,
      ": ", name, " must be a contiguous vector of ", n, float32 ? " float32" : "");
}

// One float32, where the kernel reads it as a number.
inline float number(const char* op, const char* name, const std::optional<Tensor>& t) {
  STD_TORCH_CHECK(t && t->numel() == 1 && dtype_of(*t) == DType::f32, op, ": ", name, " must be one float32");
  return *static_cast<const float*>(t->data_ptr());
}

// A tensor as [rows, n], n being its last dimension, wherever its strides allow that: Python then makes no view. The
// last dimension must be contiguous.
class Rows {
 public:
  Rows(const char* op, const char* name, const Tensor& t) : data_(t.data_ptr()), dtype_(dtype_of(t)) {
    const int64_t last = t.dim() - 1;
    if (last < 0) return;
    sizes_[1] = t.size(last);
    strides_[0] = sizes_[1];
    // Strides of an empty tensor may be anything.
    STD_TORCH_CHECK(sizes_[1] < 2 || t.stride(last) == 1 || t.numel() == 0, op, ": the last dimension of ",
                    name, " must be contiguous");
    bool first = true;
    for (int64_t d = last - 1; d >= 0; --d) {
      const int64_t size = t.size(d);
      if (size != 1) {
        STD_TORCH_CHECK(first || t.numel() == 0 || t.stride(d) == strides_[0] * sizes_[0], op, ": ", name,
                        " must be viewable as rows");
        if (first) strides_[0] = t.stride(d);
        first = false;
      }
      sizes_[0] *= size;
    }
  }

  int64_t rows() const { return sizes_[0]; }
  int64_t n() const { return sizes_[1]; }
  DType dtype() const { return dtype_; }
  bool like(const Rows& other) const {
    return rows() == other.rows() && n() == other.n() && dtype_ == other.dtype_;
  }
  View view() const { return View{data_, dtype_, 2, sizes_, strides_}; }

  // The first or the second half of every row.
  Rows half(bool second) const {
    Rows part(*this);
    part.sizes_[1] /= 2;
    if (second) part.data_ = static_cast<char*>(data_) + part.sizes_[1] * (dtype_ == DType::f32 ? 4 : 2);
    return part;
  }

 private:
  void* data_;
  DType dtype_;
  int64_t sizes_[2] = {1, 1}, strides_[2] = {1, 1};
};

// A tensor of any dimensions as a vector: it must be contiguous, or have one dimension.
class Line {
 public:
  Line(const char* op, const char* name, const Tensor& t)
      : data_(t.data_ptr()), dtype_(dtype_of(t)), size_(t.numel()), stride_(t.dim() == 1 ? t.stride(0) : 1) {
    STD_TORCH_CHECK(t.dim() == 1 || t.is_contiguous(), op, ": ", name, " must be contiguous, or a vector");
  }

  int64_t size() const { return size_; }
  DType dtype() const { return dtype_; }
  View view() const { return View{data_, dtype_, 1, &size_, &stride_}; }

 private:
  void* data_;
  DType dtype_;
  int64_t size_, stride_;
};

}  // namespace opsmith
