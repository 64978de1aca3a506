// The linear layer on quantized weights: dot products of bytes, whatever x is made of.
//
// x becomes whole numbers (fixed_point.h), each one, two or four digits, once. So the weight is used as it is stored: no
// conversion. With VNNI an instruction multiplies 64 weights by a digit of 8 bits, and a row of bfloat16 costs two of them for
// 64 bytes from memory; without, one multiplies 16 (AVX2) by a digit of 16 bits, and a row costs four and as many additions.
// 32-bit sums are exact. They become float at the end of a block, where the block's factors are multiplied in.
//
// The weight lies in panels of 32 columns, four (a nibble: eight) numbers of K of a column in each 32-bit lane.
#include "packed_linear.h"

#include <limits>

#include "fixed_point.h"
#include "packed_linear_floats.h"
#include "schedules/shares.h"

namespace opsmith {
namespace {

constexpr int64_t kChunk = 512;  // of K of a panel that the rows share while it is in the nearest cache
constexpr int64_t kMostRows = 384;  // of x that do so
constexpr int64_t kAhead = 24576;  // bytes from what is used to what is fetched to the second-level cache,
constexpr int64_t kNear = 3072;  // and from there to the nearest one
constexpr int64_t kBlock = 128;  // of K that share a factor, where the weight names no groups

// Rows of x in a tile: as many as registers hold sums for, vectors of columns by D digits each.
constexpr int most_rows(int D) { return (W == 16 ? 12 : kDigitBits == 8 ? 6 : 4) / D; }
// Vectors of columns beside so many sums of each: all of a panel, if they fit.
constexpr int vectors(int sums) { return W == 16 || sums > 2 ? 2 : 4; }
// Whether so many rows would push out of the nearest cache what comes before they use it.
constexpr bool busy(int rows, int D, bool nibbles) {
  return rows * D * (nibbles ? 2 : 1) >= (kDigitBits == 8 ? 12 : 3);
}

// Whether the sums of chunks are added up, and not of all blocks one after the other: a float32 would lose bits to those.
constexpr bool in_parts(int D) { return D * kDigitBits > 16; }

// Rows of x that are worth a weight in floats (packed_linear_floats.cpp): where a unit multiplies pairs of bfloat16 as fast as two
// digits, it wins for its sums, which do not end with each of the digits' blocks.
int64_t many_rows(const PackedProduct& one) {
  if (one.x.dtype == DType::bf16 && kPairUnit)
    return one.weight.group ? std::clamp<int64_t>(one.weight.group, 24, 96) : 96;
  return one.x.dtype == DType::f32 && !kDotsOfBytes ? 12 : std::numeric_limits<int64_t>::max();
}

template <class T>
inline Vec load_some(const T* p, int64_t columns) {
  return columns >= W ? load(p) : columns > 0 ? load(p, Part{int(columns)}) : Vec{};
}

// What the numbers of a group are multiplied by, and where they begin: of one group, and then of the next.
struct Steps {
  const char* scale = nullptr;  // of the columns; null if they have one for all groups
  const int8_t* zero = nullptr;
  const float16* outer = nullptr;  // null if there is none
  int64_t scale_stride = 0, zero_stride = 0;  // from one group's to the next, in bytes
  int64_t outer_stride = 0, outer_part = 0;  // to the next kSuper of K, and to what zeros are multiplied by
  int groups = 0, left = 0;  // of kSuper, and until its end
  int size = 0;  // of a scale, in bytes
  bool half = false;  // float16, else bfloat16

  Steps(const QuantizedWeight& p, int64_t k, int64_t column) {
    if (!p.group) return;
    half = p.scale.dtype == DType::f16;
    size = p.scale.dtype == DType::i8 ? 1 : 2;
    scale_stride = p.scale.strides[0] * size;
    scale = p.scale.as<char>() + k / p.group * scale_stride + column * size;
    if (p.zero.defined()) {
      zero_stride = p.zero.strides[0];
      zero = p.zero.as<int8_t>() + k / p.group * zero_stride + column;
    }
    if (p.outer.defined()) {
      groups = left = int(kSuper / p.group);
      outer_part = p.outer.strides[0], outer_stride = p.outer.strides[1];
      outer = p.outer.as<float16>() + k / kSuper * outer_stride + column;
    }
  }

  void skip(int64_t n) {
    if (scale) scale += n * size;
    if (zero) zero += n;
    if (outer) outer += n;
  }
  void next() {
    scale += scale_stride, zero += zero_stride;
    if (outer && --left == 0) outer += outer_stride, left = groups;
  }
  // The next panel's, which lie beside these: the processor does not see lines so far apart coming. A function that fetches
  // and no more is taken for one that does nothing, where it is not part of another.
  __attribute__((always_inline)) void expect() const {
    if (scale) prefetch(scale + kColumns * size);
    if (zero) prefetch(zero + kColumns);
    if (outer && left == groups) {
      prefetch(outer + kColumns);
      if (zero) prefetch(outer + outer_part + kColumns);
    }
  }
  Vec of(int64_t n, int64_t columns) const {
    if (!scale) return splat(1.0f);
    const char* const p = scale + n * size;
    if (outer) return load_some(reinterpret_cast<const int8_t*>(p), columns) * load_some(outer + n, columns);
    if (size == 1) return half_powers(load_some(reinterpret_cast<const int8_t*>(p), columns));
    if (half) return load_some(reinterpret_cast<const float16*>(p), columns);
    return load_some(reinterpret_cast<const bfloat16*>(p), columns);
  }
  Vec zeros(int64_t n, int64_t columns) const { return load_some(zero + n, columns); }
  Vec least(int64_t n, int64_t columns) const {
    return zeros(n, columns) * load_some(outer + outer_part + n, columns);
  }
};

constexpr int32_t kMiddle = 16;  // of the five bits that are kept in a byte

struct Tile {
  const Digit* digits;
  const float* factor;  // [row][block]
  const int32_t* start;  // [row][block][halves(D)]: what a sum begins with, times the zero if there is one
  int64_t blocks;  // from one row of these to the next
  const uint8_t* weight;
  const uint8_t* ahead;  // what the cache will need: as many bytes, in the order in which they lie
  int64_t pitch;  // bytes of a step
  int64_t depth, block;  // of K: here, and until a factor changes
  Steps steps;  // of the columns and blocks, where these have scales of their own
  const float* least;  // [row][block]: sums of x, for what a weight's numbers begin with, or null
  float around;  // what was taken off those numbers besides
  int64_t columns;  // that there are
  float* sums;  // rows of kColumns
  bool first;  // else it is added to the sums
  bool twice;  // to fetch in two steps, however few rows there are
  bool floats;  // nibbles are

  void skip(int64_t n) {
    weight += 4 * n, sums += n, columns -= n;
    steps.skip(n);
  }
};

template <int D, int R, int NV, bool nibbles>
__attribute__((noinline)) void multiply(const Tile& t) {
  const uint8_t *w = t.weight, *ahead = t.ahead;
  const Digit* x = t.digits;
  constexpr int each = D / halves(D);  // digits whose sums are one number
  const bool begins = t.first || in_parts(D);
  Vec total[R][NV];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) total[r][n] = begins ? Vec{} : load(t.sums + r * kColumns + n * W);
  }
  Steps steps = t.steps;
  const bool zeros = steps.zero && !t.least;
  int64_t k = 0;
  for (int64_t b = 0; k < t.depth; ++b, steps.next()) {
    asm("" : "+m"(steps));  // not in registers, which the loop over a group needs
    IVec sum[R][D][NV], zero[NV];
    if (zeros) {
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) zero[n] = to_int(steps.zeros(n * W, t.columns - n * W));
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int d = 0; d < D; ++d) {
        if (d % each) {  // begun by the lower digit
#pragma GCC unroll 4
          for (int n = 0; n < NV; ++n) sum[r][d][n] = IVec{};
          continue;
        }
        const IVec start = t.start[(r * t.blocks + b) * halves(D) + d / each] - IVec{};
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) sum[r][d][n] = start;
        if (zeros) {
#pragma GCC unroll 4
          for (int n = 0; n < NV; ++n) sum[r][d][n] = start * zero[n];
        }
      }
    }
    // Of each four of the rows as many as an instruction takes.
    auto add = [&](auto numbers) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int part = 0; part < 4 / kTakes; ++part) {
        Bytes column[NV];
#pragma GCC unroll 4
        for (int n = 0; n < NV; ++n) column[n] = numbers(n, part);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
          for (int d = 0; d < D; ++d) {
            const Four four = broadcast_four(x + 4 * (r * D + d) + kTakes * part);
#pragma GCC unroll 4
            for (int n = 0; n < NV; ++n) sum[r][d][n] = dot(sum[r][d][n], column[n], four);
          }
        }
      }
      x += 4 * R * D;
    };
    const int64_t until = std::min(k + t.block, t.depth);
    for (; k < until; k += nibbles ? 8 : 4, w += t.pitch, ahead += 4 * W * NV) {
      IVec word[NV];
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) {
        if (n * 4 * W % 64 == 0) {
          if (busy(R, D, nibbles) || t.twice) {
            prefetch_far(ahead + n * 4 * W);
            prefetch(w + kNear + n * 4 * W);
          } else {
            prefetch_once(w + kOnce + n * 4 * W);
          }
        }
        word[n] = load_words(w + n * 4 * W);
      }
      if constexpr (nibbles) {
#pragma GCC unroll 2
        for (int high = 0; high < 2; ++high) {
          if (t.floats) {
            IVec bytes[NV];
#pragma GCC unroll 4
            for (int n = 0; n < NV; ++n) bytes[n] = double_floats((word[n] >> 4 * high) & 0x0f0f0f0f);
            add([&](int n, int part) { return bytes_of(bytes[n], part); });
          } else {
            add([&](int n, int part) { return nibbles_of(word[n], high, part); });
          }
        }
      } else {
        add([&](int n, int part) { return bytes_of(word[n], part); });
      }
    }
    steps.expect();
    Vec scale[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) scale[n] = steps.of(n * W, t.columns - n * W);
    if (t.least) {  // numbers were multiplied around their middle, where sums are smaller
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) {
        const Vec offset = scale[n] * t.around - steps.least(n * W, t.columns - n * W);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) total[r][n] = fma(offset, splat(t.least[r * t.blocks + b]), total[r][n]);
      }
    }
    for (int r = 0; r < R; ++r) {
      const float factor = t.factor[r * t.blocks + b];
      for (int n = 0; n < NV; ++n) {
        const auto half = [&](int d) {
          if constexpr (each == 1)
            return sum[r][d][n];
          else
            return (sum[r][d + 1][n] << kDigitBits) + sum[r][d][n];
        };
        Vec whole = to_float(half(0));
        if constexpr (halves(D) == 2) whole = fma(to_float(half(each)), 65536.0f, whole);
        total[r][n] = fma(whole, scale[n] * factor, total[r][n]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) {
      float* const sum = t.sums + r * kColumns + n * W;
      store(sum, begins && !t.first ? load(sum) + total[r][n] : total[r][n]);
    }
  }
}

// sums [R, width], width a multiple of kLeastPanel.
template <int D, int R, bool nibbles>
inline void multiply_columns(int64_t width, Tile t) {
  constexpr int NV = vectors(R * D);
  t.ahead = t.weight + kAhead;
  for (; width >= NV * W; width -= NV * W, t.skip(NV * W)) {
    multiply<D, R, NV, nibbles>(t);
    t.ahead += t.depth / (nibbles ? 8 : 4) * 4 * W * NV;
  }
  if constexpr (NV * W > kLeastPanel) {
    if (width > 0) multiply<D, R, kLeastPanel / W, nibbles>(t);
  }
}

// One of several products: its rows as digits, what their sums begin with, and how it is shared out.
template <int D>
struct Digits {
  const PackedProduct& of;
  FixedPoint x;
  std::unique_ptr<int32_t[]> start;
  std::unique_ptr<float[]> least;
  int64_t n, panels, row_blocks, first, last;  // its tasks: first ... last

  Digits(const PackedProduct& product, FixedPoint rows, int64_t before)
      : of(product), x(std::move(rows)), n(of.y.sizes[1]), panels(ceil_div(n, kColumns)), first(before) {
    const int64_t m = x.rows, threads = num_threads();
    // What sums begin with takes the weights' zero away: they are stored as unsigned numbers.
    const bool nibbles = of.weight.bits == 4 && !of.weight.small_floats();
    const int32_t bytes = kTaken - 128 - kMiddle * of.weight.from_least();
    const int32_t middle = of.weight.from_zero() ? -1 : nibbles ? -8 : bytes;
    start.reset(new int32_t[size_t(m * x.blocks * halves(D))]);
    for (int64_t i = 0; i < m * x.blocks * halves(D); ++i) start[size_t(i)] = middle * x.sum[size_t(i)];
    if (of.weight.from_least()) {
      least.reset(new float[size_t(m * x.blocks)]);
      for (int64_t i = 0; i < m * x.blocks; ++i) {
        const int32_t* const sum = x.sum.get() + i * halves(D);
        least[size_t(i)] = (float(sum[0]) + (halves(D) == 2 ? 65536.0f * float(sum[halves(D) - 1]) : 0.0f)) *
                           x.factor[size_t(i)];
      }
    }
    row_blocks = ceil_div(m, kMostRows);
    while (row_blocks * panels % threads != 0 && row_blocks * panels < 8 * threads &&
           x.tiles >= 2 * (row_blocks + 1)) {
      ++row_blocks;
    }
    last = first + row_blocks * panels;
  }
};

template <int D, class Y>
void products(const std::vector<Digits<D>>& all) {
  int64_t cost = 0, tiles = 0;
  for (const Digits<D>& one : all) {
    cost = std::max(cost, one.x.depth * kColumns * (ceil_div(one.x.rows, one.row_blocks) + 4));
    tiles = std::max(tiles, ceil_div(one.x.tiles, one.row_blocks));
  }
  const int64_t sums_size = most_rows(D) * tiles * kColumns;
  parallel_shares(all.back().last, row_grain(cost, 1 << 18), [&](int64_t begin, int64_t end) {
    float* const sums = scratch(sums_size);
    auto one = std::upper_bound(all.begin(), all.end(), begin,
                                [](int64_t task, const Digits<D>& it) { return task < it.last; });
    for (int64_t task = begin; task < end; ++task) {
      if (task == one->last) ++one;
      const QuantizedWeight& p = one->of.weight;
      const View &bias = one->of.bias, &y = one->of.y;
      const bool nibbles = p.bits == 4;
      const FixedPoint& x = one->x;
      const int64_t first = (task - one->first) % one->panels * kColumns, depth = x.depth;
      const int64_t block = (task - one->first) / one->panels, row_blocks = one->row_blocks;
      const int64_t columns = std::min(kColumns, one->n - first), width = round_up(columns, kLeastPanel);
      const int64_t tile = block * x.tiles / row_blocks, tiles_end = (block + 1) * x.tiles / row_blocks;
      const int64_t row = x.first_row(tile), rows = x.first_row(tiles_end) - row;
      const uint8_t* const panel = p.weight.as<uint8_t>() + first * depth * p.bits / 8;
      if (depth == 0) std::fill(sums, sums + rows * kColumns, 0.0f);
      // One tile of all columns shares the panel with no other.
      const bool alone = tiles_end - tile == 1 && vectors(int(rows) * D) * W == kColumns;
      const int64_t chunk = alone && !in_parts(D) ? depth : kChunk;
      for (int64_t k = 0; k < depth; k += chunk) {
        Tile t{.steps = Steps(p, k, first)};
        t.blocks = x.blocks;
        t.depth = std::min(chunk, depth - k);
        t.block = x.block;
        t.weight = panel + k * width * p.bits / 8;
        t.pitch = 4 * width;
        t.columns = columns;
        t.around = nibbles ? 8.0f : float(kMiddle);
        t.first = k == 0;
        t.twice = asks_always() || tiles_end - tile > 1;
        t.floats = p.small_floats();
        for (int64_t i = tile; i < tiles_end; ++i) {
          const int64_t r = x.first_row(i);
          const int count = int(x.first_row(i + 1) - r);
          t.digits = x.digits.get() + (r * depth + count * k) * D;
          t.factor = x.factor.get() + r * x.blocks + k / x.block;
          t.start = one->start.get() + (r * x.blocks + k / x.block) * halves(D);
          t.least = one->least ? one->least.get() + r * x.blocks + k / x.block : nullptr;
          t.sums = sums + (r - row) * kColumns;
          with_count<most_rows(D)>(count, [&](auto r) {
            if (!nibbles) return multiply_columns<D, r(), false>(width, t);
            if constexpr (D * kDigitBits > 8) multiply_columns<D, r(), true>(width, t);
          });
        }
      }
      const float* scale = p.group ? nullptr : p.scale.as<float>() + first;
      const Y* b = bias.defined() ? bias.as<Y>() + first : nullptr;
      for (int64_t r = 0; r < rows; ++r) {
        Y* const to = y.as<Y>() + (row + r) * y.strides[0] + first;
        const float* const from = sums + r * kColumns;
        for_lanes(columns, [&](int64_t c, auto lanes) {
          Vec v = load(from + c, lanes);
          if (scale) v *= load(scale + c, lanes);
          if (b) v += load(b + c, lanes);
          store(to + c, v, lanes);
        });
      }
    }
  });
}

}  // namespace

void packed_linear(std::vector<PackedProduct> all, bool dynamic) {
  const auto done = [&](const PackedProduct& one) {
    if (one.x.sizes[0] == 0 || one.y.sizes[1] == 0) return true;
    const bool floats = one.weight.floats || (!dynamic && one.x.sizes[0] >= many_rows(one));
    if (floats) packed_linear_floats(one);
    return floats;
  };
  all.erase(std::remove_if(all.begin(), all.end(), done), all.end());
  if (all.empty()) return;
  const PackedProduct& any = all[0];
  const QuantizedWeight& weight = any.weight;
  with_float_types(any.x, any.y, [&]<class T, class Y>(T*, Y*) {
    auto run = [&](auto digits, auto how, int64_t block) {
      constexpr int D = decltype(digits)::value;
      std::vector<Digits<D>> rows;
      for (const PackedProduct& one : all) {
        rows.emplace_back(one, fixed_point<D, decltype(how)::value, T>(one.x, block, kDepth, most_rows(D)),
                          rows.empty() ? 0 : rows.back().last);
      }
      products<D, Y>(rows);
    };
    constexpr int digits = digits_of(std::is_same_v<T, float> ? 32 : 16);
    if (dynamic) return run(std::integral_constant<int, 1>{}, std::true_type{}, kChunk);
    run(std::integral_constant<int, digits>{}, std::false_type{}, weight.group ? weight.group : kBlock);
  });
}

}  // namespace opsmith
