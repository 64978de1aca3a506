// Registers the experts, and checks what their memory safety needs. Ids are looked at here: kernels read wherever they point.
#include "experts.h"
#include "packed_linear/binding_packed.h"

namespace opsmith {
namespace {

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

// A weight of all experts as a call gives it: as it is, of 0 bits, or what a PackedExperts holds.
struct Given {
  const char* name;
  const Tensor& weight;
  const Optional &scale, &zero, &outer;
  int64_t bits, group, scales;

  Weights of(int64_t count, int64_t rows, int64_t columns, DType dtype) const {
    const Tensor& t = weight;
    if (bits == 0) {
      STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == count && t.size(1) == rows && t.size(2) == columns &&
                          dtype_of(t) == dtype && (t.stride(1) == 1 || t.stride(2) == 1),
                      op, ": ", name, " must be [", count, ", ", rows, ", ", columns,
                      "] in x's dtype, the rows or the columns of each expert contiguous");
      return {view_of(t), {}, false};
    }
    if (bits == 16) {
      const int64_t width = columns + columns % 2;
      STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == count && t.size(1) == 1 && t.size(2) == rows &&
                          t.size(3) == width && t.is_contiguous() && dtype_of(t) == DType::bf16,
                      op, ": ", name, " must be bfloat16 [", count, ", 1, ", rows, ", ", width, "]");
      return {view_of(t), {}, false};
    }
    STD_TORCH_CHECK(scale && count > 0, op, ": ", name, " needs its scale, and an expert");
    return {{},
            packed_weight(op, t, *scale, zero, outer, bits, group, scales, rows, columns, count),
            scales == kDynamic};
  }
};

void run(const Tensor& x, const Given& gate_up, const Given& down, int64_t hidden, const Tensor& ids,
         const Tensor& weights, const Optional& gate_up_bias, const Optional& down_bias, int64_t activation,
         double limit, const Tensor& y) {
  STD_TORCH_CHECK(x.dim() == 2 && ids.dim() == 2 && down.weight.dim() > 2, op,
                  ": x must be [T, D], ids [T, k] and weights [E, ...]");
  const int64_t tokens = x.size(0), d = x.size(1), count = down.weight.size(0), each = ids.size(1);
  const DType dtype = dtype_of(x), number = dtype_of(weights), kind = dtype_of(ids);
  STD_TORCH_CHECK(is_floating(dtype), op, ": x must be floating-point");
  STD_TORCH_CHECK(number == dtype || number == DType::f32, op, ": weights must be float32 or in x's dtype");
  STD_TORCH_CHECK(is_id(kind), op, ": ids must be int32 or int64");
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
      count,
      hidden,
      gate_up.of(count, 2 * hidden, d, dtype),
      down.of(count, d, hidden, dtype),
      gate_up_bias ? lying("gate_up_bias", *gate_up_bias, {count, 2 * hidden}, dtype) : View{},
      down_bias ? lying("down_bias", *down_bias, {count, d}, dtype) : View{},
      activation,
      float(limit),
  };
  experts(lying("x", x, {tokens, d}, dtype), all, id, lying("weights", weights, {tokens, each}, number),
          lying("y", y, {tokens, d}, dtype));
}

void experts_op(const Tensor& x, const Tensor& gate_up, const Tensor& down, const Tensor& ids,
                const Tensor& weights, const Optional& gate_up_bias, const Optional& down_bias,
                int64_t activation, double limit, const Tensor& y) {
  STD_TORCH_CHECK(down.dim() == 3, op, ": down must be [E, D, I]");
  const Optional none;
  run(x, {"gate_up", gate_up, none, none, none, 0, 0, 0}, {"down", down, none, none, none, 0, 0, 0},
      down.size(2), ids, weights, gate_up_bias, down_bias, activation, limit, y);
}

void experts_packed_op(const Tensor& x, const Tensor& gate_up, const Optional& gate_up_scale,
                       const Optional& gate_up_zero, const Optional& gate_up_outer, const Tensor& down,
                       const Optional& down_scale, const Optional& down_zero, const Optional& down_outer,
                       const Tensor& ids, const Tensor& weights, const Optional& gate_up_bias,
                       const Optional& down_bias, int64_t hidden, int64_t gate_up_bits, int64_t gate_up_group,
                       int64_t gate_up_scales, int64_t down_bits, int64_t down_group, int64_t down_scales,
                       int64_t activation, double limit, const Tensor& y) {
  STD_TORCH_CHECK(hidden >= 0 && gate_up_bits > 0 && down_bits > 0, op, ": these weights are not packed");
  run(x,
      {"gate_up", gate_up, gate_up_scale, gate_up_zero, gate_up_outer, gate_up_bits, gate_up_group,
       gate_up_scales},
      {"down", down, down_scale, down_zero, down_outer, down_bits, down_group, down_scales}, hidden, ids,
      weights, gate_up_bias, down_bias, activation, limit, y);
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "experts", opsmith::kernel<&opsmith::experts_op>);
  opsmith::offer(m, "experts_packed", opsmith::kernel<&opsmith::experts_packed_op>);
}
