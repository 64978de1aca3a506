// Rotary embedding of int8 rows with a scale each: rotated in float32, and quantized again by the largest magnitude.
#include "fixed_point.h"
#include "rope_row.h"

namespace opsmith {
namespace {

constexpr int64_t kTableBytes = 256 << 10;  // of a block's table: a part of the second cache
constexpr int64_t kTask = 16384;  // elements that are worth a thread's wake-up
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
  const int64_t half = table.half;
  const int64_t row_bytes = std::max<int64_t>(1, 2 * table.cos.sizes[table.cos.dim - 1] * int64_t(sizeof(C)));
  const int64_t fair = (x.batch * x.tokens + 4 * num_threads() - 1) / (4 * num_threads());
  const int64_t least = row_grain(x.heads * x.dims, kTask);
  const int64_t block = std::min(std::max<int64_t>(1, x.tokens),
                                 std::max(least, std::min(kTableBytes / row_bytes, fair)));
  const int64_t blocks = (x.tokens + block - 1) / block;
  const Heads xs(scale, scale.dim + 1), ys(y_scale, y_scale.dim + 1);
  parallel_for(x.batch * blocks, std::max<int64_t>(1, least / block), [&](int64_t first, int64_t last) {
    float* const turned = scratch(kTogether * round_up(x.dims, W) + W);
    for (int64_t task = first; task < last; ++task) {
      const int64_t b = task / blocks, begin = task % blocks * block, end = std::min(x.tokens, begin + block);
      auto rows = [&](auto shared, auto count, int64_t h) {
        for (int64_t l = begin; l < end; ++l) {
          rotate_heads<interleaved, decltype(shared)::value, decltype(count)::value>(
              x, xs, y, ys, b, h, l, table.row(b, l), half, turned);
        }
      };
      auto turn = [&](auto shared) {
        int64_t h = 0;
        for (; h + kTogether <= x.heads; h += kTogether)
          rows(shared, std::integral_constant<int, kTogether>{}, h);
        for (; h < x.heads; ++h) rows(shared, std::integral_constant<int, 1>{}, h);
      };
      if (table.shared(b, begin, end)) {
        turn(std::true_type{});
      } else {
        turn(std::false_type{});
      }
    }
  });
}

}  // namespace

void rope_int8(View x, View scale, View cos, View sin, View positions, Rotation rotation, View y,
               View y_scale) {
  with_float_type(cos.dtype, [&](auto* c) {
    using C = std::remove_pointer_t<decltype(c)>;
    const Table<C> table{cos, sin, positions, rotation.dims / 2};
    if (rotation.interleaved) return rotate_all<true>(x, scale, table, y, y_scale);
    return rotate_all<false>(x, scale, table, y, y_scale);
  });
}

}  // namespace opsmith
