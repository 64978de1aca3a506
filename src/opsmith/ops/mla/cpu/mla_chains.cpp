// The ends of the two chains of MLA pre-processing, as operators of their own.
#include <cmath>

#include "mla_absorb.h"

namespace opsmith {
namespace {

constexpr int64_t kTokens = 32;  // that a head's weight meets at once

// A row's scale to the last bit of float32, from the row `y` that `mla_norm` made of x: it is a result here, and sums in
// float32 would cost it some. Only the largest element has to be normalized again.
template <class T>
float row_scale(const T* x, int64_t n, const float* gamma, const float* beta, float eps, const float* y) {
  Vec most = {};
  DVec sums[4] = {};
  for_lanes_unrolled<4>(n, [&](int64_t i, int u, auto k) {
    most = max(abs(load(y + i, k)), most);
    const DVec v = to_double(load(x + i, k));
    sums[u] += v * v;
  });
  const float largest = reduce_max(most);
  if (!gamma) return largest / 127.0f;
  int64_t at = 0;
  while (at < n && !(std::fabs(y[at]) >= largest)) ++at;
  if (at == n) return largest / 127.0f;
  double value = double(to_float(x[at])) /
                 std::sqrt(reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])) / double(n) + double(eps)) *
                 double(gamma[at]);
  if (beta) value += double(beta[at]);
  return float(std::fabs(value) / 127.0);
}

}  // namespace

void rms_norm_quant(View x, View weight, View bias, float eps, float scale, float offset, View q, View s) {
  const MlaVector gamma(weight), beta(bias);
  const int64_t n = x.sizes[1];
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(x.sizes[0], row_grain(n, 16384), [&](int64_t begin, int64_t end) {
      float* const y = scratch(n + W);
      for (int64_t r = begin; r < end; ++r) {
        int8_t* const to = q.as<int8_t>() + r * q.strides[0];
        mla_norm(x.as<T>() + r * x.strides[0], n, gamma.data(), beta.data(), eps, y);
        if (s.defined()) {
          mla_quantize(y, n, to);
          s.as<float>()[r] = row_scale(x.as<T>() + r * x.strides[0], n, gamma.data(), beta.data(), eps, y);
        } else {
          mla_quantize(y, n, scale, offset, to);
        }
      }
    });
  });
}

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
          mla_floats(q, (first + i) * q.strides[0] + h * q.strides[1], head, x + i * head);
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
