// Registers RMSNorm to int8, and checks what its memory safety needs.
#include "binding.h"
#include "rms_norm/rms_norm.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

void rms_norm_quant_op(const Tensor& x, const Optional& weight, const Optional& bias, double eps,
                       const Optional& scale, const Optional& offset, const Tensor& q, const Optional& s) {
  const char* const op = "rms_norm_quant";
  const Rows in(op, "x", x), to(op, "q", q);
  STD_TORCH_CHECK(to.rows() == in.rows() && to.n() == in.n() && to.dtype() == DType::i8, op,
                  ": q must be int8, of x's size");
  STD_TORCH_CHECK(in.dtype() == DType::f32 || in.dtype() == DType::bf16 || in.dtype() == DType::f16, op,
                  ": x must be floating-point");
  check_weight(op, "weight", weight, in.n(), in.dtype());
  check_weight(op, "bias", bias, in.n(), in.dtype());
  STD_TORCH_CHECK(bool(s) != bool(scale) && (!bias || weight) && (!offset || scale), op,
                  ": either a scale, or s for one of each row");
  STD_TORCH_CHECK(!s || (s->numel() == in.rows() && s->is_contiguous() && dtype_of(*s) == DType::f32), op,
                  ": s must be contiguous float32, one for each row");
  const int64_t rows = in.rows(), step = 1;
  const View scales = s ? View{s->data_ptr(), DType::f32, 1, &rows, &step} : View{};
  rms_norm_quant(in.view(), view_of(weight), view_of(bias), float(eps),
                 scale ? number(op, "scale", scale) : 1.0f, offset ? number(op, "offset", offset) : 0.0f,
                 to.view(), scales);
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "rms_norm_quant", opsmith::kernel<&opsmith::rms_norm_quant_op>);
}
