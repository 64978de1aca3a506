// Registers the tracing of MLA pre-processing: where its tasks' times are written.
#include "binding.h"
#include "mla_trace.h"

namespace opsmith {
namespace {

// Returns how many tasks there were since tracing began; those that found no room are counted too.
int64_t trace_op(const Tensor& rows, bool on) {
  STD_TORCH_CHECK(
      rows.dim() == 2 && rows.size(1) == 4 && rows.is_contiguous() && dtype_of(rows) == DType::i64,
      "mla_trace: rows must be a contiguous int64 matrix of 4 columns");
  mla_trace_state.rows.store(nullptr, std::memory_order_release);
  const int64_t used = mla_trace_state.used.exchange(0);
  if (on) {
    mla_trace_state.capacity = rows.size(0);
    mla_trace_state.threads.store(0);
    mla_trace_state.rows.store(static_cast<int64_t*>(rows.data_ptr()), std::memory_order_release);
  }
  return used;
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "mla_trace", opsmith::kernel<&opsmith::trace_op>);
}
