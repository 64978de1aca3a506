// The forms of a projection in MLA pre-processing: what its activations become, and what its sums become again.
#pragma once

#include "mla_dots.h"
#include "mla_rows.h"

namespace opsmith {

// A mode's activations: rows of X with zeros up to whole steps, and a scale for each where it has one.
template <class X>
struct MlaActivations {
  X* rows;
  int64_t stride;
  float* scales;
};

// x and weight of one type: products in float, what goes in is rounded to T.
template <class T_>
struct MlaFloat {
  using T = T_;
  using S = T;
  using X = typename Dots<T, S>::X;
  static constexpr int64_t step = Dots<T, S>::step;

  static void prepare(const float* y, int64_t n, const MlaProjection&, X* to, float*) {
    for_lanes(n, [&](int64_t i, auto k) { store(to + i, round_to<T>(load(y + i, k)), k); });
  }
  static void rows(const MlaActivations<X>& x, int64_t t, int64_t tokens, const MlaProjection& p, int64_t first,
                   int64_t rows, int64_t depth, int64_t upcoming, float* out, int64_t out_stride, int32_t*) {
    const int64_t w_stride = p.weight.strides[0];
    dot_rows(x.rows + t * x.stride, x.stride, tokens, p.weight.as<S>() + first * w_stride, w_stride, rows,
             p.weight.as<S>() + upcoming * w_stride, out, out_stride,
             [&](auto m, auto r, const X* a, const S* w, const S* next, float* o) {
               dot_tile<T, S, m(), r()>(a, x.stride, w, w_stride, depth, next, o, out_stride);
             });
    if (!p.bias.defined()) return;
    for (int64_t i = 0; i < tokens; ++i) {
      const T* bias = p.bias.as<T>() + first;
      for_lanes(rows, [&](int64_t r, auto k) {
        float* o = out + i * out_stride + r;
        store(o, load(o, k) + load(bias + r, k), k);
      });
    }
  }
};

// An int8 weight with a scale for each of its rows; activations in floating point.
template <class T_>
struct MlaWeightInt8 {
  using T = T_;
  using S = int8_t;
  using X = float;
  static constexpr int64_t step = W;

  static void prepare(const float* y, int64_t n, const MlaProjection&, X* to, float*) {
    for_lanes(n, [&](int64_t i, auto k) { store(to + i, round_to<T>(load(y + i, k)), k); });
  }
  static void rows(const MlaActivations<X>& x, int64_t t, int64_t tokens, const MlaProjection& p, int64_t first,
                   int64_t rows, int64_t depth, int64_t upcoming, float* out, int64_t out_stride, int32_t*) {
    const int64_t w_stride = p.weight.strides[0];
    dot_rows(x.rows + t * x.stride, x.stride, tokens, p.weight.as<S>() + first * w_stride, w_stride, rows,
             p.weight.as<S>() + upcoming * w_stride, out, out_stride,
             [&](auto m, auto r, const X* a, const S* w, const S* next, float* o) {
               dot_tile<T, S, m(), r()>(a, x.stride, w, w_stride, depth, next, o, out_stride);
             });
    const float* descale = p.descale.as<float>() + first;
    const T* bias = p.bias.defined() ? p.bias.as<T>() + first : nullptr;
    for (int64_t i = 0; i < tokens; ++i) {
      for_lanes(rows, [&](int64_t r, auto k) {
        float* o = out + i * out_stride + r;
        Vec v = load(o, k) * load(descale + r, k);
        if (bias) v += load(bias + r, k);
        store(o, v, k);
      });
    }
  }
};

// int8 times int8: one scale and offset for all activations, or a scale for each token.
template <class T_, bool per_token>
struct MlaInteger {
  using T = T_;
  using S = int8_t;
  using X = int8_t;
  static constexpr int64_t step = IntegerDots::step;

  static void prepare(const float* y, int64_t n, const MlaProjection& p, X* to, float* scale) {
    if constexpr (per_token) {
      Vec most{};
      for_lanes(n, [&](int64_t i, auto k) { most = max(most, abs(keep(load(y + i, k), k, 0.0f))); });
      const float s = reduce_max(most) / 127.0f;
      *scale = s;
      if (!(s > 0)) {
        std::memset(to, 0, size_t(n));
        return;
      }
      for_lanes(n, [&](int64_t i, auto k) { mla_store_q8(to + i, load(y + i, k) / s, k); });
    } else {
      for_lanes(n, [&](int64_t i, auto k) { mla_store_q8(to + i, load(y + i, k) / p.scale + p.offset, k); });
    }
  }
  static void rows(const MlaActivations<X>& x, int64_t t, int64_t tokens, const MlaProjection& p, int64_t first,
                   int64_t rows, int64_t depth, int64_t upcoming, float* out, int64_t out_stride, int32_t* sums) {
    const int64_t w_stride = p.weight.strides[0];
    dot_rows(x.rows + t * x.stride, x.stride, tokens, p.weight.as<S>() + first * w_stride, w_stride, rows,
             p.weight.as<S>() + upcoming * w_stride, sums, rows,
             [&](auto m, auto r, const X* a, const S* w, const S* next, int32_t* o) {
               integer_tile<m(), r()>(a, x.stride, w, w_stride, depth, next, o, rows);
             });
    const float* descale = p.descale.as<float>() + first;
    const int32_t* bias = p.bias.defined() ? p.bias.as<int32_t>() + first : nullptr;
    for (int64_t i = 0; i < tokens; ++i) {
      const float s = per_token ? x.scales[t + i] : 1.0f;
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t sum = int64_t(sums[i * rows + r]) + (bias ? bias[r] : 0);
        out[i * out_stride + r] = float(sum) * descale[r] * s;
      }
    }
  }
};

}  // namespace opsmith
