// LayerNorm for NVIDIA GPUs: each row is read from memory once, its statistics by Welford's update and Chan's formula.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "function.h"

namespace cuda_layer_norm {

Tile::Tile(int64_t rows, int64_t n)
    : threads(int(std::clamp<int64_t>((n + kept - 1) / kept, 32, most) + 31) / 32 * 32),
      blocks(int(std::min<int64_t>(rows, grid))) {}

namespace {

constexpr int kWarp = 32;

__device__ float wide(float v) { return v; }
__device__ float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ float wide(__half v) { return __half2float(v); }
__device__ void put(float* p, float v) { *p = v; }
__device__ void put(__nv_bfloat16* p, float v) { *p = __float2bfloat16_rn(v); }
__device__ void put(__half* p, float v) { *p = __float2half_rn(v); }

// What is known of some of a row's elements; m2 is their summed squared deviation from their mean.
struct Moments {
  float count, mean, m2;

  __device__ void add(float v) {
    count += 1;
    const float d = v - mean;
    mean += d / count;
    m2 += d * (v - mean);
  }
  __device__ void merge(const Moments& other) {
    if (other.count == 0) return;
    const float all = count + other.count, d = other.mean - mean, share = other.count / all;
    mean += d * share;
    m2 += other.m2 + d * d * count * share;
    count = all;
  }
  __device__ Moments below(int lanes) const {
    return {__shfl_down_sync(~0u, count, lanes), __shfl_down_sync(~0u, mean, lanes),
            __shfl_down_sync(~0u, m2, lanes)};
  }
};

struct Sums {
  float a, b;

  __device__ void merge(const Sums& other) {
    a += other.a;
    b += other.b;
  }
  __device__ Sums below(int lanes) const {
    return {__shfl_down_sync(~0u, a, lanes), __shfl_down_sync(~0u, b, lanes)};
  }
};

// Merges what all threads of the block know: within each warp by shuffles, then across warps through shared memory.
template <class Known>
__device__ Known across_block(Known mine) {
  __shared__ Known parts[kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) mine.merge(mine.below(lanes));
  if (lane == 0) parts[warp] = mine;
  __syncthreads();
  if (warp == 0) {
    mine = lane < warps ? parts[lane] : Known{};
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) mine.merge(mine.below(lanes));
    if (lane == 0) parts[0] = mine;
  }
  __syncthreads();
  const Known all = parts[0];
  __syncthreads();  // before anyone writes the next row's
  return all;
}

// A thread's elements of a row: the first few are kept in registers, the others of a very long row are read again.
template <class T>
class Mine {
 public:
  __device__ Mine(const T* row, int64_t n) : row_(row), n_(n) {
#pragma unroll
    for (int k = 0; k < Tile::kept; ++k) {
      const int64_t i = threadIdx.x + int64_t(k) * blockDim.x;
      kept_[k] = i < n ? wide(row[i]) : 0.0f;
    }
  }
  template <class F>
  __device__ void each(F f) const {
#pragma unroll
    for (int k = 0; k < Tile::kept; ++k) {
      const int64_t i = threadIdx.x + int64_t(k) * blockDim.x;
      if (i < n_) f(i, kept_[k]);
    }
    for (int64_t i = threadIdx.x + int64_t(Tile::kept) * blockDim.x; i < n_; i += blockDim.x)
      f(i, wide(row_[i]));
  }

 private:
  const T* row_;
  int64_t n_;
  float kept_[Tile::kept];
};

template <class T>
__device__ float2 mean_and_scale(const Mine<T>& x, int64_t n, float eps) {
  Moments mine{};
  x.each([&](int64_t, float v) { mine.add(v); });
  const Moments all = across_block(mine);
  return {all.mean, rsqrtf(all.m2 / float(n) + eps)};
}

template <class T>
__global__ void __launch_bounds__(Tile::most) forward_rows(const T* x, const float* weight, const float* bias,
                                                           T* y, int64_t rows, int64_t n, float eps) {
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const Mine<T> in(x + r * n, n);
    const float2 s = mean_and_scale(in, n, eps);
    in.each([&](int64_t i, float v) { put(y + r * n + i, (v - s.x) * s.y * weight[i] + bias[i]); });
  }
}

// dx = scale * (g - mean(g) - normal * mean(g * normal)) with g = dy * weight; the statistics are kept for the columns.
template <class T>
__global__ void __launch_bounds__(Tile::most)
    backward_rows(const T* dy, const T* x, const float* weight, T* dx, float2* statistics, int64_t rows,
                  int64_t n, float eps) {
  for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
    const Mine<T> in(x + r * n, n);
    const float2 s = mean_and_scale(in, n, eps);
    if (threadIdx.x == 0) statistics[r] = s;
    if (dx == nullptr) continue;
    Sums mine{};
    in.each([&](int64_t i, float v) {
      const float g = wide(dy[r * n + i]) * weight[i];
      mine.merge({g, g * (v - s.x) * s.y});
    });
    const Sums all = across_block(mine);
    const float g_mean = all.a / float(n), both_mean = all.b / float(n);
    in.each([&](int64_t i, float v) {
      const float g = wide(dy[r * n + i]) * weight[i], normal = (v - s.x) * s.y;
      put(dx + r * n + i, s.y * (g - g_mean - normal * both_mean));
    });
  }
}

// A warp's width of columns, summed down the rows by the block's warps: no atomics, so that two runs agree.
template <class T>
__global__ void backward_columns(const T* dy, const T* x, const float2* statistics, float* dweight,
                                 float* dbias, int64_t rows, int64_t n) {
  __shared__ Sums parts[kWarp][kWarp + 1];
  const int64_t column = int64_t(blockIdx.x) * kWarp + threadIdx.x;
  Sums mine{};
  for (int64_t r = threadIdx.y; column < n && r < rows; r += blockDim.y) {
    const float slope = wide(dy[r * n + column]);
    mine.merge({slope * (wide(x[r * n + column]) - statistics[r].x) * statistics[r].y, slope});
  }
  parts[threadIdx.y][threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.y != 0 || column >= n) return;
  for (int other = 1; other < blockDim.y; ++other) mine.merge(parts[other][threadIdx.x]);
  if (dweight != nullptr) dweight[column] = mine.a;
  if (dbias != nullptr) dbias[column] = mine.b;
}

// Calls f with a null pointer of the element type, as the CPU kernels do, in CUDA's types.
template <class F>
void with_type(opsmith::DType dtype, F&& f) {
  switch (dtype) {
    case opsmith::DType::bf16: return f(static_cast<__nv_bfloat16*>(nullptr));
    case opsmith::DType::f16: return f(static_cast<__half*>(nullptr));
    default: return f(static_cast<float*>(nullptr));
  }
}

int64_t rows_of(const opsmith::View& x) {
  int64_t rows = 1;
  for (int64_t d = 0; d + 1 < x.dim; ++d) rows *= x.sizes[d];
  return rows;
}

}  // namespace

void forward(opsmith::View x, opsmith::View weight, opsmith::View bias, double eps, opsmith::View y,
             void* stream) {
  const int64_t rows = rows_of(x), n = x.sizes[x.dim - 1];
  if (rows == 0 || n == 0) return;
  const Tile tile(rows, n);
  with_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    forward_rows<<<tile.blocks, tile.threads, 0, cudaStream_t(stream)>>>(
        x.as<T>(), weight.as<float>(), bias.as<float>(), y.as<T>(), rows, n, float(eps));
  });
}

void backward(opsmith::View dy, opsmith::View x, opsmith::View weight, double eps, opsmith::View dx,
              opsmith::View dweight, opsmith::View dbias, void* stream) {
  const int64_t rows = rows_of(x), n = x.sizes[x.dim - 1];
  const auto queue = cudaStream_t(stream);
  if (rows == 0) {
    for (const opsmith::View& sum : {dweight, dbias}) {
      if (sum.defined() && n > 0) cudaMemsetAsync(sum.data, 0, size_t(n) * sizeof(float), queue);
    }
  }
  if (rows == 0 || n == 0) return;
  const Tile tile(rows, n);
  float2* statistics = nullptr;  // [rows]: mean and scale
  if (cudaMallocAsync(&statistics, size_t(rows) * sizeof(float2), queue) != cudaSuccess)
    return;  // `check` raises it
  with_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    backward_rows<<<tile.blocks, tile.threads, 0, queue>>>(dy.as<T>(), x.as<T>(), weight.as<float>(),
                                                           dx.as<T>(), statistics, rows, n, float(eps));
    if (!dweight.defined() && !dbias.defined()) return;
    const dim3 warps(kWarp, 16);
    backward_columns<<<int((n + kWarp - 1) / kWarp), warps, 0, queue>>>(
        dy.as<T>(), x.as<T>(), statistics, dweight.as<float>(), dbias.as<float>(), rows, n);
  });
  cudaFreeAsync(statistics, queue);
}

}  // namespace cuda_layer_norm
