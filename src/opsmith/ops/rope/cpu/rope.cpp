// Rotary embedding, in place or not: every element of x is read once and written once.
#include "rope.h"

#include "rope_row.h"

namespace opsmith {
namespace {

constexpr int64_t kAhead = 2048;  // bytes of x between what is read and what is asked for
constexpr int kTogether = 2;  // heads, for which a row of the table is read once

template <bool interleaved, bool shared, class T, class C>
void rotate_block(const Heads& x, const Heads& y, const Table<C>& table, int64_t b, int64_t begin,
                  int64_t end, bool past_cache) {
  const int64_t half = table.half, rest = x.dims - 2 * half;
  const bool in_place = x.data == y.data;
  const T* const xs = static_cast<const T*>(x.data) + b * x.batch_stride;
  T* const ys = static_cast<T*>(y.data) + b * y.batch_stride;
  auto rows = [&](auto count, int64_t h, int64_t l, const TableRow<C>& t, int64_t ahead) {
    constexpr int n = decltype(count)::value;
    const T* from = xs + h * x.head_stride + l * x.token_stride;
    T* to = ys + h * y.head_stride + l * y.token_stride;
    const bool streaming = past_cache && can_stream_both(to) &&
                           can_stream_both(to + (n - 1) * y.head_stride) &&
                           (interleaved || can_stream_both(to + half));
    for (int i = 0; i < n && streaming; ++i) look_ahead_of_row(to + i * y.head_stride, x.dims);
    rotate_row<interleaved, shared, n>(from, x.head_stride, to, y.head_stride, t, half, streaming, ahead);
    for (int i = 0; i < n && rest > 0 && !in_place; ++i) {
      std::memcpy(to + i * y.head_stride + 2 * half, from + i * x.head_stride + 2 * half,
                  size_t(rest) * sizeof(T));
    }
  };
  constexpr std::integral_constant<int, kTogether> several;
  constexpr std::integral_constant<int, 1> one;
  if (x.head_stride >= x.token_stride) {
    const int64_t far = std::min(end - begin, std::max<int64_t>(1, kAhead / (x.dims * int64_t(sizeof(T)))));
    auto all = [&](auto count, int64_t h) {
      const int64_t to_next = decltype(count)::value * x.head_stride - (end - begin) * x.token_stride;
      for (int64_t l = begin; l < end; ++l) {
        const int64_t ahead = far * x.token_stride + (l + far >= end ? to_next : 0);
        rows(count, h, l, table.row(b, l), ahead);
      }
    };
    int64_t h = 0;
    for (; h + kTogether <= x.heads; h += kTogether) all(several, h);
    for (; h < x.heads; ++h) all(one, h);
  } else {
    for (int64_t l = begin; l < end; ++l) {
      const TableRow<C> t = table.row(b, l);
      int64_t h = 0;
      for (; h + kTogether <= x.heads; h += kTogether) rows(several, h, l, t, 2 * kTogether * x.head_stride);
      for (; h < x.heads; ++h) rows(one, h, l, t, 0);
    }
  }
}

template <bool interleaved, class T, class C>
void rotate_all(const View& xv, const View& morev, const Table<C>& table, const View& yv,
                const View& more_yv) {
  const Heads x(xv), y(yv);
  const Heads more = morev.defined() ? Heads(morev) : x, more_y = morev.defined() ? Heads(more_yv) : y;
  const int64_t heads = x.heads + (morev.defined() ? more.heads : 0);
  const int64_t turned = x.batch * heads * x.tokens * x.dims * int64_t(sizeof(T));
  const bool past_cache = x.data != y.data && outlives_cache(2 * turned + x.tokens * table.row_bytes(), 1);
  for_blocks(x, heads, table, [&](auto shared, int64_t b, int64_t begin, int64_t end) {
    constexpr bool s = decltype(shared)::value;
    rotate_block<interleaved, s, T>(x, y, table, b, begin, end, past_cache);
    if (morev.defined()) rotate_block<interleaved, s, T>(more, more_y, table, b, begin, end, past_cache);
    if (past_cache) stream_fence();
  });
}

}  // namespace

void rope(View x, View more, View cos, View sin, View positions, Rotation rotation, View y, View more_y) {
  const int64_t half = rotation.dims / 2;
  auto run = [&]<class T, class C>(T*, C*) {
    const Table<C> table{cos, sin, positions, half, rotation.inverse};
    if (rotation.interleaved) return rotate_all<true, T>(x, more, table, y, more_y);
    return rotate_all<false, T>(x, more, table, y, more_y);
  };
  with_table_type(x.dtype, cos.dtype, run);
}

}  // namespace opsmith
