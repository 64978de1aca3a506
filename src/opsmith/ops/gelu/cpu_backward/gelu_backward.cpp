// The slope of GELU, exact (erf) and in its tanh form, times a gradient, and the gradient of the bias.
#include "curves.h"
#include "schedules/column_sums.h"

namespace opsmith {
namespace {

template <class T, class F>
void backward(const View& dy, const View& x, const View& bias, const View& dx) {
  const Walk walk({&dy, &x, &dx}, !bias.defined());
  const bool past_cache = outlives_cache(walk.total * int64_t(sizeof(T)), 3);
  const T* const b = bias.as<T>();
  parallel_rows(walk.count, walk.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* d = walk.row<T>(dy, r);
      const T* in = walk.row<T>(x, r);
      T* out = walk.row<T>(dx, r);
      const bool streaming = past_cache && can_stream_both(out);
      for_pairs(walk.size(r), [=](int64_t i, auto k) {
        prefetch_ahead(d + i, k);
        prefetch_ahead(in + i, k);
        look_ahead(out, i);
        auto v = load(in + i, k);
        if (b) v = v + load(b + i, k);
        put(out + i, load(d + i, k) * both_of<F>(v).slope, k, streaming);
      });
    }
    if (past_cache) stream_fence();
  });
}

// The same with dbias, the sums of dx over the rows before it is rounded: four rows at a time, added to each other first.
template <class T, class F>
void backward_of_bias(const View& dy, const View& x, const View& bias, const View& dx, const View& dbias) {
  constexpr int64_t group = 4;
  const int64_t rows = x.sizes[0], n = x.sizes[1], ds = dy.strides[0], xs = x.strides[0], os = dx.strides[0];
  const bool past_cache = outlives_cache(rows * n * int64_t(sizeof(T)), 3);
  const T* const b = bias.as<T>();
  ColumnSums<1> sums(rows, n, row_grain(n, Walk::task));
  sums.over_rows([&](int64_t begin, int64_t end, const auto& to) {
    float* const total = to[0];
    for (int64_t r = begin; r < end; r += group) {
      const int64_t count = std::min(group, end - r);
      const T *const d0 = dy.as<T>() + r * ds, *const in0 = x.as<T>() + r * xs;
      T* const out0 = dx.as<T>() + r * os;
      const bool streaming = past_cache && can_stream_both(out0) && os * int64_t(sizeof(T)) % 64 == 0;
      for_pairs<paired_block>(n, [=](int64_t i, auto k) __attribute__((always_inline)) {
        const auto shift = load(b + i, k);
        std::remove_const_t<decltype(shift)> sum{};
        const T *d = d0 + i, *in = in0 + i;
        T* out = out0 + i;
        for (int64_t j = 0; j < count; ++j, d += ds, in += xs, out += os) {
          prefetch_ahead(d, k);
          prefetch_ahead(in, k);
          look_ahead(out - i, i);
          const auto v = load(d, k) * both_of<F>(load(in, k) + shift).slope;
          put(out, v, k, streaming);
          sum = sum + v;
        }
        store(total + i, load(total + i, k) + sum, k);
      });
    }
    if (past_cache) stream_fence();
  });
  sums.template write<T>(0, dbias);
}

}  // namespace

void gelu_backward(View dy, View x, View bias, bool tanh, View dx, View dbias) {
  with_float_type(x.dtype, [&]<class T>(T*) {
    if (dbias.defined()) {
      const auto run = tanh ? backward_of_bias<T, GeluTanh<T>> : backward_of_bias<T, Gelu<T>>;
      return run(dy, x, bias, dx, dbias);
    }
    tanh ? backward<T, GeluTanh<T>>(dy, x, bias, dx) : backward<T, Gelu<T>>(dy, x, bias, dx);
  });
}

}  // namespace opsmith
