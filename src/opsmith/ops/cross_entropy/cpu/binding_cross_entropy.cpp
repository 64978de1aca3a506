// Registers cross-entropy, and checks what its memory safety needs.
#include "binding.h"
#include "cross_entropy.h"

namespace opsmith {
namespace {

LossOptions options_of(int64_t ignore_index, double label_smoothing, double z_loss, int64_t reduction) {
  STD_TORCH_CHECK(0 <= reduction && reduction <= 2, "cross_entropy: no reduction ", reduction);
  STD_TORCH_CHECK(0 <= label_smoothing && label_smoothing <= 1, "cross_entropy: no label smoothing of ",
                  label_smoothing);
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

// Targets of any dimensions, one for each row.
Line targets_of(const Tensor& target, int64_t rows, int64_t classes, int64_t ignore_index) {
  const Line all("cross_entropy", "target", target);
  STD_TORCH_CHECK(all.size() == rows, "cross_entropy: target must have ", rows, " classes");
  STD_TORCH_CHECK(is_id(all.dtype()), "cross_entropy: target must be int32 or int64");
  const View ids = all.view();
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t one = integer_at(ids, i * ids.strides[0]);
    STD_TORCH_CHECK(one == ignore_index || (0 <= one && one < classes),
                    "cross_entropy: targets must lie in [0, ", classes, ") or be ignored; see position ", i);
  }
  return all;
}

Line losses_of(const char* name, const Tensor& loss, int64_t rows, Reduction reduction) {
  const Line all("cross_entropy", name, loss);
  STD_TORCH_CHECK(all.size() == (reduction == Reduction::none ? rows : 1), "cross_entropy: ", name,
                  " must have one number", reduction == Reduction::none ? " for each row" : "");
  return all;
}

void cross_entropy_op(const Tensor& logits, const Tensor& target, int64_t ignore_index,
                      double label_smoothing, double z_loss, int64_t reduction, const Tensor& loss,
                      const Optional& stats) {
  const LossOptions options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  const Rows all("cross_entropy", "logits", logits);
  const Line targets = targets_of(target, all.rows(), all.n(), ignore_index);
  const Line losses = losses_of("loss", loss, all.rows(), options.reduction);
  STD_TORCH_CHECK(losses.dtype() == all.dtype() || losses.dtype() == DType::f32,
                  "cross_entropy: loss must be float32 or in the logits' dtype");
  if (stats) check_floats("stats", *stats, 2, all.rows());
  cross_entropy(all.view(), targets.view(), options, losses.view(), view_of(stats));
}

void cross_entropy_backward_op(const Tensor& dloss, const Tensor& logits, const Tensor& target,
                               const Tensor& stats, int64_t ignore_index, double label_smoothing,
                               double z_loss, int64_t reduction, int64_t first, int64_t classes,
                               const Tensor& dlogits) {
  const LossOptions options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  const Rows all("cross_entropy", "logits", logits), written("cross_entropy", "dlogits", dlogits);
  const int64_t rows = all.rows();
  if (classes < 0) classes = all.n();  // all of them
  STD_TORCH_CHECK(written.like(all), "cross_entropy: dlogits must be like logits");
  check_floats("stats", stats, 2, rows);
  const Line targets = targets_of(target, rows, classes, ignore_index);
  const Line dlosses = losses_of("dloss", dloss, rows, options.reduction);
  cross_entropy_backward(dlosses.view(), all.view(), targets.view(), view_of(stats), options, first, classes,
                         written.view());
}

void cross_entropy_part_op(const Tensor& logits, const Tensor& target, int64_t ignore_index,
                           double label_smoothing, int64_t first, int64_t classes, const Tensor& state) {
  STD_TORCH_CHECK(logits.dim() == 2, "cross_entropy: logits must be [N, V]");
  const int64_t rows = logits.size(0);
  check_rows("logits", logits, rows, logits.size(1));
  check_floats("state", state, kLossState, rows);
  const Line targets = targets_of(target, rows, classes, ignore_index);
  cross_entropy_part(view_of(logits), targets.view(), options_of(ignore_index, label_smoothing, 0, 0), first,
                     view_of(state));
}

void cross_entropy_finish_op(const Tensor& state, const Tensor& target, int64_t ignore_index,
                             double label_smoothing, double z_loss, int64_t reduction, int64_t classes,
                             const Tensor& loss, const Optional& stats) {
  const LossOptions options = options_of(ignore_index, label_smoothing, z_loss, reduction);
  STD_TORCH_CHECK(target.dim() == 1, "cross_entropy: target must be [N]");
  const int64_t rows = target.size(0);
  check_floats("state", state, kLossState, rows);
  const Line targets = targets_of(target, rows, classes, ignore_index);
  const Line losses = losses_of("loss", loss, rows, options.reduction);
  if (stats) check_floats("stats", *stats, 2, rows);
  cross_entropy_finish(view_of(state), targets.view(), options, classes, losses.view(), view_of(stats));
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
