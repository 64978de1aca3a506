// RopeCustom: y = x * cos + rotate_interleaved(x) * sin, tuned by hand from what `opsmith new` wrote.
//
// Written was a loop over rows, each with its row of the table: a head's rows pull the whole table through the caches
// before the next head begins with it anew. Here a task is a block of tokens, all their heads: its part of the table stays
// in the nearest cache while x streams past, four heads at once. Backward is the same loop with the rotation transposed.
#include "formula.h"

namespace rope_custom {

using namespace opsmith;

namespace {

constexpr int64_t kTableBytes = 64 << 10;  // of a block's part of the table
constexpr int kTogether = 4;  // heads, for which a piece of the table is loaded and taken apart once

inline Vec neighbors(Vec v) {  // of a pair, each in the other's place
#if defined(__clang__)
  Vec swapped;
  for (int l = 0; l < W; ++l) swapped[l] = v[l ^ 1];
  return swapped;
#else
  return __builtin_shuffle(v, lane_index() ^ 1);
#endif
}
// The sine with the sign that it has for each of a pair; transposed, that of the other.
template <bool inverse, class V>
V turning(V sine) {
  return apply(sine, [](Vec s) {
    const Vec second = __builtin_convertvector((lane_index() & 1) * 2 - 1,
                                               Vec);  // -1 for the first of a pair, 1 for the second
    return inverse ? -second * neighbors(s) : second * s;
  });
}

// One token's rows of n heads. Elements stay where they are, and a vector takes its neighbors by one shuffle within lanes;
// bfloat16 comes apart into the first and the second of each pair by a shift and a mask, which is less still.
template <bool inverse, int n, class T>
void turn_rows(const T* in, T* out, int64_t head, const T* cos, const T* sin, int64_t size, bool streaming) {
  if constexpr (!std::is_same_v<T, bfloat16>) {
    for_pairs(size, [=](int64_t at, auto lanes) {
      const auto c = load(cos + at, lanes), s = turning<inverse>(load(sin + at, lanes));
#pragma GCC unroll 4
      for (int h = 0; h < n; ++h) {
        const auto x = read(in + h * head + at, lanes);
        put(out + h * head + at, fma(apply(x, neighbors), s, x * c), lanes, streaming);
      }
    });
    return;
  }
  for_lanes(size / 2, [=](int64_t at, auto lanes) {
    Vec c1, c2, s1, s2;
    load_pairs(cos + 2 * at, lanes, c1, c2);
    load_pairs(sin + 2 * at, lanes, s1, s2);
#pragma GCC unroll 4
    for (int h = 0; h < n; ++h) {
      Vec x1, x2;
      read_pairs(in + h * head + 2 * at, lanes, x1, x2);
      if constexpr (inverse) {
        put_pairs(out + h * head + 2 * at, fma(x1, c1, x2 * s2), fma(x2, c2, -x1 * s1), lanes, streaming);
      } else {
        put_pairs(out + h * head + 2 * at, fma(x1, c1, -x2 * s1), fma(x2, c2, x1 * s2), lanes, streaming);
      }
    }
  });
}

template <bool inverse, class T>
void turn(const View& x, const View& cos, const View& sin, const View& y) {
  const int64_t batch = x.sizes[0], heads = x.sizes[1], length = x.sizes[2], size = x.sizes[3];
  if (size_of(x) == 0 || batch * heads * length == 0) return;
  const bool past_cache = outlives_cache(batch * heads * length * size * int64_t(sizeof(T)));
  const int64_t fits = std::max<int64_t>(1, kTableBytes / (2 * size * int64_t(sizeof(T))));
  const int64_t fair = (batch * length + 4 * num_threads() - 1) /
                       (4 * num_threads());  // tokens, for every thread
  const int64_t worth = row_grain(heads * size, Walk::task);
  const int64_t block = std::min(length, std::max(worth, std::min(fits, fair)));
  const int64_t blocks = (length + block - 1) / block;
  parallel_for(batch * blocks, std::max<int64_t>(1, worth / block), [&](int64_t first, int64_t last) {
    for (int64_t task = first; task < last; ++task) {
      const int64_t b = task / blocks, begin = task % blocks * block, end = std::min(length, begin + block);
      auto tokens = [&](auto count, int64_t h) {
        constexpr int n = decltype(count)::value;
        for (int64_t l = begin; l < end; ++l) {
          const int64_t row = ((b * heads + h) * length + l) * size, head = length * size;
          T* const out = y.as<T>() + row;
          const bool streaming = past_cache && can_stream_both(out) && can_stream_both(out + head);
          turn_rows<inverse, n>(x.as<T>() + row, out, head, cos.as<T>() + l * size, sin.as<T>() + l * size,
                                size, streaming);
        }
      };
      int64_t h = 0;
      for (; h + kTogether <= heads; h += kTogether) tokens(std::integral_constant<int, kTogether>(), h);
      for (; h < heads; ++h) tokens(std::integral_constant<int, 1>(), h);
    }
    if (past_cache) stream_fence();
  });
}

template <bool inverse>
void turn(const View& x, const View& cos, const View& sin, const View& y) {
  if (x.dtype == DType::f16) return turn<inverse, float16>(x, cos, sin, y);
  if (x.dtype == DType::bf16) return turn<inverse, bfloat16>(x, cos, sin, y);
  return turn<inverse, float>(x, cos, sin, y);
}

}  // namespace

void forward(View x, View cos, View sin, View y) { turn<false>(x, cos, sin, y); }

void backward(View dy, View x, View cos, View sin, View dx) {
  if (dx.defined()) turn<true>(dy, cos, sin, dx);
}

}  // namespace rope_custom
