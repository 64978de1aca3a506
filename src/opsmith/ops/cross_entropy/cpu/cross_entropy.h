// Cross-entropy. Shapes and dtypes are the operator's contract (ops/cross_entropy).
#pragma once

#include <cstdint>

#include "types.h"

namespace opsmith {

enum class Reduction : int64_t { none = 0, sum = 1, mean = 2 };

struct LossOptions {
  int64_t ignore_index;
  double label_smoothing, z_loss;
  Reduction reduction;
};

// logits [N, V], target [N]; loss [N], or one number; stats [2, N] float32 for the backward, or undefined.
void cross_entropy(View logits, View target, const LossOptions& options, View loss, View stats);

// dloss as loss; dlogits like logits, and they may be the logits themselves. The logits may be those of some of the
// `classes` alone, from class `first` on.
void cross_entropy_backward(View dloss, View logits, View target, View stats, const LossOptions& options,
                            int64_t first, int64_t classes, View dlogits);

// The forward where the logits of a row come in parts: logits [N, some], the classes from `first` on; part by part
// into state [kLossState, N] float32, which the first part (first == 0) sets up.
constexpr int64_t kLossState = 6;
void cross_entropy_part(View logits, View target, const LossOptions& options, int64_t first, View state);
void cross_entropy_finish(View state, View target, const LossOptions& options, int64_t classes, View loss,
                          View stats);

// total += part, float32 and any type, both [n].
void add_to_total(View part, View total);

}  // namespace opsmith
