// Rotary embedding of int8 rows with a scale each: rotated in float32, and quantized again by the largest magnitude.
#include "fixed_point.h"
#include "rope_row.h"

namespace opsmith {
namespace {

constexpr int64_t kTableBytes = 256 << 10;  // of a block's table: a part of the second cache
constexpr int64_t kTask = 16384;  // elements that are worth a thread's wake-up

// Rotates a row into `turned` and writes it quantized, times the sign of its scale (0 where that is 0); the factor from
// its integers to those of x is returned.
template <bool interleaved, bool shared, class C>
inline float rotate_quantized(const int8_t* x, int8_t* y, const TableRow<C>& t, int64_t half, int64_t dims,
                              float sign, float* turned) {
  rotate_row<interleaved, shared, 1>(x, 0, turned, 0, t, half, false, 0);
  for_lanes(dims - 2 * half,
            [=](int64_t i, auto k) { store(turned + 2 * half + i, load(x + 2 * half + i, k), k); });
  const float most = largest(turned, dims);  // a table may hold anything
  const float inverse = most > 0 ? 127.0f / most * sign : 0.0f;
  for_lanes(dims, [=](int64_t i, auto k) {
    const Vec v = load(turned + i, k) * inverse;
    store_low_bytes(y + i, nearest_integers(select(abs(v) <= 127.5f, v, Vec{})), k);
  });
  return most / 127.0f;
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
    float* const turned = scratch(x.dims + W);
    for (int64_t task = first; task < last; ++task) {
      const int64_t b = task / blocks, begin = task % blocks * block, end = std::min(x.tokens, begin + block);
      const bool shared = table.shared(b, begin, end);
      for (int64_t h = 0; h < x.heads; ++h) {
        for (int64_t l = begin; l < end; ++l) {
          const int8_t* from = static_cast<const int8_t*>(x.data) + x.at(b, h, l);
          int8_t* to = static_cast<int8_t*>(y.data) + y.at(b, h, l);
          const float given = static_cast<const float*>(xs.data)[xs.at(b, h, l)],
                      sign = (given > 0) - (given < 0);
          const float factor = shared ? rotate_quantized<interleaved, true>(from, to, table.row(b, l), half,
                                                                            x.dims, sign, turned)
                                      : rotate_quantized<interleaved, false>(from, to, table.row(b, l), half,
                                                                             x.dims, sign, turned);
          static_cast<float*>(ys.data)[ys.at(b, h, l)] = factor * std::fabs(given);
        }
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
