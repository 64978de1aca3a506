// The forms of a projection in MLA pre-processing: what its activations become, and what its sums become again.
#pragma once

#include "mla_lanes.h"
#include "mla_rows.h"

namespace opsmith {

// A mode's activations: rows of X with zeros up to whole steps, and what some modes keep of each row.
template <class X>
struct MlaActivations {
  MlaActivations(int64_t tokens, int64_t depth)
      : stride(round_up(std::max<int64_t>(1, depth), 64)),
        rows_(new Line[size_t(tokens * stride) / (64 / sizeof(X))]()), scales(new float[size_t(tokens)]()),
        sums(new int32_t[size_t(tokens)]()) {}
  X* row(int64_t t) const { return rows_[0].x + t * stride; }
  RowSize size_of_rows(int64_t depth) const { return {depth, 64, depth * int64_t(sizeof(X))}; }

  const int64_t stride;

 private:
  struct alignas(64) Line {  // a vector that lies in two of them is loaded twice
    X x[64 / sizeof(X)];
  };
  const std::unique_ptr<Line[]> rows_;

 public:
  const std::unique_ptr<float[]> scales;
  const std::unique_ptr<int32_t[]> sums;  // of integers
};

template <class T>
inline void mla_add_bias(const MlaProjection& p, int64_t first, int64_t tokens, int64_t rows, float* out,
                         int64_t out_stride) {
  if (!p.bias.defined()) return;
  for (int64_t i = 0; i < tokens; ++i) {
    const T* bias = p.bias.as<T>() + first;
    for_lanes(rows, [&](int64_t r, auto k) {
      float* o = out + i * out_stride + r;
      store(o, load(o, k) + load(bias + r, k), k);
    });
  }
}

// x and weight of one type: products in float, what goes in is rounded to T.
template <class T_>
struct MlaFloat {
  using T = T_;
  using S = T;
  using X = typename Dots<T, S>::X;

  static void prepare(const float* y, int64_t n, const MlaProjection&, X* to, float*, int32_t*) {
    for_lanes(n, [&](int64_t i, auto k) { store(to + i, round_to<T>(load(y + i, k)), k); });
  }
  static void rows(const MlaActivations<X>& x, const IVec* lanes, int64_t tokens, const MlaProjection& p,
                   int64_t first, int64_t rows, int64_t depth, const Ahead& ahead, float* out,
                   int64_t out_stride, int32_t*) {
    const int64_t w_stride = p.weight.strides[0];
    const S* const w = p.weight.as<S>() + first * w_stride;
    const int64_t done = lane_rows<WordProduct<X, S>>(lanes, tokens, w, w_stride, rows, depth, ahead, out,
                                                      out_stride);
    dot_rows<Dots<T, S>::step * sizeof(S)>(
        tokens, w + done * w_stride, w_stride, rows - done, x.size_of_rows(depth),
        ahead.after(done * w_stride * int64_t(sizeof(S))), out + done, out_stride,
        [&](auto m, auto r, int64_t t, int64_t k, int64_t some, const S* w, auto next, float* o,
            int64_t o_stride) {
          dot_tile<T, S, m(), r()>(x.row(t) + k, x.stride, w, w_stride, some, next, o, o_stride);
        });
    mla_add_bias<T>(p, first, tokens, rows, out, out_stride);
  }
};

// An int8 weight with a scale for each of its rows; activations in floating point.
template <class T_>
struct MlaWeightInt8 {
  using T = T_;
  using S = int8_t;
  using X = typename Dots<T, S>::X;

  static void prepare(const float* y, int64_t n, const MlaProjection&, X* to, float*, int32_t*) {
    for_lanes(n, [&](int64_t i, auto k) { store(to + i, round_to<T>(load(y + i, k)), k); });
  }
  static void rows(const MlaActivations<X>& x, const IVec*, int64_t tokens, const MlaProjection& p,
                   int64_t first, int64_t rows, int64_t depth, const Ahead& ahead, float* out,
                   int64_t out_stride, int32_t*) {
    const int64_t w_stride = p.weight.strides[0];
    dot_rows<Dots<T, S>::step * sizeof(S)>(
        tokens, p.weight.as<S>() + first * w_stride, w_stride, rows,
        {depth, depth, depth * int64_t(sizeof(X)), kDotRows}, ahead, out, out_stride,
        [&](auto m, auto r, int64_t t, int64_t k, int64_t some, const S* w, auto next, float* o,
            int64_t o_stride) {
          dot_tile<T, S, m(), r()>(x.row(t) + k, x.stride, w, w_stride, some, next, o, o_stride);
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

// An int4 weight with a scale for each group of a row; activations in floating point.
template <class T_>
struct MlaWeightInt4 {
  using T = T_;
  using S = uint8_t;
  using X = typename Dots<T, int8_t>::X;

  static void prepare(const float* y, int64_t n, const MlaProjection& p, X* to, float*, int32_t*) {
    const int64_t half = p.weight.sizes[1];
    for (int64_t i = 0; i < n; ++i) to[i % 2 * half + i / 2] = from_float<X>(to_float(from_float<T>(y[i])));
  }
  static void rows(const MlaActivations<X>& x, const IVec*, int64_t tokens, const MlaProjection& p,
                   int64_t first, int64_t rows, int64_t, const Ahead& ahead, float* out, int64_t out_stride,
                   int32_t*) {
    const int64_t w_stride = p.weight.strides[0], half = p.weight.sizes[1], groups = p.descale.sizes[1];
    // A group has sums of its own beside those of the row: for more rows than two there are no registers.
    const RowSize size{half, half, 2 * half * int64_t(sizeof(X)), kFewRows,
                       sizeof(X) == 2 ? kFewRows : kDotRows};
    const uint8_t* const base = p.weight.as<S>();
    dot_rows<W>(
        tokens, base + first * w_stride, w_stride, rows, size, ahead, out, out_stride,
        [&](auto m, auto r, int64_t t, int64_t, int64_t, const S* w, auto next, float* o, int64_t o_stride) {
          const float* factor = p.descale.as<float>() + (w - base) / w_stride * groups;
          nibble_tile<m(), r()>(x.row(t), x.stride, half, w, w_stride, factor, groups, half / groups, next, o,
                                o_stride);
        });
    mla_add_bias<T>(p, first, tokens, rows, out, out_stride);
  }
};

// int8 times int8: one scale and offset for all activations, or a scale for each token.
template <class T_, bool per_token>
struct MlaInteger {
  using T = T_;
  using S = int8_t;
  using X = int8_t;

  static void prepare(const float* y, int64_t n, const MlaProjection& p, X* to, float* scale, int32_t* sum) {
    if constexpr (per_token) {
      *scale = quantize_row(y, n, to);
    } else {
      quantize_row(y, n, p.scale, p.offset, to);
    }
    int32_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += to[i];
    *sum = total;
  }
  static void rows(const MlaActivations<X>& x, const IVec* lanes, int64_t tokens, const MlaProjection& p,
                   int64_t first, int64_t rows, int64_t depth, const Ahead& ahead, float* out,
                   int64_t out_stride, int32_t* sums) {
    const int64_t w_stride = p.weight.strides[0];
    const S* const w = p.weight.as<S>() + first * w_stride;
    const int64_t done = lane_rows<WordProduct<X, S>>(lanes, tokens, w, w_stride, rows, depth, ahead, sums,
                                                      rows);
    dot_rows<kByteStep>(
        tokens, w + done * w_stride, w_stride, rows - done, x.size_of_rows(depth),
        ahead.after(done * w_stride), sums + done, rows,
        [&](auto m, auto r, int64_t t, int64_t k, int64_t some, const S* w, auto next, int32_t* o,
            int64_t o_stride) {
          const int32_t none[kDotTokens] = {};  // a row's first piece has the sum of the whole
          integer_tile<m(), r()>(x.row(t) + k, x.stride, k > 0 ? none : x.sums.get() + t, w, w_stride, some,
                                 next, o, o_stride);
        });
    const float* descale = p.descale.as<float>() + first;
    const int32_t* bias = p.bias.defined() ? p.bias.as<int32_t>() + first : nullptr;
    for (int64_t i = 0; i < tokens; ++i) {
      const float s = per_token ? x.scales[i] : 1.0f;
      const int32_t* const from = sums + i * rows;
      float* const to = out + i * out_stride;
      int64_t r = 0;
      for (; !bias && r + W <= rows; r += W)
        store(to + r, to_float((IVec)load_words(from + r)) * load(descale + r) * s);
      for (; r < rows; ++r) to[r] = float(int64_t(from[r]) + (bias ? bias[r] : 0)) * descale[r] * s;
    }
  }
};

}  // namespace opsmith
