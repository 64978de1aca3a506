// Registers cross-entropy, and checks what its memory safety needs.
#include "binding.h"
#include "cross_entropy.h"

namespace opsmith {
namespace {

LossOptions options_of(int64_t ignore_index, double label_smoothing, double z_loss, int64_t reduction) {
  STD_TORCH_CHECK(0 <= reduction && reduction <= 2, "cross_entropy: no reduction ", reduction);
  return {ignore_index, label_smoothing, z_loss, Reduction(reduction)};
}

void check_rows(const char* name, const Tensor& t, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(
      t.dim() == 2 && t.size(0) == rows && t.size(1) == columns && (columns < 2 || t.stride(1) == 1),
      "cross_entropy: ", name, " must be [", rows, ", ", columns, "] with a contiguous last dimension");
}

void check_floats(const char* name, const Tensor& t, int64_t rows, int64_t columns) {
  check_rows(name, t, rows, columns);
  STD_TORCH_CHECK(dtype_of(t) == DType::f32, "cross_entropy: ", name, " must be float32");
}

void check_targets(const Tensor& target, int64_t rows, int64_t classes, int64_t ignore_index) {
  STD_TORCH_CHECK(target.dim() == 1 && target.size(0) == rows, "cross_entropy: target must be [", rows, "]");
  const View v = view_of(target);
  STD_TORCH_CHECK(v.dtype == DType::i32 || v.dtype == DType::i64,
                  "cross_entropy: target must be int32 or int64");
  const int64_t at = first_bad_target(v, classes, ignore_index);
  STD_TORCH_CHECK(at < 0, "cross_entropy: targets must lie in [0, ", classes,
                  ") or be ignored; see position ", at);
}

void check_loss(const char* name, const Tensor& loss, int64_t rows, Reduction reduction) {
  const bool fits = reduction == Reduction::none ? loss.dim() == 1 && loss.size(0) == rows
                                                 : loss.numel() == 1;
  STD_TORCH_CHECK(fits, "cross_entropy: ", name, " must have one number",
                  reduction == Reduction::none ? " for each row" : "");
}

void cross_entropy_op(const Tensor& logits, const Tensor& target, int64_t ignore_index,
                      double label_smoothing, double z_loss, int64_t reduction, const Tensor& loss,
                      const std::optional<Tensor>& stats) {
  const LossOptions options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  STD_TORCH_CHECK(logits.dim() == 2, "cross_entropy: logits must be [N, V]");
  const int64_t rows = logits.size(0), classes = logits.size(1);
  check_rows("logits", logits, rows, classes);
  check_targets(target, rows, classes, ignore_index);
  check_loss("loss", loss, rows, options.reduction);
  if (stats) check_floats("stats", *stats, 2, rows);
  cross_entropy(view_of(logits), view_of(target), options, view_of(loss), view_of(stats));
}

void cross_entropy_backward_op(const Tensor& dloss, const Tensor& logits, const Tensor& target,
                               const Tensor& stats, int64_t ignore_index, double label_smoothing,
                               double z_loss, int64_t reduction, int64_t first, int64_t classes,
                               const Tensor& dlogits) {
  const LossOptions options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  STD_TORCH_CHECK(logits.dim() == 2, "cross_entropy: logits must be [N, V]");
  const int64_t rows = logits.size(0), some = logits.size(1);
  if (classes < 0) classes = some;  // all of them
  check_rows("logits", logits, rows, some);
  check_rows("dlogits", dlogits, rows, some);
  check_floats("stats", stats, 2, rows);
  check_targets(target, rows, classes, ignore_index);
  check_loss("dloss", dloss, rows, options.reduction);
  STD_TORCH_CHECK(logits.scalar_type() == dlogits.scalar_type(),
                  "cross_entropy: logits and dlogits differ in dtype");
  cross_entropy_backward(view_of(dloss), view_of(logits), view_of(target), view_of(stats), options, first,
                         classes, view_of(dlogits));
}

void cross_entropy_part_op(const Tensor& logits, const Tensor& target, int64_t ignore_index,
                           double label_smoothing, int64_t first, int64_t classes, const Tensor& state) {
  STD_TORCH_CHECK(logits.dim() == 2, "cross_entropy: logits must be [N, V]");
  const int64_t rows = logits.size(0);
  check_rows("logits", logits, rows, logits.size(1));
  check_floats("state", state, kLossState, rows);
  check_targets(target, rows, classes, ignore_index);
  cross_entropy_part(view_of(logits), view_of(target), options_of(ignore_index, label_smoothing, 0, 0), first,
                     view_of(state));
}

void cross_entropy_finish_op(const Tensor& state, const Tensor& target, int64_t ignore_index,
                             double label_smoothing, double z_loss, int64_t reduction, int64_t classes,
                             const Tensor& loss, const std::optional<Tensor>& stats) {
  const LossOptions options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  STD_TORCH_CHECK(target.dim() == 1, "cross_entropy: target must be [N]");
  const int64_t rows = target.size(0);
  check_floats("state", state, kLossState, rows);
  check_targets(target, rows, classes, ignore_index);
  check_loss("loss", loss, rows, options.reduction);
  if (stats) check_floats("stats", *stats, 2, rows);
  cross_entropy_finish(view_of(state), view_of(target), options, classes, view_of(loss), view_of(stats));
}

void add_to_total_op(const Tensor& part, const Tensor& total) {
  STD_TORCH_CHECK(part.dim() == 1 && total.dim() == 1 && part.size(0) == total.size(0) &&
                      part.is_contiguous() && total.is_contiguous() && dtype_of(total) == DType::f32,
                  "cross_entropy: part and total must be contiguous vectors of one length, total float32");
  add_to_total(view_of(part), view_of(total));
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "cross_entropy", opsmith::kernel<&opsmith::cross_entropy_op>);
  opsmith::offer(m, "cross_entropy_backward", opsmith::kernel<&opsmith::cross_entropy_backward_op>);
  opsmith::offer(m, "add_to_total", opsmith::kernel<&opsmith::add_to_total_op>);
  opsmith::offer(m, "cross_entropy_part", opsmith::kernel<&opsmith::cross_entropy_part_op>);
  opsmith::offer(m, "cross_entropy_finish", opsmith::kernel<&opsmith::cross_entropy_finish_op>);
}
