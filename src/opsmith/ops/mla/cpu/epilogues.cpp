// What follows the two projections of MLA pre-processing, as operators of their own.
#include "absorb.h"

namespace opsmith::mla {
namespace {

constexpr int64_t kTokens = 32;  // that a head's weight meets at once

}  // namespace

void kv_epilogue(View a, const Keys& keys) {
  const KeyWriter writer(keys);
  with_float_type(a.dtype, [&]<class T>(T*) {
    const int64_t grain = row_grain(keys.gamma2.sizes[0] + keys.rope_size, 8192);
    parallel_for(a.sizes[0], grain, [&](int64_t begin, int64_t end) {
      float* const memory = scratch(writer.memory());
      for (int64_t i = begin; i < end; ++i) writer.write(a.as<T>() + i * a.strides[0], i, memory);
    });
  });
}

void q_epilogue(View q, const Queries& c) {
  const View& wuk = c.wuk;
  const int64_t tokens = q.sizes[0], heads = q.sizes[1], head = q.sizes[2], kv_lora = wuk.sizes[2];
  const int64_t groups = ceil_div(tokens, kTokens);
  with_float_type(q.dtype, [&]<class T>(T*) {
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
        finish_head<T>(c, h, first, some, x, then, out + kTokens * kv_lora, out);
      }
    });
  });
}

}  // namespace opsmith::mla
