// Registers the gated activations, and checks what their memory safety needs.
#include "binding.h"
#include "gated.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

// Two tensors of rows; the second one, where it was not given, is the second half of the first one's rows.
struct Pair {
  Rows first, second;

  Pair(const char* op, const char* name, const Tensor& a, const Optional& b)
      : first(op, name, a), second(b ? Rows(op, name, *b) : first) {
    STD_TORCH_CHECK(a.dim() > 0, op, ": ", name, " must have a dimension");
    if (b) {
      STD_TORCH_CHECK(same_sizes(a, *b), op, ": ", name, " must be two tensors of one shape");
      return;
    }
    STD_TORCH_CHECK(first.n() % 2 == 0, op, ": packed rows must have an even size, got ", first.n());
    second = first.half(true);
    first = first.half(false);
  }
};

void check(const char* op, int64_t activation, const Rows& a, std::initializer_list<const Rows*> others) {
  STD_TORCH_CHECK(0 <= activation && activation <= 2, op, ": no activation ", activation);
  for (const Rows* r : others) {
    STD_TORCH_CHECK(r->like(a), op, ": all tensors must have one shape and dtype");
  }
}

void gated_op(const Tensor& gate, const Optional& up, int64_t activation, const Tensor& y) {
  const Pair in("gated", "gate or up", gate, up);
  const Rows out("gated", "y", y);
  check("gated", activation, out, {&in.first, &in.second});
  gated(in.first.view(), in.second.view(), activation, out.view());
}

void gated_backward_op(const Tensor& dy, const Tensor& gate, const Optional& up, int64_t activation,
                       const Tensor& dgate, const Optional& dup) {
  const char* const op = "gated_backward";
  const Rows slope(op, "dy", dy);
  const Pair in(op, "gate or up", gate, up), out(op, "dgate or dup", dgate, dup);
  check(op, activation, slope, {&in.first, &in.second, &out.first, &out.second});
  gated_backward(slope.view(), in.first.view(), in.second.view(), activation, out.first.view(),
                 out.second.view());
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "gated", opsmith::kernel<&opsmith::gated_op>);
  opsmith::offer(m, "gated_backward", opsmith::kernel<&opsmith::gated_backward_op>);
}
