// What CUDA kernels made from a formula are written in: float32 values, reductions of a block, and how rows are dealt out.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "types.h"

namespace opsmith::cuda {

__device__ inline float wide(float v) { return v; }
__device__ inline float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ inline float wide(__half v) { return __half2float(v); }
__device__ inline void put(float* p, float v) { *p = v; }
__device__ inline void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }
__device__ inline void put(__half* p, float v) { *p = __float2half_rn(v); }
template <class T>
__device__ inline float cast_to(float v) {
  T rounded;
  put(&rounded, v);
  return wide(rounded);
}

// A row is dealt to the `x` threads of a block; narrow rows share a block, `y` of them, unless they are reduced.
struct Tile {
  dim3 threads, blocks;

  Tile(int64_t rows, int64_t size, bool reduces, int64_t most_blocks = 1 << 20) {
    const int64_t x = std::clamp<int64_t>((size + 31) / 32 * 32, 32, reduces ? 1024 : 256);
    const int64_t y = reduces ? 1 : 256 / x;
    threads = dim3(unsigned(x), unsigned(y));
    blocks = dim3(unsigned(std::clamp<int64_t>((rows + y - 1) / y, 1, most_blocks)));
  }
};

__device__ inline float where(bool condition, float a, float b) { return condition ? a : b; }
__device__ inline float larger(float a, float b) { return a > b || a != a ? a : b; }
__device__ inline float smaller(float a, float b) { return a < b || a != a ? a : b; }
__device__ inline float exp_of(float x) { return expf(x); }
__device__ inline float log_of(float x) { return logf(x); }
__device__ inline float sqrt_of(float x) { return sqrtf(x); }
__device__ inline float rsqrt_of(float x) { return 1.0f / sqrtf(x); }
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline float erf_of(float x) { return erff(x); }
__device__ inline float abs_of(float x) { return fabsf(x); }
__device__ inline float relu_of(float x) { return larger(x, 0.0f); }
__device__ inline float sigmoid_of(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float silu_of(float x) { return x / (1.0f + expf(-x)); }
__device__ inline float silu_slope_of(float x) {
  const float e = expf(-fabsf(x)), s = (x < 0.0f ? e : 1.0f) / (1.0f + e);
  return s + x * (e / ((1.0f + e) * (1.0f + e)));
}
__device__ inline float gelu_of(float x) { return 0.5f * x * (1.0f + erff(x * 0.707106781f)); }
__device__ inline float gelu_slope_of(float x) {
  return 0.5f * (1.0f + erff(x * 0.707106781f)) + x * expf(-0.5f * x * x) * 0.398942280f;
}
__device__ inline float gelu_tanh_of(float x) {
  return x * sigmoid_of(1.59576912f * x * (1.0f + 0.044715f * x * x));
}
__device__ inline float gelu_tanh_slope_of(float x) {
  const float c = fminf(fmaxf(x, -12.0f), 12.0f), z = 1.59576912f * c * (1.0f + 0.044715f * c * c);
  const float s = sigmoid_of(z);
  return s + c * s * sigmoid_of(-z) * 1.59576912f * (1.0f + 3.0f * 0.044715f * c * c);
}

struct Sum {
  float sum = 0;
  __device__ void add(float v) { sum += v; }
  __device__ void merge(const Sum& other) { sum += other.sum; }
  __device__ float value() const { return sum; }
};
struct Max {
  float best = -INFINITY;
  __device__ void add(float v) { best = larger(best, v); }
  __device__ void merge(const Max& other) { add(other.best); }
  __device__ float value() const { return best; }
};
struct Min {
  float best = INFINITY;
  __device__ void add(float v) { best = smaller(best, v); }
  __device__ void merge(const Min& other) { add(other.best); }
  __device__ float value() const { return best; }
};
// Mean and variance by Welford's update, merged by Chan's formula.
struct Moments {
  float count = 0, center = 0, m2 = 0;
  __device__ void add(float v) {
    count += 1;
    const float d = v - center;
    center += d / count;
    m2 += d * (v - center);
  }
  __device__ void merge(const Moments& other) {
    if (other.count == 0) return;
    const float all = count + other.count, d = other.center - center, share = other.count / all;
    center += d * share;
    m2 += other.m2 + d * d * count * share;
    count = all;
  }
  __device__ float mean() const { return center; }
  __device__ float variance() const { return m2 / count; }
};
// The maximum, and the sum of e^(x - maximum), in one pass.
struct Online {
  float top = -INFINITY, total = 0;
  __device__ static float scale(float x, float top) { return x == -INFINITY ? 0.0f : expf(x - top); }
  __device__ void add(float v) { merge({v, 1}); }
  __device__ void merge(const Online& other) {
    const float higher = larger(top, other.top);
    total = total * scale(top, higher) + other.total * scale(other.top, higher);
    top = higher;
  }
  __device__ float max() const { return top; }
  __device__ float sum() const { return top == -INFINITY ? NAN : total; }
};

// What all threads of a block know together, for each of them: by shuffles in a warp, through shared memory across warps.
template <class Known>
__device__ Known together(Known mine) {
  __shared__ Known warps[32];
  constexpr int words = sizeof(Known) / sizeof(float);
  auto in_warp = [](Known& known) {
    for (int apart = 16; apart > 0; apart /= 2) {
      Known other;
      for (int i = 0; i < words; ++i) {
        reinterpret_cast<float*>(&other)[i] = __shfl_xor_sync(~0u, reinterpret_cast<float*>(&known)[i],
                                                              apart);
      }
      known.merge(other);
    }
  };
  in_warp(mine);
  if (blockDim.x <= 32) return mine;
  __syncthreads();  // the last reduction has been read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x < 32) {
    mine = threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : Known();
    in_warp(mine);
    if (threadIdx.x == 0) warps[0] = mine;
  }
  __syncthreads();
  return warps[0];
}

template <class T>
__global__ void add_parts(const float* parts, int64_t blocks, int64_t size, T* total) {
  const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= size) return;
  float sum = 0;
  for (int64_t b = 0; b < blocks; ++b) sum += parts[b * size + at];
  put(total + at, sum);
}

// A row of sums for each block, added up in the order of the blocks: every run gives the same.
class ColumnSums {
 public:
  ColumnSums(bool wanted, int64_t blocks, int64_t size, cudaStream_t stream)
      : blocks_(blocks), size_(size), stream_(stream) {
    if (!wanted || size == 0) return;
    const size_t bytes = size_t(blocks * size) * sizeof(float);
    if (cudaMallocAsync(&parts_, bytes, stream) == cudaSuccess) cudaMemsetAsync(parts_, 0, bytes, stream);
  }
  ~ColumnSums() {
    if (parts_) cudaFreeAsync(parts_, stream_);
  }
  float* parts() const { return parts_; }
  template <class T>
  void write(void* total) const {
    if (!parts_) return;
    add_parts<<<unsigned((size_ + 255) / 256), 256, 0, stream_>>>(parts_, blocks_, size_,
                                                                  static_cast<T*>(total));
  }

 private:
  float* parts_ = nullptr;
  int64_t blocks_, size_;
  cudaStream_t stream_;
};

}  // namespace opsmith::cuda
