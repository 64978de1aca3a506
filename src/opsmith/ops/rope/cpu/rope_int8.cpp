// Rotary embedding of int8 rows with a scale each: rotated in float32, and quantized again by the largest magnitude.
#include "fixed_point.h"
#include "rope_row.h"

namespace opsmith {
namespace {

constexpr int
    kTogether = 4;  // heads: a row of the table is read once for them, and their largest are found side by side

// Rotates N heads of a token and writes them quantized, times the signs of their scales (0 where one is 0).
template <bool interleaved, bool shared, int N, class C>
inline void rotate_heads(const Heads& x, const Heads& scale, const Heads& y, const Heads& y_scale, int64_t b,
                         int64_t h, int64_t l, const TableRow<C>& t, int64_t half, float* turned) {
  const int8_t* const from = static_cast<const int8_t*>(x.data) + x.at(b, h, l);
  int8_t* const to = static_cast<int8_t*>(y.data) + y.at(b, h, l);
  const int64_t step = round_up(x.dims, W), rest = x.dims - 2 * half;
  rotate_row<interleaved, shared, N>(from, x.head_stride, turned, step, t, half, false, 0);
  float inverse[N];
  for (int n = 0; n < N; ++n) {
    float* const row = turned + n * step;
    const int8_t* const as_it_is = from + n * x.head_stride + 2 * half;
    for_lanes(rest, [=](int64_t i, auto k) { store(row + 2 * half + i, load(as_it_is + i, k), k); });
    const float most = largest_finite(row, x.dims);  // a table may hold anything
    const float given = static_cast<const float*>(scale.data)[scale.at(b, h + n, l)];
    inverse[n] = most > 0 ? 127.0f / most * float((given > 0) - (given < 0)) : 0.0f;
    if (!std::isfinite(inverse[n])) inverse[n] = 0.0f;
    static_cast<float*>(y_scale.data)[y_scale.at(b, h + n, l)] = most / 127.0f * std::fabs(given);
  }
  for (int n = 0; n < N; ++n) {  // what is not finite becomes an integer whose low byte is 0, too
    for_lanes(x.dims, [=](int64_t i, auto k) {
      const Vec v = load(turned + n * step + i, k) * inverse[n];
      store_low_bytes(to + n * y.head_stride + i, nearest_integers(v), k);
    });
  }
}

template <bool interleaved, class C>
void rotate_all(const View& xv, const View& scale, const Table<C>& table, const View& yv,
                const View& y_scale) {
  const Heads x(xv), y(yv);
  const Heads xs(scale, scale.dim + 1), ys(y_scale, y_scale.dim + 1);
  for_blocks(x, x.heads, table, [&](auto shared, int64_t b, int64_t begin, int64_t end) {
    float* const turned = scratch(kTogether * round_up(x.dims, W) + W);
    auto rows = [&](auto count, int64_t h) {
      for (int64_t l = begin; l < end; ++l) {
        rotate_heads<interleaved, decltype(shared)::value, decltype(count)::value>(
            x, xs, y, ys, b, h, l, table.row(b, l), table.half, turned);
      }
    };
    int64_t h = 0;
    for (; h + kTogether <= x.heads; h += kTogether) rows(std::integral_constant<int, kTogether>{}, h);
    for (; h < x.heads; ++h) rows(std::integral_constant<int, 1>{}, h);
  });
}

}  // namespace

void rope_int8(View x, View scale, View cos, View sin, View positions, Rotation rotation, View y,
               View y_scale) {
  with_float_type(cos.dtype, [&]<class C>(C*) {
    const Table<C> table{cos, sin, positions, rotation.dims / 2};
    if (rotation.interleaved) return rotate_all<true>(x, scale, table, y, y_scale);
    return rotate_all<false>(x, scale, table, y, y_scale);
  });
}

}  // namespace opsmith
