// GELU, x * Phi(x), exact (erf) and in its tanh form, with the bias before it. Tensors are [rows, n], contiguous in n; bias [n].
#include "curves.h"
#include "schedules/element_walk.h"

namespace opsmith {
namespace {

template <class T, class F>
void forward(const View& x, const View& bias, const View& y) {
  const Walk walk({&x, &y}, !bias.defined());
  const bool past_cache = outlives_cache(walk.total * int64_t(sizeof(T)));
  const T* const b = bias.as<T>();
  parallel_rows(walk.count, walk.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* in = walk.row<T>(x, r);
      T* out = walk.row<T>(y, r);
      const bool streaming = past_cache && can_stream_both(out);
      for_pairs(walk.size(r), [=](int64_t i, auto k) {
        prefetch_ahead(in + i, k);
        look_ahead(out, i);
        auto v = load(in + i, k);
        if (b) v = v + load(b + i, k);
        put(out + i, value_of<F>(v), k, streaming);
      });
    }
    if (past_cache) stream_fence();
  });
}

}  // namespace

void gelu(View x, View bias, bool tanh, View y) {
  with_float_type(x.dtype, [&]<class T>(T*) {
    tanh ? forward<T, GeluTanh<T>>(x, bias, y) : forward<T, Gelu<T>>(x, bias, y);
  });
}

}  // namespace opsmith
