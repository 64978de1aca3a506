// Registers attention over packed sequences. Their offsets are checked here too: a compiled graph has nobody erow_sums
// who would, and a wrong one would be a read out of bounds.
#include "attention.h"
#include "binding_attention.h"

namespace opsmith {
namespace {

void check_starts(const char* name, const View& starts, int64_t length) {
  const int64_t n = starts.dim == 1 ? starts.sizes[0] : 0;
  STD_TORCH_CHECK(n > 0 && (starts.dtype == DType::i32 || starts.dtype == DType::i64), "attention_varlen: ", name,
                  " must be int32 or int64 and hold one number more than there are sequences");
  STD_TORCH_CHECK(Sequences::at(starts, 0) == 0, "attention_varlen: ", name, " must start at 0, got ",
                  Sequences::at(starts, 0));
  for (int64_t i = 1; i < n; ++i) {
    STD_TORCH_CHECK(Sequences::at(starts, i - 1) <= Sequences::at(starts, i), "attention_varlen: ", name,
                    " must not decrease, got ", Sequences::at(starts, i - 1), " before ", Sequences::at(starts, i));
  }
  STD_TORCH_CHECK(Sequences::at(starts, n - 1) == length, "attention_varlen: ", name, " must end at ", length,
                  ", the tokens there are, got ", Sequences::at(starts, n - 1));
}

Sequences checked(const Tensor& q, const Tensor& k, const Tensor& query_starts, const Tensor& key_starts) {
  STD_TORCH_CHECK(query_starts.numel() == key_starts.numel(), "attention_varlen: cu_seqlens_q and cu_seqlens_k must ",
                  "name as many sequences, got ", query_starts.numel(), " and ", key_starts.numel(), " offsets");
  check_starts("cu_seqlens_q", view_of(query_starts), q.size(0));
  check_starts("cu_seqlens_k", view_of(key_starts), k.size(0));
  return {query_starts.numel() - 1, view_of(query_starts), view_of(key_starts)};
}

void attention_varlen_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& query_starts,
                         const Tensor& key_starts, double scale, bool causal, int64_t window, double softcap,
                         const Tensor& out, const std::optional<Tensor>& row_sums) {
  check_heads("attention_varlen", 3, q, k, v, out);
  check_row_sums("attention_varlen", row_sums, out);
  attention_varlen(view_of(q), view_of(k), view_of(v), checked(q, k, query_starts, key_starts),
                   {float(scale), causal, window, float(softcap)}, view_of(out), view_of(row_sums));
}

void attention_varlen_backward_op(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                  const Tensor& out, const Tensor& row_sums, const Tensor& query_starts,
                                  const Tensor& key_starts, double scale, bool causal, int64_t window, double softcap,
                                  const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  attention_varlen_backward(view_of(dout), view_of(q), view_of(k), view_of(v), view_of(out), view_of(row_sums),
                            checked(q, k, query_starts, key_starts), {float(scale), causal, window, float(softcap)},
                            view_of(dq), view_of(dk), view_of(dv));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "attention_varlen", TORCH_BOX(&opsmith::attention_varlen_op));
  opsmith::offer(m, "attention_varlen_backward", TORCH_BOX(&opsmith::attention_varlen_backward_op));
}
