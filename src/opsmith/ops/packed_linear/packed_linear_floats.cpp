// The linear layer on quantized weights for many rows. A block of a panel becomes floats in cache, and all rows multiply it there,
// as they do a weight that was not packed (linear_product.h): rows of float32 where no instruction multiplies bytes and adds
// them up, since two digits of 16 bits take eight instructions for what floats take four, and rows of bfloat16 where a unit multiplies them.
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
        } else if (weight.small_floats()) {
          write = some<4>(from, column + c, until - at, of, write, width, lanes, [](IVec word, int j) {
            return to_float((double_floats(word & 0x0f0f0f0f) ^ int32_t(0x80808080)) << (24 - 8 * j) >> 24);
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
                : scales.dtype == DType::i8  ? half_powers(load(scales.as<int8_t>() + at, lanes))
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

// What four numbers of K of a vector of columns do to the sums of a row of x: as floats, one after the other.
struct Singly {
  using X = float;
  static constexpr int per_x = 1, sums = 1,
                       at_once = 8;  // numbers of K, sums of a column; rows beside two vectors of columns
  Vec number[4];

  explicit Singly(IVec word) {
    for (int j = 0; j < 4; ++j) number[j] = float8(word << (24 - 8 * j));
  }
  void add(const X* x, Vec* sum) const {
    for (int j = 0; j < 4; ++j) *sum = fma(splat(x[j]), number[j], *sum);
  }
  static Vec whole(const Vec* sum) { return *sum; }
};

#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
// As pairs of bfloat16: the first sum is of the first two columns of each four, the second of the others, two lanes a column.
struct Doubly {
  using X = Couple;
  static constexpr int per_x = 2, sums = 2, at_once = 4;
  __m512bh first, second;

  // A nibble more than e4m3 has makes a byte and a half of a bfloat16. Its lower byte is the lower nibble moved up, and what the
  // exponent's other bits become is looked up; so is all of a number without an exponent.
  explicit Doubly(IVec word) {
    const auto table = [](uint64_t low, uint64_t high) __attribute__((always_inline)) {
      return _mm512_broadcast_i32x4(_mm_set_epi64x(int64_t(high), int64_t(low)));
    };
    const __m512i bytes = (__m512i)word, nibbles = _mm512_set1_epi8(15);
    const __m512i below = _mm512_and_si512(bytes, nibbles);
    const __m512i above = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibbles);
    const __mmask64 small = _mm512_testn_epi8_mask(bytes, _mm512_set1_epi8(0x70));
    const __m512i lower = _mm512_mask_shuffle_epi8(_mm512_andnot_si512(nibbles, _mm512_slli_epi16(bytes, 4)),
                                                   small, table(0x60402000c0800000, 0xf0e0d0c0b0a09080),
                                                   below);
    const __m512i upper = _mm512_xor_si512(
        _mm512_shuffle_epi8(table(0x43424140'3f3e3d3c, 0xc3c2c1c0'bfbebdbc), above),
        _mm512_maskz_shuffle_epi8(small, table(0x000000000707073c, 0), below));
    first = (__m512bh)_mm512_unpacklo_epi8(lower, upper);
    second = (__m512bh)_mm512_unpackhi_epi8(lower, upper);
  }
  void add(const X* x, Vec* sum) const {
    double pairs;
    std::memcpy(&pairs, x, sizeof pairs);
    const __m512bh both = (__m512bh)_mm512_set1_pd(pairs);
    sum[0] = (Vec)_mm512_dpbf16_ps((__m512)sum[0], both, first);
    sum[1] = (Vec)_mm512_dpbf16_ps((__m512)sum[1], both, second);
  }
  static Vec whole(const Vec* sum) {
    const __m512 a = (__m512)sum[0], b = (__m512)sum[1];
    return (Vec)_mm512_shuffle_ps(a, b, 0x88) + (Vec)_mm512_shuffle_ps(a, b, 0xdd);
  }
};
template <class T>
using Streaming = std::conditional_t<std::is_same_v<T, bfloat16>, Doubly, Singly>;
#else
template <class T>
using Streaming = Singly;
#endif

// sums [R, kColumns] of NV vectors of columns from the v-th of a panel on, x [R, depth].
template <class Form, int R, int NV>
void stream(const typename Form::X* x, int64_t depth, const QuantizedWeight& weight, int64_t column,
            int64_t width, int64_t v, float* sums) {
  const float* const scales = weight.scale.as<float>() + column + v;
  const int64_t columns = weight.scale.sizes[weight.scale.dim - 1] - column - v;
  const uint8_t* from = weight.weight.as<uint8_t>() + column * depth + v * 4;
  Vec total[R][NV] = {};
  for (int64_t k = 0; k < depth;) {
    const float* const scale = scales + (weight.group ? k / weight.group * weight.scale.strides[0] : 0);
    Vec sum[R][NV][Form::sums] = {};
    for (const int64_t until = std::min(k + kSummed, depth); k < until; k += 4, from += 4 * width) {
      if (v == 0) {
        for (int64_t line = 0; line < 4 * kColumns; line += 64) prefetch_once(from + kOnce + line);
      }
#pragma GCC unroll 2
      for (int n = 0; n < NV; ++n) {
        const Form four(load_words(from + n * 4 * W));
        for (int r = 0; r < R; ++r) four.add(x + (r * depth + k) / Form::per_x, sum[r][n]);
      }
    }
    for (int n = 0; n < NV; ++n) {
      prefetch(scale + kColumns + n * W);  // the next panel's
      const Part there{int(std::clamp<int64_t>(columns - n * W, 0, W))};
      const Vec step = load(scale + n * W, there);
      for (int r = 0; r < R; ++r) total[r][n] = fma(Form::whole(sum[r][n]), step, total[r][n]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int n = 0; n < NV; ++n) store(sums + r * kColumns + v + n * W, total[r][n]);
  }
}

template <class Form, int R>
void stream_rows(const typename Form::X* x, int64_t depth, const QuantizedWeight& weight, int64_t column,
                 int64_t width, float* sums) {
  constexpr int NV = R > Form::at_once ? 1 : 2;
  int64_t v = 0;
  for (; v + NV * W <= width; v += NV * W) stream<Form, R, NV>(x, depth, weight, column, width, v, sums);
  if (v < width) stream<Form, R, 1>(x, depth, weight, column, width, v, sums);
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
  using Form = Streaming<T>;
  using X = typename Form::X;
  const Kept<0> wide(m * depth / Form::per_x * int64_t(sizeof(X)));
  expand<T>(x, wide.as<X>(), depth / Form::per_x);
  parallel_for(ceil_div(n, kColumns), row_grain(depth * kColumns, 1 << 16), [&](int64_t begin, int64_t end) {
    float sums[kStreamed * kColumns];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t column = panel * kColumns, columns = std::min(kColumns, n - column);
      const int64_t width = round_up(columns, kLeastPanel);
      with_count<kStreamed>(
          m, [&](auto r) { stream_rows<Form, r()>(wide.as<X>(), depth, weight, column, width, sums); });
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
  with_float_types(x, y, [&]<class T, class Y>(T*, Y*) {
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
        const float most = largest_finite(x.as<T>() + r * x.strides[0], k);
        Y* const to = y.as<Y>() + r * y.strides[0];
        if (most == most) continue;
        for_lanes(n, [&](int64_t c, auto lanes) { store(to + c, splat(most), lanes); });
      }
    });
  });
}

}  // namespace opsmith
