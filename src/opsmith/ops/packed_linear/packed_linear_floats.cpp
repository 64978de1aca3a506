// The linear layer on quantized weights for rows of float32, where no instruction multiplies bytes and adds them up: two digits
// of 16 bits take eight instructions for what floats take four. A block of a panel becomes float32 in cache, and all rows
// multiply it there, as they do a weight that was not packed (linear_product.h).
#include "packed_linear_floats.h"

#include "fixed_point.h"
#include "linear/linear_product.h"

namespace opsmith {
namespace {

// The e4m3 float in the highest byte of each lane. Its exponent is 120 less than a float's of the same number.
inline Vec float8(IVec byte) {
  return as_float((byte >> 4) & int32_t(0x87f00000)) * bits_float(uint32_t(127 + 120) << 23);
}

// The weight as linear_product.h reads one: (number - middle) scale - least.
struct Dequantized {
  using Unit = float;
  static constexpr bool plain = true;
  QuantizedWeight weight;
  int64_t n, depth;

  const float* block(int64_t column, int64_t width, int64_t k, int64_t count, void* to) const {
    float* const floats = static_cast<float*>(to);
    for_lanes(width, [&](int64_t c, auto lanes) { some(column + c, k, count, floats + c, width, lanes); });
    return floats;
  }

 private:
  template <class Lanes>
  void some(int64_t column, int64_t k, int64_t count, float* to, int64_t to_stride, Lanes lanes) const {
    const auto& [packed, scales, zeros, outer, bits, group, floats] = weight;
    const bool nibbles = bits == 4;
    const int64_t first = column / kColumns * kColumns;
    const int64_t pitch = 4 * round_up(std::min(kColumns, n - first), kLeastPanel);
    const uint8_t* from = packed.as<uint8_t>() + (first * depth + k * (pitch / 4)) * bits / 8 +
                          (column - first) * 4;
    Vec scale = group ? Vec{} : load(scales.as<float>() + column, lanes);
    Vec middle = splat(!nibbles ? 128.0f : weight.from_least() ? 0.0f : 8.0f), least{};
    for (int64_t d = 0; d < count; d += 4) {
      if (group && (d == 0 || (k + d) % group == 0)) {
        const int64_t g = (k + d) / group;
        const int64_t at = g * scales.strides[0] + column;
        const Vec zero = zeros.defined() ? load(zeros.as<int8_t>() + g * zeros.strides[0] + column, lanes)
                                         : Vec{};
        if (outer.defined()) {
          const float16* const over = outer.as<float16>() + (k + d) / kSuper * outer.strides[1] + column;
          scale = load(scales.as<int8_t>() + at, lanes) * load(over, lanes);
          if (zeros.defined()) least = zero * load(over + outer.strides[0], lanes);
        } else {
          scale = floats                       ? load(scales.as<float>() + at, lanes)
                  : scales.dtype == DType::f16 ? load(scales.as<float16>() + at, lanes)
                                               : load(scales.as<bfloat16>() + at, lanes);
          if (zeros.defined()) middle = zero;
        }
      }
      const IVec word = load_words(from) >> (nibbles ? int(d % 8) : 0);  // the low nibbles come first
      for (int j = 0; j < 4 && d + j < count; ++j, to += to_stride) {
        if (floats) {
          store(to, float8(word << (24 - 8 * j)) * scale, lanes);
          continue;
        }
        const IVec number = (word >> (8 * j)) & (nibbles ? 15 : 255);
        store(to, (to_float(number) - middle) * scale - least, lanes);
      }
      if (!nibbles || d % 8 == 4) from += pitch;
    }
  }
};

constexpr int
    kStreamed = 8;  // rows of x that a weight of floats is multiplied by as it is read, not by way of the cache
constexpr int64_t kSummed = 128;  // of K that one accumulator sums

// sums [R, kColumns] of NV vectors of columns from the v-th of a panel on, x [R, depth].
template <int R, int NV>
void stream(const float* x, int64_t depth, const QuantizedWeight& weight, int64_t column, int64_t width,
            int64_t v, float* sums) {
  const float* const scales = weight.scale.as<float>() + column + v;
  const int64_t columns = weight.scale.sizes[weight.scale.dim - 1] - column - v;
  const uint8_t* from = weight.weight.as<uint8_t>() + column * depth + v * 4;
  Vec total[R][NV] = {};
  for (int64_t k = 0; k < depth;) {
    const float* const scale = scales + (weight.group ? k / weight.group * weight.scale.strides[0] : 0);
    Vec sum[R][NV] = {};
    for (const int64_t until = std::min(k + kSummed, depth); k < until; k += 4, from += 4 * width) {
      IVec word[NV];
      for (int n = 0; n < NV; ++n) word[n] = load_words(from + n * 4 * W);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Vec number[NV];
#pragma GCC unroll 2
        for (int n = 0; n < NV; ++n) number[n] = float8(word[n] << (24 - 8 * j));
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const Vec one = splat(x[r * depth + k + j]);
#pragma GCC unroll 2
          for (int n = 0; n < NV; ++n) sum[r][n] = fma(one, number[n], sum[r][n]);
        }
      }
    }
    for (int n = 0; n < NV; ++n) {
      const Part there{int(std::clamp<int64_t>(columns - n * W, 0, W))};
      const Vec step = load(scale + n * W, there);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) total[r][n] = fma(sum[r][n], step, total[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < NV; ++n) store(sums + r * kColumns + v + n * W, total[r][n]);
  }
}

template <int R = kStreamed>
void stream_rows(int rows, const float* x, int64_t depth, const QuantizedWeight& weight, int64_t column,
                 int64_t width, float* sums) {
  if constexpr (R > 1) {
    if (rows < R) return stream_rows<R - 1>(rows, x, depth, weight, column, width, sums);
  }
  int64_t v = 0;
  for (; v + 2 * W <= width; v += 2 * W) stream<R, 2>(x, depth, weight, column, width, v, sums);
  if (v < width) stream<R, 1>(x, depth, weight, column, width, v, sums);
}

template <class T, class Y>
void multiply_few(const PackedProduct& one) {
  const auto& [x, weight, bias, y] = one;
  const int64_t m = x.sizes[0], n = y.sizes[1], depth = round_up(x.sizes[1], kDepth);
  const Kept<0> wide(m * depth * int64_t(sizeof(float)));
  expand<T>(x, wide.as<float>(), depth);
  const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 16) / std::max<int64_t>(1, depth * kColumns));
  parallel_for(ceil_div(n, kColumns), grain, [&](int64_t begin, int64_t end) {
    float sums[kStreamed * kColumns];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t column = panel * kColumns, columns = std::min(kColumns, n - column);
      stream_rows(int(m), wide.as<float>(), depth, weight, column, round_up(columns, kLeastPanel), sums);
      for (int64_t r = 0; r < m; ++r) {
        Y* const to = y.as<Y>() + r * y.strides[0] + column;
        for_lanes(columns, [&](int64_t c, auto lanes) {
          Vec v = load(sums + r * kColumns + c, lanes);
          if (bias.defined()) v += load(bias.as<Y>() + column + c, lanes);
          store(to + c, v, lanes);
        });
      }
    }
  });
}

}  // namespace

void packed_linear_floats(const PackedProduct& one) {
  const auto& [x, weight, bias, y] = one;
  const int64_t k = x.sizes[1], n = y.sizes[1];
  with_float_types(x, y, [&](auto* in, auto* out) {
    using T = std::remove_pointer_t<decltype(in)>;
    using Y = std::remove_pointer_t<decltype(out)>;
    if (weight.floats && x.sizes[0] <= kStreamed) {
      multiply_few<T, Y>(one);
    } else {
      product<T, FloatFormat>(x, Dequantized{weight, n, round_up(k, kDepth)}, n, k, 1,
                              epilogue<Y>(bias, {}, Activation::none, y));
    }
    // A number that is not finite makes all of its row NaN, as it does with digits.
    parallel_for(x.sizes[0], row_grain(k, 16384), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const float most = largest(x.as<T>() + r * x.strides[0], k);
        Y* const to = y.as<Y>() + r * y.strides[0];
        if (most == most) continue;
        for_lanes(n, [&](int64_t c, auto lanes) { store(to + c, splat(most), lanes); });
      }
    });
  });
}

}  // namespace opsmith
