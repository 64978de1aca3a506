// Binds the kernels to PyTorch: checks what their memory safety needs, finds the stream, and raises their errors.
#include "binding_cuda.h"
#include "rope_custom.h"

namespace rope_custom {
namespace {

using opsmith::DType;
using opsmith::dtype_of;
using opsmith::Tensor;
using opsmith::view_of;
using Optional = std::optional<Tensor>;

constexpr const char* kName = "rope_custom";

void forward_op(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& y) {
  opsmith::Call call(kName);
  call.tensor("x", x, {"B", "H", "L", "D"});
  call.tensor("cos", cos, {"L", "D"});
  call.tensor("sin", sin, {"L", "D"});
  call.tensor("y", y, {"B", "H", "L", "D"});
  call.dtypes({dtype_of(x), dtype_of(cos), dtype_of(sin), dtype_of(y)},
              {{DType::f16, DType::f16, DType::f16, DType::f16},
               {DType::bf16, DType::bf16, DType::bf16, DType::bf16},
               {DType::f32, DType::f32, DType::f32, DType::f32}});
  const opsmith::Launch launch(kName, x);
  forward(view_of(x), view_of(cos), view_of(sin), view_of(y), launch.stream());
  launch.check();
}

void backward_op(const Tensor& dy, const Tensor& x, const Tensor& cos, const Tensor& sin,
                 const Optional& dx) {
  opsmith::Call call(kName);
  call.tensor("dy", dy, {"B", "H", "L", "D"});
  call.tensor("x", x, {"B", "H", "L", "D"});
  call.tensor("cos", cos, {"L", "D"});
  call.tensor("sin", sin, {"L", "D"});
  call.tensor("dx", dx, {"B", "H", "L", "D"});
  call.dtypes({dtype_of(dy), dtype_of(x), dtype_of(cos), dtype_of(sin), dtype_of(dx)},
              {{DType::f16, DType::f16, DType::f16, DType::f16, DType::f16},
               {DType::bf16, DType::bf16, DType::bf16, DType::bf16, DType::bf16},
               {DType::f32, DType::f32, DType::f32, DType::f32, DType::f32}});
  const opsmith::Launch launch(kName, dy);
  backward(view_of(dy), view_of(x), view_of(cos), view_of(sin), view_of(dx), launch.stream());
  launch.check();
}

}  // namespace
}  // namespace rope_custom

STABLE_TORCH_LIBRARY_IMPL(rope_custom, CUDA, m) {
  m.impl("forward_cuda", opsmith::kernel<&rope_custom::forward_op>.boxed);
  m.impl("backward_cuda", opsmith::kernel<&rope_custom::backward_op>.boxed);
}
