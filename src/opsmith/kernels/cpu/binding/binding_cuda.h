// What the binding of a project's CUDA kernels needs: the device and stream of a call, and its errors where they arise.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "binding_call.h"

namespace opsmith {

// While it lives, the device of a tensor is the current one; kernels go on PyTorch's stream there.
class Launch {
 public:
  Launch(const char* op, const Tensor& first) : op_(op), guard_(first.device_index) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(first.device_index, &stream_));
  }

  void* stream() const { return stream_; }

  // After the launches: raises for one that could not start, naming the operator. What goes wrong inside a kernel is known
  // only later, wherever the device is next waited for; with CUDA_LAUNCH_BLOCKING=1 in the environment a launch waits, and
  // it is known here.
  void check() const {
    const cudaError_t error = cudaGetLastError();
    STD_TORCH_CHECK(error == cudaSuccess, op_, ": CUDA says: ", cudaGetErrorString(error),
                    "; CUDA_LAUNCH_BLOCKING=1 makes every launch wait, so that an error shows at the kernel "
                    "that made it");
  }

 private:
  const char* op_;
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

}  // namespace opsmith
