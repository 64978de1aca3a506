// Binds the kernels to PyTorch: checks what their memory safety needs, finds the stream, and raises their errors.
#include "function.h"

#include "binding_cuda.h"

namespace cuda_layer_norm {
namespace {

using opsmith::DType;
using opsmith::dtype_of;
using opsmith::Tensor;
using opsmith::view_of;
using Optional = std::optional<Tensor>;

constexpr const char* kName = "cuda_layer_norm";
constexpr DType kFloat = DType::f32, kBfloat = DType::bf16, kHalf = DType::f16;

void forward_op(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, const Tensor& y) {
  opsmith::Call call(kName);
  call.tensor("x", x, {"...", "N"});
  call.tensor("weight", weight, {"N"});
  call.tensor("bias", bias, {"N"});
  call.tensor("y", y, {"...", "N"});
  call.dtypes(
      {dtype_of(x), dtype_of(weight), dtype_of(bias), dtype_of(y)},
      {{kFloat, kFloat, kFloat, kFloat}, {kBfloat, kFloat, kFloat, kBfloat}, {kHalf, kFloat, kFloat, kHalf}});
  const opsmith::Launch launch(kName, x);
  forward(view_of(x), view_of(weight), view_of(bias), eps, view_of(y), launch.stream());
  launch.check();
}

void backward_op(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                 const Optional& dx, const Optional& dweight, const Optional& dbias) {
  opsmith::Call call(kName);
  call.tensor("dy", dy, {"...", "N"});
  call.tensor("x", x, {"...", "N"});
  call.tensor("weight", weight, {"N"});
  call.tensor("dx", dx, {"...", "N"});
  call.tensor("dweight", dweight, {"N"});
  call.tensor("dbias", dbias, {"N"});
  call.dtypes({dtype_of(dy), dtype_of(x), dtype_of(weight), dtype_of(dx), dtype_of(dweight), dtype_of(dbias)},
              {{kFloat, kFloat, kFloat, kFloat, kFloat, kFloat},
               {kBfloat, kBfloat, kFloat, kBfloat, kFloat, kFloat},
               {kHalf, kHalf, kFloat, kHalf, kFloat, kFloat}});
  const opsmith::Launch launch(kName, x);
  backward(view_of(dy), view_of(x), view_of(weight), eps, view_of(dx), view_of(dweight), view_of(dbias),
           launch.stream());
  launch.check();
}

}  // namespace
}  // namespace cuda_layer_norm

STABLE_TORCH_LIBRARY_IMPL(cuda_layer_norm, CUDA, m) {
  m.impl("forward_cuda", opsmith::kernel<&cuda_layer_norm::forward_op>.boxed);
  m.impl("backward_cuda", opsmith::kernel<&cuda_layer_norm::backward_op>.boxed);
}
