// The backward pass of both norms. With s the normalized tensor, g = dy * weight and xhat = (s - mean) * rstd,
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed,  dweight = sum of dy * xhat,  dbias = sum of dy;
// RMSNorm is the same without the mean of s and the mean of g.
#pragma once

#include "norm.h"

namespace opsmith {

struct NormGradients {
  View dy, dsummed, s;      // [rows, n]
  const float *mean, *rstd;  // [rows]
  View dx;                  // [rows, n]
  bool past_cache;
};

// One thread's share of the rows. The sums over its rows are kept in `dweight` and `dbias`, [n] float32.
template <bool centered, class T, class P>
class NormBackward {
 public:
  NormBackward(const NormGradients& of, const P* weight, float* dweight, float* dbias)
      : of_(of), n_(of.s.sizes[1]), weight_(weight), dweight_(dweight), dbias_(dbias) {}

  void operator()(int64_t begin, int64_t end) const {
    // Rows go in groups: the columns' sums pass through registers once for all rows of a group. A group and the one
    // after it, which is fetched meanwhile, stay in the second-level cache.
    constexpr int group = 4;
    constexpr int64_t cache = int64_t{512} << 10;
    int64_t r = begin;
    if (2 * group * 2 * n_ * int64_t(sizeof(T)) <= cache) {
      for (; r + group <= end; r += group) rows<group>(r, end);
    }
    for (; r < end; ++r) rows<1>(r, end);
    if (of_.past_cache) stream_fence();
  }

 private:
  const T* row(const View& v, int64_t r) const { return v.defined() ? v.as<T>() + r * v.strides[0] : nullptr; }

  template <int group>
  void rows(int64_t first, int64_t end) const {
    const T *g[group], *s[group], *sum[group];
    T* x[group];
    float mean_g[group], mean_along[group], scale[group], center[group];
    for (int j = 0; j < group; ++j) {
      const int64_t r = first + j;
      g[j] = row(of_.dy, r);
      s[j] = row(of_.s, r);
      sum[j] = row(of_.dsummed, r);
      x[j] = const_cast<T*>(row(of_.dx, r));
      scale[j] = of_.rstd[r];
      center[j] = centered ? of_.mean[r] : 0.0f;
      mean_g[j] = mean_along[j] = 0.0f;
      if (x[j]) means(g[j], s[j], center[j], scale[j], mean_g[j], mean_along[j]);
    }
    const bool more = first + group < end;  // then the next group is fetched while this one is written
    const int64_t next_g = more ? group * of_.dy.strides[0] : 0, next_s = more ? group * of_.s.strides[0] : 0;
    const bool streaming = of_.past_cache && x[0] && can_stream(x[0]) && of_.dx.strides[0] % W == 0;
    const P* const weight = weight_;
    float *const dweight = dweight_, *const dbias = dbias_;
    for_lanes(n_, [&](int64_t i, auto k) {
      const Vec w = load(weight + i, k);
      Vec along{}, total{};
#pragma GCC unroll 4
      for (int j = 0; j < group; ++j) {
        prefetch(g[j] + next_g + i);
        prefetch(s[j] + next_s + i);
        const Vec d = load(g[j] + i, k);
        Vec h = load(s[j] + i, k);
        if constexpr (centered) h -= center[j];
        h *= scale[j];
        along = fma(d, h, along);
        if constexpr (centered) total += d;
        if (x[j]) {
          Vec v = d * w;
          if constexpr (centered) v -= mean_g[j];
          v = (v - h * mean_along[j]) * scale[j];
          if (sum[j]) v += load(sum[j] + i, k);
          put(x[j] + i, v, k, streaming);
        }
      }
      if (dweight) store(dweight + i, load(dweight + i, k) + along, k);
      if (dbias) store(dbias + i, load(dbias + i, k) + total, k);
    });
  }

  // The means of g and of g * xhat over one row.
  void means(const T* g, const T* s, float center, float scale, float& mean_g, float& mean_along) const {
    const P* const weight = weight_;
    Vec total[4] = {}, along[4] = {};
    for_lanes_unrolled<4>(n_, [&](int64_t i, int u, auto k) {
      prefetch(reinterpret_cast<const char*>(g + i) + norm_ahead);
      prefetch(reinterpret_cast<const char*>(s + i) + norm_ahead);
      const Vec v = load(g + i, k) * load(weight + i, k);
      Vec h = load(s + i, k);
      if constexpr (centered) {
        h = keep(h - center, k, 0.0f);
        total[u] += v;
      }
      along[u] = fma(v, h, along[u]);
    });
    if constexpr (centered) mean_g = reduce_add(add_up<4>(total)) / float(n_);
    mean_along = reduce_add(add_up<4>(along)) / float(n_) * scale;
  }

  const NormGradients of_;
  const int64_t n_;
  const P* const weight_;
  float *const dweight_, *const dbias_;
};

// All of it: the rows in chunks over the threads, then the chunks' sums together. `offset` is added to the weight.
template <bool centered>
void norm_backward(NormGradients of, View weight, float offset, View dweight, View dbias) {
  const int64_t rows = of.s.sizes[0], n = of.s.sizes[1];
  // The split into chunks, and so the order of every addition, depends on the shape and the thread count alone.
  const int64_t chunks = std::max<int64_t>(1, std::min(num_threads(), rows / row_grain(n, norm_task)));
  const int64_t stride = round_up(n, W), width = dweight.defined() + dbias.defined();
  std::unique_ptr<float[]> partial(new float[size_t(chunks * width * stride)]());
  auto sums = [&](const View& of_this, int64_t c) {
    const int64_t at = &of_this == &dbias && dweight.defined();
    return of_this.defined() ? partial.get() + (c * width + at) * stride : nullptr;
  };
  with_float_type(of.s.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    of.past_cache = outlives_cache(rows * n * int64_t(sizeof(T)));
    with_parameter_type<T>(offset != 0.0f, weight, View{}, [&](auto* p) {
      using P = std::remove_pointer_t<decltype(p)>;
      const Parameter<P> w(weight, n, 1.0f, offset);
      parallel_for(n > 0 && rows > 0 ? chunks : 0, 1, [&](int64_t first, int64_t last) {
        for (int64_t c = first; c < last; ++c) {
          const NormBackward<centered, T, P> run(of, w.data(), sums(dweight, c), sums(dbias, c));
          run(rows * c / chunks, rows * (c + 1) / chunks);
        }
      });
    });
  });
  for (const View* out : {&dweight, &dbias}) {
    if (!out->defined()) continue;
    with_float_type(out->dtype, [&](auto* t) {
      auto* result = out->as<std::remove_pointer_t<decltype(t)>>();
      for_lanes(n, [&](int64_t i, auto k) {
        Vec total{};
        for (int64_t c = 0; c < chunks; ++c) total += load(sums(*out, c) + i, k);
        store(result + i, total, k);
      });
    });
  }
}

}  // namespace opsmith
