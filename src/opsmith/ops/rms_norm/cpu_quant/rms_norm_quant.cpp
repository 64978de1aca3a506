// RMSNorm whose result leaves as int8. x, q [rows, n]; weight, bias [n]; one scale and offset for the whole tensor, or s [rows].
#include "rms_norm/quantized_row.h"

namespace opsmith {
namespace {

// In double: a scale is a result, to the last bit of float32, and sums in float32 would cost it some.
template <class T>
double root_mean_square(const T* x, int64_t n, double eps) {
  SquareSum sums[2];
  for_lanes_unrolled<2>(n, [&](int64_t i, int u, auto k) { sums[u].add(load(x + i, k)); });
  return std::sqrt((sums[0].total() + sums[1].total()) / double(n) + eps);
}

// A row's scale, from the row `y` that x became and its largest number, `most`: that one alone is normalized again.
template <class T>
float row_scale(const T* x, int64_t n, const float* gamma, const float* beta, double rms, const float* y,
                float most) {
  if (!gamma || !std::isfinite(most)) return most / 127.0f;
  int64_t at = 0;  // looked for a vector at a time
  while (at + W <= n && !any(abs(load(y + at)) >= splat(most))) at += W;
  while (at < n && !(std::fabs(y[at]) >= most)) ++at;
  if (at == n) return most / 127.0f;
  double value = double(to_float(x[at])) / rms * double(gamma[at]);
  if (beta) value += double(beta[at]);
  return float(std::fabs(value) / 127.0);
}

}  // namespace

void rms_norm_quant(View x, View weight, View bias, double eps, View scale, View offset, View q, View s) {
  const float step = scale.defined() ? *scale.as<float>() : 1.0f;
  const float shift = offset.defined() ? *offset.as<float>() : 0.0f;
  const FloatVector gamma(weight), beta(bias);
  const int64_t n = x.sizes[1];
  with_float_type(x.dtype, [&]<class T>(T*) {
    parallel_for(x.sizes[0], row_grain(n, 16384), [&](int64_t begin, int64_t end) {
      float* const y = scratch(n + W);
      for (int64_t r = begin; r < end; ++r) {
        int8_t* const to = q.as<int8_t>() + r * q.strides[0];
        const T* const row = x.as<T>() + r * x.strides[0];
        if (s.defined()) {
          const double rms = gamma.data() ? root_mean_square(row, n, eps) : 1.0;
          const float most = scale_row(row, n, gamma.data(), beta.data(), float(1.0 / rms), y);
          quantize_row(y, n, most, to);
          s.as<float>()[r] = row_scale(row, n, gamma.data(), beta.data(), rms, y, most);
        } else {
          norm_row(row, n, gamma.data(), beta.data(), float(eps), y);
          quantize_row(y, n, step, shift, to);
        }
      }
    });
  });
}

}  // namespace opsmith
