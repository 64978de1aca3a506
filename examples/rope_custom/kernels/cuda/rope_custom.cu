// RopeCustom for NVIDIA GPUs: y = x * cos + rotate_interleaved(x) * sin
//
// Generated once, and yours to tune. Tile says how rows are dealt to blocks and threads; arithmetic is in float32.
#include "formula_cuda.h"
#include "rope_custom.h"

namespace rope_custom {

using namespace opsmith;
using namespace opsmith::cuda;

namespace {

// y = x * cos + rotate_interleaved(x) * sin
template <class T0>
__global__ void forward_kernel(const T0* x, const T0* cos, const T0* sin, T0* y, int64_t rows, int64_t size,
                               int64_t count_1) {
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
       row += int64_t(gridDim.x) * blockDim.y) {
    const int64_t half = size / 2;
    const T0* const x_row = x + row * size;
    const T0* const cos_row = cos + (row % count_1) * size;
    const T0* const sin_row = sin + (row % count_1) * size;
    T0* const y_row = y + row * size;
    for (int64_t at = threadIdx.x; at < half; at += blockDim.x) {
      const float v_x_1 = wide(x_row[2 * at]);
      const float v_cos_1 = wide(cos_row[2 * at]);
      const float v_x_2 = wide(x_row[2 * at + 1]);
      const float v_sin_1 = wide(sin_row[2 * at]);
      const float v_cos_2 = wide(cos_row[2 * at + 1]);
      const float v_sin_2 = wide(sin_row[2 * at + 1]);
      put(y_row + 2 * at, v_x_1 * v_cos_1 + -v_x_2 * v_sin_1);
      put(y_row + 2 * at + 1, v_x_2 * v_cos_2 + v_x_1 * v_sin_2);
    }
  }
}

template <class T0>
void forward_of(const View& x, const View& cos, const View& sin, const View& y, cudaStream_t stream) {
  const int64_t size = x.sizes[x.dim - 1], rows = sizes_between(x, 2, x.dim);
  if (rows == 0 || size == 0) return;
  const Tile tile(rows, size / 2, false);
  forward_kernel<<<tile.blocks, tile.threads, 0, stream>>>(x.as<T0>(), cos.as<T0>(), sin.as<T0>(), y.as<T0>(),
                                                           rows, size, sizes_between(x, 2, 2));
}

}  // namespace

void forward(View x, View cos, View sin, View y, void* stream) {
  if (x.dtype == DType::f16) return forward_of<__half>(x, cos, sin, y, static_cast<cudaStream_t>(stream));
  if (x.dtype == DType::bf16)
    return forward_of<__nv_bfloat16>(x, cos, sin, y, static_cast<cudaStream_t>(stream));
  if (x.dtype == DType::f32) return forward_of<float>(x, cos, sin, y, static_cast<cudaStream_t>(stream));
}

namespace {

// The gradients of x, derived from the formula.
template <class T0>
__global__ void backward_kernel(const T0* dy, const T0* cos, const T0* sin, T0* dx, int64_t rows,
                                int64_t size, int64_t count_1) {
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows;
       row += int64_t(gridDim.x) * blockDim.y) {
    const int64_t half = size / 2;
    const T0* const dy_row = dy + row * size;
    const T0* const cos_row = cos + (row % count_1) * size;
    const T0* const sin_row = sin + (row % count_1) * size;
    T0* const dx_row = dx + row * size;
    for (int64_t at = threadIdx.x; at < half; at += blockDim.x) {
      const float v_dy_2 = wide(dy_row[2 * at + 1]);
      const float v_sin_2 = wide(sin_row[2 * at + 1]);
      const float v_dy_1 = wide(dy_row[2 * at]);
      const float v_cos_1 = wide(cos_row[2 * at]);
      const float v_sin_1 = wide(sin_row[2 * at]);
      const float v_cos_2 = wide(cos_row[2 * at + 1]);
      if (dx) put(dx_row + 2 * at, (v_dy_2 * v_sin_2) + v_dy_1 * v_cos_1);
      if (dx) put(dx_row + 2 * at + 1, -(v_dy_1 * v_sin_1) + v_dy_2 * v_cos_2);
    }
  }
}

template <class T0>
void backward_of(const View& dy, const View& cos, const View& sin, const View& dx, cudaStream_t stream) {
  const int64_t size = dy.sizes[dy.dim - 1], rows = sizes_between(dy, 2, dy.dim);
  if (rows == 0 || size == 0) return;
  const Tile tile(rows, size / 2, false);
  backward_kernel<<<tile.blocks, tile.threads, 0, stream>>>(dy.as<T0>(), cos.as<T0>(), sin.as<T0>(),
                                                            dx.as<T0>(), rows, size, sizes_between(dy, 2, 2));
}

}  // namespace

void backward(View dy, View x, View cos, View sin, View dx, void* stream) {
  if (dy.dtype == DType::f16) return backward_of<__half>(dy, cos, sin, dx, static_cast<cudaStream_t>(stream));
  if (dy.dtype == DType::bf16)
    return backward_of<__nv_bfloat16>(dy, cos, sin, dx, static_cast<cudaStream_t>(stream));
  if (dy.dtype == DType::f32) return backward_of<float>(dy, cos, sin, dx, static_cast<cudaStream_t>(stream));
}

}  // namespace rope_custom
