// Gated activations: y = f(gate) * up in one pass, f the SiLU or a GELU; and their backward pass, also in one. All tensors are
// [rows, n], contiguous in n; without `up` the gate is [rows, 2n] and holds both, as does its gradient.
#include "curves.h"
#include "schedules/element_walk.h"

namespace opsmith {
namespace {

// Gate and up; where there is no up, the halves of the gate's rows.
struct GateAndUp {
  GateAndUp(const View& gate, const View& up)
      : sizes{gate.sizes[0], gate.sizes[1] / 2}, first(gate), second(up) {
    if (up.defined()) return;
    first.sizes = sizes;
    second = first;
    second.data = static_cast<char*>(first.data) + sizes[1] * (first.dtype == DType::f32 ? 4 : 2);
  }

  const int64_t sizes[2];
  View first, second;
};

template <class T, class F>
void forward(const View& gate, const View& up, const View& y) {
  const Walk walk({&gate, &up, &y});
  const int64_t g_ahead = walk.ahead(gate), u_ahead = walk.ahead(up);
  const bool past_cache = outlives_cache(walk.total * int64_t(sizeof(T)), 3);
  parallel_rows(walk.count, walk.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* g = walk.row<T>(gate, r);
      const T* u = walk.row<T>(up, r);
      T* out = walk.row<T>(y, r);
      const bool streaming = past_cache && can_stream_both(out);
      for_pairs(walk.size(r), [=](int64_t i, auto k) {
        prefetch_streams(g + i, g_ahead, k);
        prefetch_streams(u + i, u_ahead, k);
        look_ahead(out, i);
        put(out + i, value_of<F>(load(g + i, k)) * load(u + i, k), k, streaming);
      });
    }
    if (past_cache) stream_fence();
  });
}

template <class T, class F>
void backward(const View& dy, const View& gate, const View& up, const View& dgate, const View& dup) {
  const Walk walk({&dy, &gate, &up, &dgate, &dup});
  const int64_t d_ahead = walk.ahead(dy), g_ahead = walk.ahead(gate), u_ahead = walk.ahead(up);
  const bool past_cache = outlives_cache(walk.total * int64_t(sizeof(T)), 5);
  parallel_rows(walk.count, walk.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* d = walk.row<T>(dy, r);
      const T* g = walk.row<T>(gate, r);
      const T* u = walk.row<T>(up, r);
      T* dg = walk.row<T>(dgate, r);
      T* du = walk.row<T>(dup, r);
      const bool streaming = past_cache && can_stream_both(dg) && can_stream_both(du);
      for_pairs(walk.size(r), [=](int64_t i, auto k) {
        prefetch_streams(d + i, d_ahead, k);
        prefetch_streams(g + i, g_ahead, k);
        prefetch_streams(u + i, u_ahead, k);
        look_ahead(dg, i);
        look_ahead(du, i);
        const auto seen = load(d + i, k);
        const auto f = both_of<F>(load(g + i, k));
        put(dg + i, seen * load(u + i, k) * f.slope, k, streaming);
        put(du + i, seen * f.value, k, streaming);
      });
    }
    if (past_cache) stream_fence();
  });
}

}  // namespace

void gated(View gate, View up, int64_t activation, View y) {
  const GateAndUp in(gate, up);
  with_float_type(y.dtype, [&]<class T>(T*) {
    with_curve<T>(activation, [&]<class F>(F*) { forward<T, F>(in.first, in.second, y); });
  });
}

void gated_backward(View dy, View gate, View up, int64_t activation, View dgate, View dup) {
  const GateAndUp in(gate, up), out(dgate, dup);
  with_float_type(dy.dtype, [&]<class T>(T*) {
    with_curve<T>(activation,
                  [&]<class F>(F*) { backward<T, F>(dy, in.first, in.second, out.first, out.second); });
  });
}

}  // namespace opsmith
