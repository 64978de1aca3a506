// RMSNorm whose result leaves as int8. x, q [rows, n]; weight, bias [n]; one scale and offset for the whole tensor, or s [rows].
#include "rms_norm/quantized_row.h"

namespace opsmith {
namespace {

// A row's scale to the last bit of float32, from the row `y` that `norm_row` made of x, and its largest number: it is a
// result here, and sums in float32 would cost it some. Only that number has to be normalized again.
template <class T>
float row_scale(const T* x, int64_t n, const float* gamma, const float* beta, float eps, const float* y,
                float most) {
  if (!gamma || !std::isfinite(most)) return most / 127.0f;
  DVec sums[4] = {};
  for_lanes_unrolled<4>(n, [&](int64_t i, int u, auto k) {
    const DVec v = to_double(load(x + i, k));
    sums[u] += v * v;
  });
  int64_t at = 0;  // looked for a vector at a time
  while (at + W <= n && !any(abs(load(y + at)) >= splat(most))) at += W;
  while (at < n && !(std::fabs(y[at]) >= most)) ++at;
  if (at == n) return most / 127.0f;
  double value = double(to_float(x[at])) /
                 std::sqrt(reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3])) / double(n) + double(eps)) *
                 double(gamma[at]);
  if (beta) value += double(beta[at]);
  return float(std::fabs(value) / 127.0);
}

}  // namespace

void rms_norm_quant(View x, View weight, View bias, double eps, View scale, View offset, View q, View s) {
  const float step = scale.defined() ? *scale.as<float>() : 1.0f;
  const float shift = offset.defined() ? *offset.as<float>() : 0.0f;
  const FloatVector gamma(weight), beta(bias);
  const int64_t n = x.sizes[1];
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(x.sizes[0], row_grain(n, 16384), [&](int64_t begin, int64_t end) {
      float* const y = scratch(n + W);
      for (int64_t r = begin; r < end; ++r) {
        int8_t* const to = q.as<int8_t>() + r * q.strides[0];
        norm_row(x.as<T>() + r * x.strides[0], n, gamma.data(), beta.data(), float(eps), y);
        if (s.defined()) {
          const float most = largest(y, n);
          quantize_row(y, n, most, to);
          s.as<float>()[r] = row_scale(x.as<T>() + r * x.strides[0], n, gamma.data(), beta.data(), float(eps),
                                       y, most);
        } else {
          quantize_row(y, n, step, shift, to);
        }
      }
    });
  });
}

}  // namespace opsmith
