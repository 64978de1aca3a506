// Experts: gated feed-forward layers, of which each token has a few. Ids must be checked before.
#pragma once

#include <vector>

#include "packed_linear/packed_linear.h"

namespace opsmith {

// A weight [N, K] of each expert: as it is, with a stride of 1 among the last two; or in packed tensors, which have E in front.
struct Weights {
  View plain;  // [E, N, K], or pairs of bfloat16 as [E, 1, N, K]
  QuantizedWeight packed;
  bool dynamic;  // of those that are packed: rows of the input are rounded, too
};

// The weights of all experts and what stands between their products.
struct Experts {
  int64_t count, hidden;  // E and I
  Weights gate_up, down;  // [E, 2I, D] and [E, D, I]
  View gate_up_bias, down_bias;  // [E, 2I] and [E, D], rows of any stride, or undefined
  int64_t activation;  // 0 SiLU, 1 GELU, 2 its tanh form, 3 that of GPT-OSS: rows of gate and up in turns
  float limit;  // of the gate, and of up in both directions
};

// What an expert is asked for: rows `first` ... `first + count` of the visits.
struct Group {
  int64_t expert, first, count;
};

// All rows of all experts, by expert and then by token, none of them twice.
struct Visits {
  std::vector<int64_t> token;
  std::vector<float> weight;
  std::vector<Group> groups;
};

// x [T, D], y [T, D], any row stride; ids and weights [T, k]. y[t] = sum over j of weights[t, j] * expert(ids[t, j])(x[t]).
void experts(const View& x, const Experts& all, const View& ids, const View& weights, const View& y);

}  // namespace opsmith
