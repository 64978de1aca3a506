// A tensor as a call lends it to a binding: what PyTorch would be asked for one by one, read once.
//
// Whoever calls fills it in: from PyTorch's stable ABI (binding.h), or from the tensor itself (call/fast/binding_direct.cpp), so that
// a binding's checks run no code of PyTorch's. Where nothing is in cache, as in decoding, that code comes from memory line by line.
#pragma once

#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <cstdint>

namespace opsmith {

// Sizes and strides are in elements, and live as long as the call.
struct Tensor {
  using Numbers = torch::headeronly::IntHeaderOnlyArrayRef;

  void* data;
  const int64_t *first_size, *first_stride;
  int64_t dims;
  torch::headeronly::ScalarType type;
  torch::headeronly::DeviceType device_type;
  int32_t device_index;

  void* data_ptr() const { return data; }
  torch::headeronly::ScalarType scalar_type() const { return type; }
  int64_t dim() const { return dims; }
  int64_t size(int64_t d) const { return first_size[checked(d)]; }
  int64_t stride(int64_t d) const { return first_stride[checked(d)]; }
  Numbers sizes() const { return {first_size, size_t(dims)}; }
  Numbers strides() const { return {first_stride, size_t(dims)}; }

  int64_t numel() const {
    int64_t count = 1;
    for (int64_t d = 0; d < dims; ++d) count *= first_size[d];
    return count;
  }

  bool is_contiguous() const {
    int64_t step = 1;
    for (int64_t d = dims - 1; d >= 0; --d) {
      if (first_size[d] != 1 && first_stride[d] != step) return numel() == 0;
      step *= first_size[d];
    }
    return true;
  }

 private:
  int64_t checked(int64_t d) const {
    STD_TORCH_CHECK(0 <= d && d < dims, "opsmith: a tensor of ", dims, " dimensions was asked for dimension ",
                    d);
    return d;
  }
};

}  // namespace opsmith
