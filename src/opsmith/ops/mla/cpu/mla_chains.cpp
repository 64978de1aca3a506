// The queries' epilogue as an operator of its own.
#include "mla_absorb.h"

namespace opsmith {
namespace {

constexpr int64_t kTokens = 32;  // that a head's weight meets at once

}  // namespace

void mla_q_epilogue(View q, View wuk, MlaRotation rotation, View q_nope_scale, View q_out, View q_rope) {
  const int64_t tokens = q.sizes[0], heads = q.sizes[1], head = q.sizes[2], kv_lora = wuk.sizes[2];
  const int64_t groups = ceil_div(tokens, kTokens);
  const MlaQueries c{wuk, q_nope_scale, q_out, q_rope, rotation};
  with_float_type(q.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const int64_t cost = std::min(tokens, kTokens) * wuk.sizes[1] * kv_lora;
    parallel_for(groups * heads, row_grain(cost, int64_t{1} << 18), [&](int64_t begin, int64_t end) {
      float* const x = scratch(kTokens * (head + kv_lora) + 2 * (head - wuk.sizes[1]) + 4 * W);
      float* const out = x + kTokens * head;
      for (int64_t task = begin; task < end; ++task) {
        const int64_t h = task / groups, first = task % groups * kTokens,
                      some = std::min(kTokens, tokens - first);
        for (int64_t i = 0; i < some; ++i) {
          read_floats(q, (first + i) * q.strides[0] + h * q.strides[1], head, x + i * head);
        }
        const char* const then = h + 1 < heads
                                     ? reinterpret_cast<const char*>(wuk.as<T>() + (h + 1) * wuk.strides[0])
                                     : nullptr;
        mla_finish_head<T>(c, h, first, some, x, then, out + kTokens * kv_lora, out);
      }
    });
  });
}

}  // namespace opsmith
