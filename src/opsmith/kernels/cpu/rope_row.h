// What the kernels that rotate share: views of heads and tables, and the rotation of a row in registers.
#pragma once

#include <cstring>

#include "pair.h"
#include "rope.h"

namespace opsmith {

// The pairs (x1, x2) of a row become (x1 cos - x2 sin, x2 cos + x1 sin). The table may be as wide as the rotated
// dimensions, with entries of their own for the first and the second of a pair, or half as wide, shared by both. The inverse
// rotation, the transpose, is that by the sines exchanged and negated.
template <class C>
struct TableRow {
  const C *cos1, *sin1, *cos2, *sin2;
  float sign = 1;  // of the sines
};

// Calls f with null pointers of the types of x and of the table: x's own, or float32.
template <class F>
inline void with_table_type(DType x, DType table, F&& f) {
  with_float_type(x, [&](auto* t) {
    if (table == DType::f32) {
      f(t, static_cast<float*>(nullptr));
    } else {
      f(t, t);
    }
  });
}

// [B, H, L, D] of either layout.
struct Heads {
  void* data;
  int64_t batch, heads, tokens, dims;
  int64_t batch_stride, head_stride, token_stride;

  explicit Heads(const View& v) : Heads(v, v.dim) {}
  // As if the tensor had `dim` dimensions: one more than its own where it has a number for each row.
  Heads(const View& v, int64_t dim) : data(v.data), dims(v.sizes[v.dim - 1]) {
    const bool packed = dim == 3;  // [T, H, D]
    batch = packed ? 1 : v.sizes[0];
    heads = v.sizes[1];
    tokens = v.sizes[packed ? 0 : 2];
    batch_stride = packed ? 0 : v.strides[0];
    head_stride = v.strides[1];
    token_stride = v.strides[packed ? 0 : 2];
  }

  int64_t at(int64_t b, int64_t h, int64_t l) const {
    return b * batch_stride + h * head_stride + l * token_stride;
  }
};

template <class C>
struct Table {
  const View &cos, &sin, &positions;
  int64_t half;
  bool inverse = false;

  TableRow<C> row(int64_t b, int64_t l) const {
    const int64_t p = positions.defined() ? position_at(positions, b, l) : l;
    const C *c = place(cos, b, p), *s = place(sin, b, p);
    const int64_t second = cos.sizes[cos.dim - 1] == half ? 0 : half;
    if (inverse) return {c, s + second, c + second, s, -1};
    return {c, s, c + second, s + second};
  }

  int64_t row_bytes() const { return std::max<int64_t>(1, 2 * cos.sizes[cos.dim - 1] * int64_t(sizeof(C))); }

  // Whether both of a pair have the same entries, as rope_table makes them: half as much to read for every head.
  bool shared(int64_t b, int64_t begin, int64_t end) const {
    if (cos.sizes[cos.dim - 1] == half) return true;
    for (int64_t l = begin; l < end; ++l) {
      const TableRow<C> t = row(b, l);
      if (std::memcmp(t.cos1, t.cos2, size_t(half) * sizeof(C)) != 0) return false;
      if (std::memcmp(t.sin1, t.sin2, size_t(half) * sizeof(C)) != 0) return false;
    }
    return true;
  }

 private:
  static const C* place(const View& v, int64_t b, int64_t p) {
    const int64_t of_batch = v.dim == 3 && v.sizes[0] > 1 ? b * v.strides[0] : 0;
    return v.as<C>() + of_batch + p * v.strides[v.dim - 2];
  }
};

// Calls f(type, b, begin, end) for blocks of the tokens of a batch, `type` saying whether both of a pair have one entry. A
// block's part of the table is read from memory once and then stays in the nearest caches, while `heads` heads stream past
// it in the order in which they lie in memory.
template <class C, class F>
void for_blocks(const Heads& x, int64_t heads, const Table<C>& table, const F& f) {
  constexpr int64_t table_bytes = 256 << 10;  // of a block: a part of the second cache
  constexpr int64_t task = 16384;  // elements that are worth a thread's wake-up
  // Short enough for the table to stay in cache, and for every thread to have some.
  const int64_t fair = (x.batch * x.tokens + 4 * num_threads() - 1) / (4 * num_threads());
  const int64_t least = row_grain(heads * x.dims, task);
  const int64_t block = std::min(std::max<int64_t>(1, x.tokens),
                                 std::max(least, std::min(table_bytes / table.row_bytes(), fair)));
  const int64_t blocks = (x.tokens + block - 1) / block;
  parallel_for(x.batch * blocks, std::max<int64_t>(1, least / block), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t b = i / blocks, begin = i % blocks * block, end = std::min(x.tokens, begin + block);
      table.shared(b, begin, end) ? f(std::true_type{}, b, begin, end) : f(std::false_type{}, b, begin, end);
    }
  });
}

inline void rotate(Vec x1, Vec x2, Vec cos1, Vec sin1, Vec cos2, Vec sin2, Vec& y1, Vec& y2) {
  y1 = fma(x1, cos1, -(x2 * sin1));
  y2 = fma(x2, cos2, x1 * sin2);
}

// W pairs from p on, the first ones of all and the second ones.
template <class T>
inline void load_pairs(const T* p, Full, Vec& even, Vec& odd) {
  const Pair v = split({load(p), load(p + W)});
  even = v.a, odd = v.b;
}
inline void load_pairs(const bfloat16* p, Full, Vec& even, Vec& odd) {
  IVec both;  // a pair is one 32-bit lane, and a bfloat16 the upper half of a float
  std::memcpy(&both, p, sizeof both);
  even = as_float(both << 16);
  odd = as_float(both & int32_t(0xffff0000));
}
template <class T>
inline void load_pairs(const T* p, Part k, Vec& even, Vec& odd) {
  T buffer[2 * W] = {};
  std::memcpy(buffer, p, size_t(2 * k.count) * sizeof(T));
  load_pairs(buffer, Full{}, even, odd);
}

template <class T>
inline void put_pairs(T* p, Vec even, Vec odd, Full, bool streaming) {
  put(p, even_odd<T> ? Pair{even, odd} : interleave({even, odd}), Both{}, streaming);
}
template <class T>
inline void put_pairs(T* p, Vec even, Vec odd, Part k, bool) {
  T buffer[2 * W];
  put_pairs(buffer, even, odd, Full{}, false);
  std::memcpy(p, buffer, size_t(2 * k.count) * sizeof(T));
}

// Two vectors of the first halves of N heads, from element i on, and two of the second: whole lines of 16-bit results.
template <bool shared, int N, class S, class T, class C>
inline __attribute__((always_inline)) void rotate_two(const S* x, int64_t x_step, T* y, int64_t y_step,
                                                      TableRow<C> t, int64_t half, int64_t i, bool streaming,
                                                      int64_t ahead) {
  auto two = [](const auto* p) { return Pair{load(p), load(p + W)}; };
  const Pair cos1 = two(t.cos1 + i), sin1 = two(t.sin1 + i) * t.sign;
  const Pair cos2 = shared ? cos1 : two(t.cos2 + i), sin2 = shared ? sin1 : two(t.sin2 + i) * t.sign;
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const S* from = x + n * x_step + i;
    T* to = y + n * y_step + i;
    prefetch(from + ahead);
    prefetch(from + ahead + half);
    const Pair x1 = two(from), x2 = two(from + half);
    Pair y1, y2;
    rotate(x1.a, x2.a, cos1.a, sin1.a, cos2.a, sin2.a, y1.a, y2.a);
    rotate(x1.b, x2.b, cos1.b, sin1.b, cos2.b, sin2.b, y1.b, y2.b);
    put_in_order(to, y1, streaming);
    put_in_order(to + half, y2, streaming);
  }
}

// Rotates 2 * half elements of N heads of one token, `x_step` and `y_step` apart; y may be x. `shared` says that both of
// a pair have one entry in the table. `streaming` asks for stores past the cache. What lies `ahead` will be read soon.
template <bool interleaved, bool shared, int N, class S, class T, class C>
inline __attribute__((always_inline)) void rotate_row(const S* x, int64_t x_step, T* y, int64_t y_step,
                                                      TableRow<C> t, int64_t half, bool streaming,
                                                      int64_t ahead) {
  int64_t done = 0;
  if constexpr (!interleaved && sizeof(T) == 2) {
    for (; done + 2 * W <= half; done += 2 * W) {
      rotate_two<shared, N>(x, x_step, y, y_step, t, half, done, streaming, ahead);
    }
  }
  for_lanes(half - done, [=](int64_t at, auto k) __attribute__((always_inline)) {
    const int64_t i = done + at;
    const Vec cos1 = load(t.cos1 + i, k), sin1 = load(t.sin1 + i, k) * t.sign;
    Vec cos2 = cos1, sin2 = sin1;
    if constexpr (!shared) {
      cos2 = load(t.cos2 + i, k);
      sin2 = load(t.sin2 + i, k) * t.sign;
    }
    const int64_t first = interleaved ? 2 * i : i, second = interleaved ? 2 * i + W : half + i;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const S* from = x + n * x_step;
      T* to = y + n * y_step;
      Vec x1, x2, y1, y2;
      if constexpr (interleaved) {
        load_pairs(from + first, k, x1, x2);
      } else {
        x1 = load(from + first, k);
        x2 = load(from + second, k);
      }
      rotate(x1, x2, cos1, sin1, cos2, sin2, y1, y2);
      if constexpr (interleaved) {
        put_pairs(to + first, y1, y2, k, streaming);
      } else {
        put(to + first, y1, k, streaming);
        put(to + second, y2, k, streaming);
      }
    }
  });
}

}  // namespace opsmith
