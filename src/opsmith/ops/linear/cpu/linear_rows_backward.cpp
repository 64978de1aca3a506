// The gradients of the linear layer for a few rows, or many and a small weight: dx = dy weight, dweight = dy^T x and dbias = 1^T dy.
// Each is sums of rows of its second matrix, which are read as they are, in order.
#include "linear/linear.h"
#include "linear/linear_columns.h"
#include "rows.h"
#include "schedules/shares.h"

namespace opsmith {
namespace {

using namespace columns;

constexpr int64_t kWork = 1 << 16;  // products that are worth a thread

// to[i, :] = sum over s of by(i, s) * from[s, :], for `count` rows and `depth` of `from`.
template <class T, class F>
void product(Factors<F> by, int64_t count, int64_t depth, const T* from, int64_t stride, int64_t columns,
             T* to, int64_t to_stride) {
  if (depth == 0) {
    for (int64_t i = 0; i < count; ++i) std::fill_n(to + i * to_stride, columns, T{});
    return;
  }
  const int64_t blocks = (count + kTogether - 1) / kTogether, panels = (columns + kWidth - 1) / kWidth;
  const int64_t work = std::min<int64_t>(count, kTogether) * depth * std::min(columns, kWidth);
  parallel_shares(panels * blocks, row_grain(work, kWork), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task % blocks * kTogether, column = task / blocks * kWidth;
      const int64_t some = std::min<int64_t>(kTogether, count - row),
                    width = std::min(kWidth, columns - column);
      const Factors<F> of{by.data + row * by.row, by.row, by.step};
      T* const at = to + row * to_stride + column;
      sum_rows(of, depth, from + column, stride, width, at, to_stride, some);
    }
  });
}

}  // namespace

void linear_rows_backward(View dy, View x, View weight, View dx, View dweight, View dbias) {
  const int64_t m = dy.sizes[0], n = dy.sizes[1];
  with_float_type(dy.dtype, [&]<class T>(T*) {
    const T* const from = dy.as<T>();
    const int64_t stride = dy.strides[0];
    if (dx.defined()) {
      product<T>(Factors<T>{from, stride, 1}, m, n, weight.as<T>(), weight.strides[0], weight.sizes[1],
                 dx.as<T>(), dx.strides[0]);
    }
    if (dweight.defined()) {
      product<T>(Factors<T>{from, 1, stride}, n, m, x.as<T>(), x.strides[0], x.sizes[1], dweight.as<T>(),
                 dweight.strides[0]);
    }
    if (dbias.defined()) {
      const float one = 1;
      product<T>(Factors<float>{&one, 0, 0}, 1, m, from, stride, n, dbias.as<T>(), n);
    }
  });
}

}  // namespace opsmith
