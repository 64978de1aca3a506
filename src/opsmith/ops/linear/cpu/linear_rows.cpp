// The linear layer for a few rows of x and a weight as it is: bound by the weight's way from memory, which is read once and in order.
#include <utility>

#include "lane_tile.h"
#include "linear/kept.h"
#include "linear/linear_dots.h"
#include "linear/linear_epilogue.h"

namespace opsmith {
namespace {

constexpr int64_t kWork = 1 << 15;  // products that are worth a thread
constexpr int kLaneSums = W == 8 ? 12 : 24;  // in registers
constexpr int64_t kAhead = 1024;  // bytes of a row from what is used to what is asked for

// What R rows of the weight have some bytes on, and at their end what the rows behind them begin with.
struct FetchRows {
  const char *at, *end;  // of the first row
  int64_t row_bytes, behind;  // from the end of that to the first row that comes
  template <int bytes, int R>
  void step(const void*) {
    if (at >= end) at += std::exchange(behind, 0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) prefetch_once(at + r * row_bytes);
    at += bytes;
  }
};

// Rows of x in V vectors of lanes with G words of each: behind(column, width, sums) gets a panel of columns at a time.
template <int V, int G, class T, class F>
void in_lanes(const View& x, const T* weight, int64_t stride, int64_t n, int64_t grain, const F& behind) {
  using Units = UnitsOf<T>;
  using Product = WordProduct<T, T>;
  constexpr int64_t step = W * Units::per_unit;
  constexpr int most = 8 * V <= kLaneSums ? 8 : 4 * V <= kLaneSums ? 4 : 2;
  constexpr int R = std::min(W, most);  // rows of the weight in a tile
  const int64_t rows = x.sizes[0], k = x.sizes[1];
  const Kept<0> lanes(ceil_div(k, step) * W * V * int64_t(sizeof(IVec)));
  to_lanes<Product, G>(rows, V, k, step, lanes.as<IVec>(), [&](int64_t row, int64_t at) {
    return load_units<Units>(x.as<T>() + row * x.strides[0], at, k);
  });
  const int64_t row_bytes = stride * int64_t(sizeof(T)), length = k * int64_t(sizeof(T));
  parallel_shares(ceil_div(n, kPanel), grain, [&](int64_t begin, int64_t end) {
    float sums[V * W / G * kPanel];
    for (int64_t column = begin * kPanel; column < std::min(n, end * kPanel); column += kPanel) {
      const int64_t width = std::min(kPanel, n - column);
      const T* from = weight + column * stride;
      int64_t c = 0;
      const auto tile = [&](auto r) {
        const char* const first = reinterpret_cast<const char*>(from);
        const FetchRows fetch{first + std::min(kAhead, length), first + length, row_bytes,
                              r() * row_bytes - length};
        lane_tile<Product, V, r(), G>(lanes.as<const IVec>(), rows, from, stride, k, fetch, sums + c, kPanel);
        c += r();
        from += r() * stride;
      };
      while (c + R <= width) tile(std::integral_constant<int, R>{});
      while (c < width) tile(std::integral_constant<int, 1>{});
      behind(column, width, sums);
    }
  });
}

}  // namespace

void linear_rows(View x, View weight, View bias, View residual, Activation activation, View y) {
  const int64_t rows = x.sizes[0], n = weight.sizes[0], k = weight.sizes[1];
  if (rows == 0 || n == 0) return;
  with_float_type(x.dtype, [&]<class T>(T*) {
    const auto behind = epilogue<T>(bias, residual, activation, y);
    const int64_t grain = row_grain(rows * k * kPanel, kWork);
    if constexpr (WordProduct<T, T>::exists) {
      const auto lanes = [&](auto v, auto g) {
        in_lanes<v(), g()>(x, weight.as<T>(), weight.strides[0], n, grain,
                           [&](int64_t column, int64_t width, const float* sums) {
                             behind(0, int(rows), column, width, sums, 0);
                           });
      };
      using std::integral_constant;
      constexpr integral_constant<int, 1> one;
      constexpr int G = W == 16 ? 2 : 1;
      if (rows > few::kMost) {
        if (rows * G <= W) return lanes(one, integral_constant<int, G>{});
        switch (ceil_div(rows, W)) {
          case 1: return lanes(one, one);
          case 2: return lanes(integral_constant<int, 2>{}, one);
          case 3: return lanes(integral_constant<int, 3>{}, one);
          case 4: return lanes(integral_constant<int, 4>{}, one);
        }
      }
    }
    const few::Rows<T> all{x.as<T>(), weight.as<T>(), rows, nullptr};
    few::products(&all, 1, x.strides[0], weight.strides[0], n, k, grain,
                  [&](const auto&, int64_t row, int some, int64_t column, int64_t width, const float* sums) {
                    behind(row, some, column, width, sums, 0);
                  });
  });
}

}  // namespace opsmith
