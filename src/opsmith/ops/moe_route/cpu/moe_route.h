// Which experts a token goes to, and with what weights. Shapes are the operator's contract (ops/moe_route).
#pragma once

#include "types.h"

namespace opsmith {

struct Routing {
  bool sigmoid;  // else softmax
  int64_t groups, open;  // of experts, and how many of them may be chosen from; 1 and 1 without groups
  bool normalize;
  float scale;
};

// logits [T, E], any row stride; bias [E], any floating-point type, or undefined; ids [T, k] and weights [T, k], contiguous.
// Each group has experts, and the open ones k of them.
void moe_route(const View& logits, const View& bias, const Routing& how, const View& ids,
               const View& weights);

// dlogits like logits, any row stride. Ids must be experts.
void moe_route_backward(const View& dweights, const View& logits, const View& ids, const Routing& how,
                        const View& dlogits);

}  // namespace opsmith
