// Registers the search for rows that are not zero, and checks what its memory safety needs.
#include "binding.h"
#include "nonzero_rows.h"

namespace opsmith {
namespace {

void nonzero_rows_op(const Tensor& x, const Tensor& found) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(0) > 0 && dtype_of(x) == DType::f32,
                  "nonzero_rows: x must be a float32 matrix with rows");
  STD_TORCH_CHECK(x.size(1) < 2 || x.stride(1) == 1,
                  "nonzero_rows: the last dimension of x must be contiguous");
  STD_TORCH_CHECK(found.dim() == 1 && found.size(0) == 1 + x.size(0) && found.is_contiguous() &&
                      dtype_of(found) == DType::i64,
                  "nonzero_rows: found must be a contiguous int64 [", 1 + x.size(0), "]");
  nonzero_rows(view_of(x), view_of(found));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "nonzero_rows", opsmith::kernel<&opsmith::nonzero_rows_op>);
}
