// The linear layer for a few rows of x and a weight as it is: bound by the weight's way from memory, which is read once and in order.
#include "linear/linear_dots.h"
#include "linear/linear_epilogue.h"
#include "schedules/shares.h"

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
    const int64_t panels = (n + kPanel - 1) / kPanel,
                  grain = std::max<int64_t>(1, kWork / std::max<int64_t>(1, rows * k * kPanel));
    parallel_shares(panels, grain, [&](int64_t begin, int64_t end) {
      float sums[few::kMost * kPanel];
      for (int64_t p = begin; p < end; ++p) {
        const int64_t column = p * kPanel, width = std::min(kPanel, n - column);
        for (int64_t row = 0; row < rows; row += few::kMost) {
          const int64_t some = std::min<int64_t>(few::kMost, rows - row);
          const T* const from = x.as<T>() + row * x.strides[0];
          few::panel(some, weight.as<T>() + column * weight.strides[0], weight.strides[0], width, from,
                     x.strides[0], k, sums);
          behind(row, int(some), column, width, sums, 0);
        }
      }
    });
  });
}

}  // namespace opsmith
