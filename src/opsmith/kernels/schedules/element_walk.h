// How elementwise kernels walk tensors: in pieces, or row by row; and how any kernel walks along a row.
#pragma once

#include <initializer_list>

#include "pair.h"

namespace opsmith {

// Row by row, or in equal pieces where all tensors are contiguous and rows do not matter.
struct Walk {
  static constexpr int64_t task = 16384, piece = 1024;  // elements
  int64_t count, width, total;
  bool flat;

  Walk(std::initializer_list<const View*> tensors, bool may_ignore_rows = true) : flat(may_ignore_rows) {
    const View& first = **tensors.begin();
    const int64_t rows = first.sizes[0], n = first.sizes[1];
    for (const View* v : tensors) flat = flat && (v->strides[0] == n || rows == 1);
    total = rows * n;
    count = flat ? (total + piece - 1) / piece : n > 0 ? rows : 0;
    width = flat ? piece : n;
  }
  // Of contiguous tensors of so many elements.
  explicit Walk(int64_t elements)
      : count((elements + piece - 1) / piece), width(piece), total(elements), flat(true) {}

  int64_t grain() const { return row_grain(width, task); }
  int64_t size(int64_t r) const { return flat ? std::min(piece, total - r * piece) : width; }
  // Elements from what is read to what is asked for: the next row, where rows do not follow each other in memory.
  int64_t ahead(const View& v) const {
    const int64_t size = v.dtype == DType::f32 ? 4 : 2, most = 65536 / size;
    return flat ? 1024 / size : std::min(most, v.strides[0]);
  }
  template <class T>
  T* row(const View& v, int64_t r) const {
    return v.as<T>() + r * (flat ? piece : v.strides[0]);
  }
};

// Calls f(i, lanes) pair by pair as long as there are `block` elements, then vector by vector. Give it a lambda that captures
// by value: what it refers to would be read again after every store.
template <int64_t block = 2 * W, class F>
inline __attribute__((always_inline)) void for_pairs(int64_t n, F&& f) {
  const int64_t paired = n / block * block;
  for (int64_t i = 0; i < paired; i += 2 * W) f(i, Both{});
  for_lanes(n - paired, [&](int64_t i, auto k) __attribute__((always_inline)) { f(paired + i, k); });
}

// The arithmetic takes long, so that without this few loads would be on their way.
template <class T, class Lanes>
inline void prefetch_ahead(const T* p, Lanes) {
  for (size_t line = 0; line < Lanes::count * sizeof(T); line += 64) {
    prefetch(reinterpret_cast<const char*>(p) + line + 1024);
  }
}
template <class T>
inline void prefetch_ahead(const T*, Part) {}

// The same for kernels that read several streams, into the second-level cache: the nearest has no room for as many lines on
// their way. `far` is Walk::ahead's.
template <class T, class Lanes>
inline void prefetch_streams(const T* p, int64_t far, Lanes) {
  for (size_t line = 0; line < Lanes::count * sizeof(T); line += 64) {
    prefetch_far(reinterpret_cast<const char*>(p + far) + line);
  }
}
template <class T>
inline void prefetch_streams(const T*, int64_t, Part) {}

}  // namespace opsmith
