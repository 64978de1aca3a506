// The linear layer on quantized weights for rows of float32, where no instruction multiplies bytes and adds them up: two digits
// of 16 bits take eight instructions for what floats take four. A block of a panel becomes float32 in cache, and all rows
// multiply it there, as they do a weight that was not packed (linear_product.h).
#include "fixed_point.h"
#include "linear/linear_product.h"
#include "packed_linear.h"

namespace opsmith {
namespace {

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
    const auto& [packed, scales, zeros, outer, bits, group] = weight;
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
          scale = scales.dtype == DType::f16 ? load(scales.as<float16>() + at, lanes)
                                             : load(scales.as<bfloat16>() + at, lanes);
          if (zeros.defined()) middle = zero;
        }
      }
      const IVec word = load_words(from) >> (nibbles ? int(d % 8) : 0);  // the low nibbles come first
      for (int j = 0; j < 4 && d + j < count; ++j, to += to_stride) {
        const IVec number = (word >> (8 * j)) & (nibbles ? 15 : 255);
        store(to, (to_float(number) - middle) * scale - least, lanes);
      }
      if (!nibbles || d % 8 == 4) from += pitch;
    }
  }
};

}  // namespace

void packed_linear_floats(View x, const QuantizedWeight& weight, View bias, View y) {
  const int64_t k = x.sizes[1], n = y.sizes[1];
  product<float, FloatFormat>(x, Dequantized{weight, n, round_up(k, kDepth)}, n, k, 1,
                              epilogue<float>(bias, {}, Activation::none, y));
  // A number that is not finite makes all of its row NaN, as it does with digits.
  parallel_for(x.sizes[0], row_grain(k, 16384), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float most = largest(x.as<float>() + r * x.strides[0], k);
      float* const to = y.as<float>() + r * y.strides[0];
      if (most != most) std::fill(to, to + n, most);
    }
  });
}

}  // namespace opsmith
