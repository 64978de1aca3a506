// A row normalized in float32 by its root mean square, and the way from there to int8.
#pragma once

#include <cmath>

#include "nearest.h"
#include "rows.h"

namespace opsmith {

// n numbers of any floating-point type, from `at` on, as float.
inline void read_floats(const View& v, int64_t at, int64_t n, float* to) {
  with_float_type(v.dtype, [&]<class T>(T*) {
    const T* from = v.as<T>() + at;
    for_lanes(n, [&](int64_t i, auto k) { store(to + i, load(from + i, k), k); });
  });
}

// A vector as float, kept for as long as a call takes.
class FloatVector {
 public:
  explicit FloatVector(const View& v) {
    if (!v.defined()) return;
    memory_.reset(new float[size_t(v.sizes[0]) + W]);
    read_floats(v, 0, v.sizes[0], memory_.get());
  }
  const float* data() const { return memory_.get(); }

 private:
  std::unique_ptr<float[]> memory_;
};

// to = x * rstd * gamma + beta, in float, without gamma x itself; the largest magnitude is returned, NaN where one is.
template <class T>
inline float scale_row(const T* x, int64_t n, const float* gamma, const float* beta, float rstd, float* to) {
  IVec most{};
  for_lanes(n, [&](int64_t i, auto k) {
    Vec y = load(x + i, k);
    if (gamma) y = y * rstd * load(gamma + i, k);
    if (beta) y += load(beta + i, k);
    store(to + i, y, k);
    most = max(most, as_int(abs(keep(y, k, 0.0f))));
  });
  return largest(most);
}

// to = x / sqrt(mean(x^2) + eps) * gamma + beta, in float; without gamma x itself.
template <class T>
inline void norm_row(const T* x, int64_t n, const float* gamma, const float* beta, float eps, float* to) {
  if (!gamma) return void(scale_row(x, n, gamma, beta, 1.0f, to));
  Vec squares[4] = {};
  for_lanes_unrolled<4>(n, [&](int64_t i, int u, auto k) {
    const Vec v = load(x + i, k);
    squares[u] = fma(v, v, squares[u]);
  });
  const float sum = reduce_add((squares[0] + squares[1]) + (squares[2] + squares[3]));
  scale_row(x, n, gamma, beta, 1.0f / std::sqrt(sum / float(n) + eps), to);
}

// rint(clamp(v, -128, 127)), half to even.
template <class Lanes>
inline void store_q8(int8_t* p, Vec v, Lanes k) {
  store_low_bytes(p, nearest_integers(min(127.0f, max(-128.0f, v))), k);
}

// rint(clamp(y / scale + offset, -128, 127)). A division takes as long as several products: where nothing can overflow, y is
// clamped, and one step corrects its product with the inverse: what lies halfway between two integers does so still.
inline void quantize_row(const float* y, int64_t n, float scale, float offset, int8_t* to) {
  const bool fused = kRoundings == 1;
  if (fused && std::fabs(scale) > 1e-30f && std::fabs(scale) < 1e30f && std::fabs(offset) < 4096.0f) {
    const float inverse = 1.0f / scale, ends[] = {(-128.0f - offset) * scale, (127.0f - offset) * scale};
    const float low = std::min(ends[0], ends[1]), high = std::max(ends[0], ends[1]);
    for_lanes(n, [&](int64_t i, auto k) {
      const Vec v = min(high, max(low, load(y + i, k))), q = v * inverse;
      store_low_bytes(to + i, nearest_integers(fma(fma(q, -scale, v), inverse, q) + offset), k);
    });
    return;
  }
  for_lanes(n, [&](int64_t i, auto k) { store_q8(to + i, load(y + i, k) / scale + offset, k); });
}

// A row's integers with the scale max|y| / 127, which is returned; a row of zeros gives zeros, and so does one that is not
// finite: its scale says so.
inline float quantize_row(const float* y, int64_t n, float most, int8_t* to) {
  const float s = most / 127.0f;
  if (s > 0 && std::isfinite(s)) {
    quantize_row(y, n, s, 0.0f, to);
  } else {
    std::memset(to, 0, size_t(n));
  }
  return s;
}

}  // namespace opsmith
