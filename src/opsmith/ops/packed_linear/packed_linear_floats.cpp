// The linear layer on quantized weights for many rows. A block of a panel becomes floats in cache, and all rows multiply it there,
// as they do a weight that was not packed (linear_product.h): rows of float32 where no instruction multiplies bytes and adds
// them up, since two digits of 16 bits take eight instructions for what floats take four, and rows of bfloat16 where a unit multiplies
// pairs of them.
#include "packed_linear_floats.h"

#include "fixed_point.h"
#include "linear/linear_product.h"

namespace opsmith {
namespace {

// The e4m3 float in the highest byte of each lane. Its exponent is 120 less than a float's of the same number.
inline Vec float8(IVec byte) {
  return as_float((byte >> 4) & int32_t(0x87f00000)) * bits_float(uint32_t(127 + 120) << 23);
}

// The weight as linear_product.h reads one, (number - middle) scale - least. As pairs of bfloat16, which hold the numbers without
// their scale exactly, sums of a group are multiplied by it; of x they need those of each group then, where there is a least.
template <class Format>
struct Unpacked {
  using Unit = typename Format::Unit;
  static constexpr bool plain = true, pairs = std::is_same_v<Unit, Couple>;
  static_assert(!pairs || PANEL == kPanel, "scales are read for a whole panel at once");
  QuantizedWeight weight;
  int64_t n, depth;
  const float* x_sums;  // [row][group]

  Block<Format> block(int64_t column, int64_t width, int64_t k, int64_t count, void* to) const {
    constexpr int64_t per_unit = pairs ? 2 : 1;
    float *const units = static_cast<float*>(to), *const scale = units + kBlock * kPanel,
                 *const offset = scale + kScales * kPanel;
    const int64_t group = weight.group ? weight.group : 2 * kSum, end = (k + count) * per_unit;
    for_lanes(width, [&](int64_t c, auto lanes) {
      float* write = units + c;
      int64_t row = c;  // of scales
      for (int64_t at = k * per_unit; at < end; row += width) {
        const Group of(weight, at, column + c, lanes);
        if constexpr (pairs) {
          store(scale + row, of.scale, lanes);
          if (x_sums) store(offset + row, -of.least, lanes);
        }
        const int64_t until = std::min(at / group * group + group, end);
        const uint8_t* const from = address(column + c, at);
        if (weight.floats) {
          write = some<8>(from, column + c, until - at, of, write, width, lanes,
                          [](IVec word, int j) { return float8(word << (24 - 8 * j)); });
        } else if (weight.bits == 8) {
          write = some<8>(from, column + c, until - at, of, write, width, lanes, [](IVec word, int j) {
            return to_float((word ^ int32_t(0x80808080)) << (24 - 8 * j) >> 24);
          });
        } else {
          write = some<4>(from, column + c, until - at, of, write, width, lanes,
                          [&](IVec word, int j) { return to_float((word >> 8 * j) & 15) - of.middle; });
        }
        at = until;
      }
    });
    if constexpr (!pairs) return {units};
    const bool more = 2 * (k + count) < depth;  // of these columns, else of those that follow
    const int64_t next = more ? column : column + width, groups = ceil_div(depth, group);
    return {.columns = reinterpret_cast<const Unit*>(units),
            .chain = group / 2,
            .scale = scale,
            .offset = x_sums ? offset : nullptr,
            .x_sums = x_sums ? x_sums + 2 * k / group : nullptr,
            .x_groups = x_sums ? groups : 0,
            .ahead = address(next, more ? 2 * (k + count) : 0),
            .again = -kColumns * depth * weight.bits / 8,
            .step = next < n ? kFetchStep * 8 * weight.bits : 0};
  }

 private:
  struct Group {
    Vec scale, middle, least;

    template <class Lanes>
    Group(const QuantizedWeight& weight, int64_t k, int64_t column, Lanes lanes)
        : scale(), middle(splat(8.0f)), least() {
      const auto& [packed, scales, zeros, outer, bits, group, floats] = weight;
      const int64_t g = group ? k / group : 0, at = g * (group ? scales.strides[0] : 0) + column;
      const Vec zero = zeros.defined() ? load(zeros.as<int8_t>() + g * zeros.strides[0] + column, lanes)
                                       : Vec{};
      if (outer.defined()) {
        const float16* const over = outer.as<float16>() + k / kSuper * outer.strides[1] + column;
        scale = load(scales.as<int8_t>() + at, lanes) * load(over, lanes);
        if (zeros.defined())
          least = zero * load(over + outer.strides[0], lanes) - (bits == 4 ? scale * 8.0f : Vec{});
      } else {
        scale = floats || !group             ? load(scales.as<float>() + at, lanes)
                : scales.dtype == DType::f16 ? load(scales.as<float16>() + at, lanes)
                                             : load(scales.as<bfloat16>() + at, lanes);
        if (zeros.defined()) middle = zero;
      }
    }
  };

  int64_t panel_columns(int64_t column) const {
    return round_up(std::min(kColumns, n - column / kColumns * kColumns), kLeastPanel);
  }
  const uint8_t* address(int64_t column, int64_t k) const {
    const int64_t first = column / kColumns * kColumns, unit = 32 / weight.bits;
    return weight.weight.as<uint8_t>() +
           (first * depth + k / unit * unit * panel_columns(column)) * weight.bits / 8 + (column - first) * 4;
  }

  template <int bits, class Lanes, class F>
  float* some(const uint8_t* from, int64_t column, int64_t count, const Group& of, float* to, int64_t step,
              Lanes lanes, const F& number) const {
    const int64_t pitch = 4 * panel_columns(column);
    for (int64_t d = 0; d < count; d += 4) {
      const IVec word = load_words(from) >> (bits == 4 ? int(d % 8) : 0);  // the low nibbles come first
      if constexpr (pairs) {
        for (int j = 0; j < 4; j += 2, to += step) {
          const IVec low = as_int(number(word, j)), high = as_int(number(word, j + 1));
          store(to, as_float((low >> 16 & 0xffff) | (high & int32_t(0xffff0000))), lanes);
        }
      } else {
        for (int j = 0; j < 4 && d + j < count; ++j, to += step) {
          store(to, number(word, j) * of.scale - of.least, lanes);
        }
      }
      if (bits == 8 || d % 8 == 4) from += pitch;
    }
    return to;
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

template <class T>
void sum_groups(const View& x, int64_t group, int64_t groups, float* to) {
  const int64_t k = x.sizes[1];
  parallel_for(x.sizes[0], row_grain(k, 16384), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * groups; i < end * groups; ++i) {
      const T* const from = x.as<T>() + i / groups * x.strides[0] + i % groups * group;
      Vec sum{};
      for_lanes(std::min(group, k - i % groups * group),
                [&](int64_t c, auto lanes) { sum += keep(load(from + c, lanes), lanes, 0.0f); });
      to[i] = reduce_add(sum);
    }
  });
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
      using Format = std::conditional_t<kPairUnit && std::is_same_v<T, bfloat16>, BFloatFormat, FloatFormat>;
      using Weight = Unpacked<Format>;
      const int64_t depth = round_up(k, kDepth), groups = weight.group ? ceil_div(k, weight.group) : 0;
      const bool sums = Weight::pairs && weight.from_least();
      const Kept<4> kept(sums ? x.sizes[0] * groups * int64_t(sizeof(float)) : 0);
      float* const x_sums = sums ? kept.as<float>() : nullptr;
      if (sums) sum_groups<T>(x, weight.group, groups, x_sums);
      product<T, Format>(x, Weight{weight, n, depth, x_sums}, n, Weight::pairs ? depth / 2 : k, 1,
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
