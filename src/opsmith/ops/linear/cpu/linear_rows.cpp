// The linear layer for a few rows of x and a weight as it is: bound by the weight's way from memory, which is read once and in order.
#include "linear/linear_dots.h"
#include "linear/linear_epilogue.h"

namespace opsmith {
namespace {

constexpr int64_t kWork = 1 << 15;  // products that are worth a thread
}  // namespace

void linear_rows(View x, View weight, View bias, View residual, Activation activation, View y) {
  const int64_t rows = x.sizes[0], n = weight.sizes[0], k = weight.sizes[1];
  if (rows == 0 || n == 0) return;
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto behind = epilogue<T>(bias, residual, activation, y);
    const int64_t grain = std::max<int64_t>(1, kWork / std::max<int64_t>(1, rows * k * kPanel));
    const few::Rows<T> all{x.as<T>(), weight.as<T>(), rows, nullptr};
    few::products(&all, 1, x.strides[0], weight.strides[0], n, k, grain,
                  [&](const auto&, int64_t row, int some, int64_t column, int64_t width, const float* sums) {
                    behind(row, some, column, width, sums, 0);
                  });
  });
}

}  // namespace opsmith
