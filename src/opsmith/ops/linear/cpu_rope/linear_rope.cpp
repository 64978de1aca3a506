// The projection to queries, keys and values, with their rotation and their layout as its epilogue: what the product
// leaves in cache is rotated there and written once, where attention reads it.
#include <numeric>

#include "linear/linear_product.h"
#include "rope_row.h"

namespace opsmith {
namespace {

template <class T, class C>
struct Projection {
  const T* bias;
  Heads q, k, v;
  Table<C> table;
  Rotation rotation;

  void expect(int64_t, int, int64_t, int64_t) const {}

  // Rows of x, with the sums of some heads.
  void operator()(int64_t row, int rows, int64_t column, int64_t width, const float* sums,
                  int64_t panel_step) const {
    const int64_t size = q.dims;
    const Kept<2> memory(size * int64_t(sizeof(float)));
    float* const head = memory.as<float>();
    for (int r = 0; r < rows; ++r, sums += kLinearPanel) {
      const int64_t token = row + r, b = token / q.tokens, l = token % q.tokens;
      const TableRow<C> t = table.row(b, l);
      for (int64_t c = 0; c < width; c += size) {
        gather(column + c, c, sums, panel_step, size, head);
        write((column + c) / size, b, l, t, head);
      }
    }
  }

 private:
  // The head that begins at column `at` of the product, `place` of the group: across panels, with the bias.
  void gather(int64_t at, int64_t place, const float* sums, int64_t panel_step, int64_t size,
              float* head) const {
    for (int64_t c = 0; c < size;) {
      const int64_t in_panel = (place + c) % kLinearPanel,
                    count = std::min(kLinearPanel - in_panel, size - c);
      const float* from = sums + (place + c) / kLinearPanel * panel_step + in_panel;
      for_lanes(count, [&](int64_t i, auto k) {
        Vec value = load(from + i, k);
        if (bias) value += load(bias + at + c + i, k);
        store(head + c + i, value, k);
      });
      c += count;
    }
  }

  static T* place_of(const Heads& heads, int64_t b, int64_t h, int64_t l) {
    return static_cast<T*>(heads.data) + b * heads.batch_stride + h * heads.head_stride +
           l * heads.token_stride;
  }

  void write(int64_t h, int64_t b, int64_t l, const TableRow<C>& t, const float* head) const {
    const int64_t turned = h < q.heads + k.heads ? 2 * table.half : 0;
    T* const to = h < q.heads             ? place_of(q, b, h, l)
                  : h < q.heads + k.heads ? place_of(k, b, h - q.heads, l)
                                          : place_of(v, b, h - q.heads - k.heads, l);
    if (turned > 0 && rotation.interleaved) {
      rotate_row<true, false, 1>(head, 0, to, 0, t, table.half, false, 0);
    } else if (turned > 0) {
      rotate_row<false, false, 1>(head, 0, to, 0, t, table.half, false, 0);
    }
    for_lanes(q.dims - turned,
              [&](int64_t i, auto k) { store(to + turned + i, load(head + turned + i, k), k); });
  }
};

}  // namespace

int64_t linear_rope_group(int64_t head_dim) {
  return head_dim > 0 ? std::lcm(head_dim, kLinearPanel) / kLinearPanel : 0;
}

void linear_rope(View x, View packed, View bias, View cos, View sin, View positions, Rotation rotation,
                 View q, View k, View v) {
  const int64_t group = linear_rope_group(q.sizes[q.dim - 1]);
  auto run = [&]<class T, class C>(T*, C*) {
    const Table<C> table{cos, sin, positions, rotation.dims / 2};
    packed_product<T>(x, packed, group,
                      Projection<T, C>{bias.as<T>(), Heads(q), Heads(k), Heads(v), table, rotation});
  };
  with_table_type(x.dtype, cos.dtype, run);
}

}  // namespace opsmith
