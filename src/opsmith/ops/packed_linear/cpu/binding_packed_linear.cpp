// Registers the linear layer on quantized weights, and checks what its memory safety needs.
#include "linear/binding_linear.h"
#include "packed_linear.h"

namespace opsmith {
namespace {

using torch::headeronly::ScalarType;

enum : int64_t { kPlain, kDynamic, kHalf, kNested, kFloat8 };  // formats.py: Scales

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

void packed_linear_op(const Tensor& x, const Tensor& weight, const Tensor& scale,
                      const std::optional<Tensor>& zero, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& outer, int64_t bits, int64_t group, int64_t scales,
                      const Tensor& y) {
  const Rows in("packed_linear", "x", x), out("packed_linear", "y", y);
  const int64_t k = in.n(), n = out.n();
  STD_TORCH_CHECK(out.rows() == in.rows() && out.dtype() == in.dtype(),
                  "packed_linear: y must have x's dtype and as many rows, ", in.rows());
  STD_TORCH_CHECK(bits == 8 || bits == 4, "packed_linear: weights have 8 or 4 bits, not ", bits);
  const bool half = scales == kHalf, nested = scales == kNested, dynamic = scales == kDynamic,
             floats = scales == kFloat8;
  STD_TORCH_CHECK(scales == kPlain || dynamic || half || nested || floats,
                  "packed_linear: no scales of kind ", scales);
  const bool apart = group == 16 ? nested : group == 32 || group == 64 || group == 128;
  const bool whole = group == 0 || (floats && group == 128);
  const bool fits = half || nested ? apart : bits == 8 ? whole : apart && !floats;
  STD_TORCH_CHECK(fits, "packed_linear: no group of ", group, " for ", bits, " bits");
  STD_TORCH_CHECK(!dynamic || bits == 8, "packed_linear: with dynamic, weights have 8 bits");
  STD_TORCH_CHECK(outer.has_value() == nested, "packed_linear: outer belongs to scales of kind ", kNested);
  const int64_t rows = round_up(n, kLeastPanel), bytes = round_up(k, kDepth) * bits / 8;
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(0) == rows && weight.size(1) == bytes &&
                      weight.is_contiguous() && weight.scalar_type() == ScalarType::Byte,
                  "packed_linear: the packed weight must be a contiguous uint8 [", rows, ", ", bytes, "]");
  if (group == 0) {
    STD_TORCH_CHECK(scale.dim() == 1 && scale.size(0) == n && scale.is_contiguous() &&
                        scale.scalar_type() == ScalarType::Float,
                    "packed_linear: scale must be a contiguous float32 [", n, "]");
  } else {
    const int64_t groups = (k + group - 1) / group;
    // Columns of a larger one: the scales of a layer that shares its packed weight with others.
    const auto in_rows = [&](const Tensor& t, ScalarType type) {
      return t.dim() == 2 && t.size(0) == groups && t.size(1) == n && t.scalar_type() == type &&
             (n < 2 || t.stride(1) == 1) && (groups < 2 || t.stride(0) >= n);
    };
    const auto type = nested   ? ScalarType::Char
                      : half   ? ScalarType::Half
                      : floats ? ScalarType::Float
                               : ScalarType::BFloat16;
    const bool others = scales == kPlain && in_rows(scale, ScalarType::Half);  // which GPTQ and AWQ have
    STD_TORCH_CHECK(others || in_rows(scale, type), "packed_linear: scale must be a ",
                    nested   ? "int8"
                    : half   ? "float16"
                    : floats ? "float32"
                             : "bfloat16",
                    " [", groups, ", ", n, "] with contiguous rows");
    STD_TORCH_CHECK(!zero || in_rows(*zero, ScalarType::Char), "packed_linear: zero must be an int8 [",
                    groups, ", ", n, "] with contiguous rows");
  }
  STD_TORCH_CHECK(!zero || (group > 0 && !half && !floats), "packed_linear: zeros belong to groups");
  if (outer) {
    const int64_t blocks = (k + kSuper - 1) / kSuper, levels = zero ? 2 : 1;
    STD_TORCH_CHECK(
        outer->dim() == 3 && outer->size(0) == levels && outer->size(1) == blocks && outer->size(2) == n &&
            outer->scalar_type() == ScalarType::Half && (n < 2 || outer->stride(2) == 1) &&
            (blocks < 2 || outer->stride(1) >= n) && (levels < 2 || outer->stride(0) >= n),
        "packed_linear: outer must be a float16 [", levels, ", ", blocks, ", ", n, "] with contiguous rows");
  }
  check_bias("packed_linear", "bias", bias, n, in.dtype());
  const View packed{weight.data_ptr(), DType::i8, 2, weight.sizes().data(), weight.strides().data()};
  packed_linear(in.view(), {packed, view_of(scale), view_of(zero), view_of(outer), bits, group, floats},
                view_of(bias), dynamic, out.view());
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "packed_linear", opsmith::kernel<&opsmith::packed_linear_op>);
}
