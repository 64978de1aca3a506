// Registers the experts, and checks what their memory safety needs. Ids are looked at here: kernels read wherever they point.
#include "binding.h"
#include "experts.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

constexpr const char* op = "experts";

// A tensor of these sizes and this dtype, its last dimension contiguous.
View lying(const char* name, const Tensor& t, std::initializer_list<int64_t> sizes, DType dtype) {
  const int64_t last = int64_t(sizes.size()) - 1;
  STD_TORCH_CHECK(t.dim() == last + 1 && std::equal(sizes.begin(), sizes.end(), t.sizes().begin()), op, ": ",
                  name, " has another shape than x and the weights ask for");
  STD_TORCH_CHECK(dtype_of(t) == dtype, op, ": ", name, " has another dtype than x asks for");
  STD_TORCH_CHECK(t.size(last) < 2 || t.stride(last) == 1 || t.numel() == 0, op, ": the last dimension of ",
                  name, " must be contiguous");
  return view_of(t);
}

// The weights [E, rows, columns] of all experts, the rows or the columns of each contiguous.
View weights_of(const char* name, const Tensor& t, int64_t experts, int64_t rows, int64_t columns,
                DType dtype) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == experts && t.size(1) == rows && t.size(2) == columns &&
                      dtype_of(t) == dtype && (t.stride(1) == 1 || t.stride(2) == 1),
                  op, ": ", name, " must be [", experts, ", ", rows, ", ", columns,
                  "] in x's dtype, the rows or the columns of each expert contiguous");
  return view_of(t);
}

void experts_op(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& ids,
                const Tensor& weights, const Optional& gate_up_bias, const Optional& down_bias,
                int64_t activation, double limit, const Tensor& y) {
  STD_TORCH_CHECK(x.dim() == 2 && down.dim() == 3 && ids.dim() == 2, op,
                  ": x must be [T, D], down [E, D, I] and ids [T, k]");
  const int64_t tokens = x.size(0), d = x.size(1), count = down.size(0), hidden = down.size(2),
                each = ids.size(1);
  const DType dtype = dtype_of(x), number = dtype_of(weights), kind = dtype_of(ids);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, op,
                  ": x must be floating-point");
  STD_TORCH_CHECK(number == dtype || number == DType::f32, op, ": weights must be float32 or in x's dtype");
  STD_TORCH_CHECK(kind == DType::i32 || kind == DType::i64, op, ": ids must be int32 or int64");
  STD_TORCH_CHECK(0 <= activation && activation <= 3, op, ": no activation ", activation);
  STD_TORCH_CHECK(limit > 0, op, ": limit must be above 0, got ", limit);
  const View id = lying("ids", ids, {tokens, each}, kind);
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t j = 0; j < each; ++j) {
      const int64_t one = integer_at(id, t * id.strides[0] + j);
      STD_TORCH_CHECK(0 <= one && one < count, op, ": ids must be in [0, ", count, "), got ", one,
                      " at position (", t, ", ", j, ")");
    }
  }
  const Experts all{
      weights_of("gate_up", gate_up, count, 2 * hidden, d, dtype),
      weights_of("down", down, count, d, hidden, dtype),
      gate_up_bias ? lying("gate_up_bias", *gate_up_bias, {count, 2 * hidden}, dtype) : View{},
      down_bias ? lying("down_bias", *down_bias, {count, d}, dtype) : View{},
      activation,
      float(limit),
  };
  experts(lying("x", x, {tokens, d}, dtype), all, id, lying("weights", weights, {tokens, each}, number),
          lying("y", y, {tokens, d}, dtype));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "experts", opsmith::kernel<&opsmith::experts_op>);
}
