// What follows the sums of a linear layer while they are in cache: bias, activation, residual.
#pragma once

#include "linear.h"
#include "simd.h"

namespace opsmith {

constexpr int64_t kPanel = kLinearPanel;  // sums of a row that lie together

template <Activation A>
inline Vec activate(Vec v) {
  constexpr float root_half = 0.70710678118654752f, root_2_over_pi = 0.79788456080286536f;
  switch (A) {
    case Activation::gelu: return 0.5f * v * (1.0f + erf(v * root_half));
    case Activation::gelu_tanh:
      return v / (1.0f + exp(-v * fma(v * v, 2 * root_2_over_pi * 0.044715f, 2 * root_2_over_pi)));
    case Activation::relu: return max(Vec{}, v);
    case Activation::silu: return v / (1.0f + exp(-v));
    default: return v;
  }
}

template <class T>
struct Epilogue {
  const T* bias;
  const T* residual;
  int64_t residual_stride;
  T* y;
  int64_t y_stride;
  T* before;  // the activation's input, for its backward; rows like y's
  Activation activation;

  template <Activation A>
  void run(int64_t row, int rows, int64_t column, int64_t width, const float* sums) const {
    for (int r = 0; r < rows; ++r, sums += kPanel) {
      const T* b = bias ? bias + column : nullptr;
      const T* more = residual ? residual + (row + r) * residual_stride + column : nullptr;
      T* to = y + (row + r) * y_stride + column;
      T* kept = before ? before + (row + r) * y_stride + column : nullptr;
      for_lanes(width, [&](int64_t c, auto lanes) {
        Vec v = load(sums + c);
        if (b) v += load(b + c, lanes);
        if (kept) store(kept + c, v, lanes);
        v = activate<A>(v);
        if (more) v += load(more + c, lanes);
        store(to + c, v, lanes);
      });
    }
  }

  // What is written is read before, a few lines of each row: asked for while the sums are computed.
  void expect(int64_t row, int rows, int64_t column, int64_t width) const {
    for (int r = 0; r < rows; ++r) {
      const int64_t at = (row + r) * y_stride + column;
      for (int64_t c = 0; c < width; c += 64 / int64_t(sizeof(T))) {
        prefetch_written(y + at + c);
        if (before) prefetch_written(before + at + c);
      }
    }
  }

  void operator()(int64_t row, int rows, int64_t column, int64_t width, const float* sums, int64_t) const {
    switch (activation) {
      case Activation::gelu: return run<Activation::gelu>(row, rows, column, width, sums);
      case Activation::gelu_tanh: return run<Activation::gelu_tanh>(row, rows, column, width, sums);
      case Activation::relu: return run<Activation::relu>(row, rows, column, width, sums);
      case Activation::silu: return run<Activation::silu>(row, rows, column, width, sums);
      default: return run<Activation::none>(row, rows, column, width, sums);
    }
  }
};

template <class T>
Epilogue<T> epilogue(View bias, View residual, Activation activation, View y, View before = {}) {
  const int64_t residual_stride = residual.defined() ? residual.strides[0] : 0;
  return {bias.as<T>(), residual.as<T>(), residual_stride, y.as<T>(),
          y.strides[0], before.as<T>(),   activation};
}

}  // namespace opsmith
