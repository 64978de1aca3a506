// The backward pass of both norms. With s the normalized tensor, g = dy * weight and xhat = (s - mean) * rstd,
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed,  dweight = sum of dy * xhat,  dbias = sum of dy;
// RMSNorm is the same without the mean of s and the mean of g.
#pragma once

#include "norm.h"

namespace opsmith {

struct NormGradients {
  View dy, dsummed, s;       // [rows, n]
  const float *mean, *rstd;  // [rows]
  View dx;                   // [rows, n]
};

// One thread's rows; the sums over them are added to `dweight` and `dbias`, [n] float32 in the order of pairs.
// Rows go in groups, so that the columns' sums, and the weight, pass through registers once for all rows of a group. A
// group is looked at twice; in both looks half of the next one is fetched, and both stay in the second-level cache.
template <bool centered, bool with_sum, bool streaming, class T, class P>
class NormBackward {
 public:
  NormBackward(const NormGradients& of, const P* weight, float* dweight, float* dbias)
      : of_(of), n_(of.s.sizes[1]), weight_(weight), dweight_(dweight), dbias_(dbias) {}

  void operator()(int64_t begin, int64_t end) const {
    constexpr int group = 4;
    constexpr int64_t cache = int64_t{512} << 10;
    int64_t r = begin;
    if (2 * group * 2 * n_ * int64_t(sizeof(T)) <= cache) {
      for (; r + group <= end; r += group) rows<group>(r);
    }
    for (; r < end; ++r) rows<1>(r);
    if (streaming) stream_fence();
  }

 private:
  template <int group>
  void rows(int64_t first) const {
    const T *const g0 = row(of_.dy, first), *const s0 = row(of_.s, first);
    const T* const sum0 = with_sum ? row(of_.dsummed, first) : nullptr;
    T* const x0 = row(of_.dx, first);
    const int64_t gs = of_.dy.strides[0], ss = of_.s.strides[0], xs = of_.dx.strides[0], n = n_;
    const int64_t sums = with_sum ? of_.dsummed.strides[0] : 0;
    const P* const weight = weight_;
    float *const dweight = dweight_, *const dbias = dbias_;
    float scale[group], center[group], mean_g[group], mean_along[group];
    for (int j = 0; j < group; ++j) {
      scale[j] = of_.rstd[first + j];
      center[j] = centered ? of_.mean[first + j] : 0.0f;
      means(g0 + j * gs, s0 + j * ss, group, scale[j], center[j], mean_g[j], mean_along[j]);
    }
    lanes(n, [=](int64_t i, auto k) __attribute__((always_inline)) {
      const auto w = load(weight + i, k);
      auto along = load(dweight + i, k), total = load(dbias + i, k);
#pragma GCC unroll 4
      for (int j = 0; j < group; ++j) {
        const T *const g = g0 + j * gs + i, *const s = s0 + j * ss + i;
        if constexpr (std::is_same_v<decltype(k), Both>) fetch_half(g, s, i, n, group);
        if constexpr (streaming) look_ahead(x0 + (j + group - 1) * xs, i);
        const auto d = load(g, k);
        auto h = load(s, k);
        if constexpr (centered) h = h - center[j];
        h = h * scale[j];
        along = fma(d, h, along);
        if constexpr (centered) total = total + d;
        auto v = d * w;
        if constexpr (centered) v = v - mean_g[j];
        v = (v - h * mean_along[j]) * scale[j];
        if constexpr (with_sum) v = v + load(sum0 + j * sums + i, k);
        put(x0 + j * xs + i, v, k, streaming);
      }
      store(dweight + i, along, k);
      if constexpr (centered) store(dbias + i, total, k);
    });
  }

  // mean(g) and mean(g * xhat) of a row.
  void means(const T* g, const T* s, int64_t group, float scale, float center, float& mean_g,
             float& mean_along) const {
    const P* const weight = weight_;
    const int64_t n = n_;
    Vec total[2] = {}, along[2] = {};
    lanes(n, [&](int64_t i, auto k) __attribute__((always_inline)) {
      if constexpr (std::is_same_v<decltype(k), Both>) {
        fetch_half(g + i, s + i, i, 0, group);
        const Pair v = load(g + i, k) * load(weight + i, k);
        const Pair h = centered ? load(s + i, k) - center : load(s + i, k);
        along[0] = fma(v.a, h.a, along[0]);
        along[1] = fma(v.b, h.b, along[1]);
        if constexpr (centered) {
          total[0] += v.a;
          total[1] += v.b;
        }
      } else {
        const Vec v = load(g + i, k) * load(weight + i, k), h = load(s + i, k);
        along[0] = fma(v, centered ? keep(h - center, k, 0.0f) : h, along[0]);
        if constexpr (centered) total[0] += v;
      }
    });
    mean_g = centered ? reduce_add(total[0] + total[1]) / float(n) : 0.0f;
    mean_along = reduce_add(along[0] + along[1]) / float(n) * scale;
  }

  // Of the pair's row in the next group, the first half (from 0) or the second one (from n).
  void fetch_half(const T* g, const T* s, int64_t i, int64_t from, int64_t group) const {
    const int64_t back = (from + i) / 2 - i;
    for (int64_t j = 0; j < W; j += 64 / int64_t(sizeof(T))) {
      prefetch_far(g + group * of_.dy.strides[0] + back + j);
      prefetch_far(s + group * of_.s.strides[0] + back + j);
    }
  }

  template <class F>
  static inline __attribute__((always_inline)) void lanes(int64_t n, const F& f) {
    int64_t i = 0;
    for (; i < paired(n); i += 2 * W) f(i, Both{});
    for (; i + W <= n; i += W) f(i, Full{});
    if (i < n) f(i, Part{int(n - i)});
  }

  static T* row(const View& v, int64_t r) { return v.as<T>() + r * v.strides[0]; }

  const NormGradients of_;
  const int64_t n_;
  const P* const weight_;
  float *const dweight_, *const dbias_;
};

// The sums over columns alone, where nobody asked for dx.
template <bool centered, class T>
void norm_column_sums(int64_t begin, int64_t end, const NormGradients& of, float* dweight, float* dbias) {
  const int64_t n = of.s.sizes[1];
  for (int64_t r = begin; r < end; ++r) {
    const T *const g = of.dy.as<T>() + r * of.dy.strides[0], *const s = of.s.as<T>() + r * of.s.strides[0];
    const float center = centered ? of.mean[r] : 0.0f, scale = of.rstd[r];
    auto add = [=](int64_t i, auto k) {
      const auto d = load(g + i, k), h = (load(s + i, k) - center) * scale;
      store(dweight + i, fma(d, h, load(dweight + i, k)), k);
      if constexpr (centered) store(dbias + i, d + load(dbias + i, k), k);
    };
    int64_t i = 0;
    for (; i < paired(n); i += 2 * W) add(i, Both{});
    for (; i + W <= n; i += W) add(i, Full{});
    if (i < n) add(i, Part{int(n - i)});
  }
}

// All of it: the rows in chunks over the threads, then the chunks' sums together. `offset` is added to the weight.
// Within a chunk, 32 rows at a time are summed by themselves: rounding errors of a sum grow with its length, and PyTorch's
// sum, against whose error ours is held, adds in blocks as well.
template <bool centered>
void norm_backward(const NormGradients& of, const View& weight, float offset, const View& dweight, const View& dbias) {
  const int64_t rows = of.s.sizes[0], n = of.s.sizes[1];
  // The split into chunks, and so the order of every addition, depends on the shape and the thread count alone.
  const int64_t chunks = std::max<int64_t>(1, std::min(num_threads(), rows / row_grain(n, norm_task)));
  const int64_t stride = round_up(n, 16) + 16;
  constexpr int64_t block = 32;
  const int64_t kinds = rows > block * chunks ? 4 : 2;
  // Of each chunk dweight and dbias, and those of its block of rows where it has several.
  std::unique_ptr<float[]> partial(new float[size_t(chunks * kinds * stride)]());
  auto sums = [&](int64_t c, int which) { return partial.get() + (kinds * c + which) * stride; };
  auto add = [n](float* total, const float* part) {
    for_lanes(n, [=](int64_t i, auto k) { store(total + i, load(total + i, k) + load(part + i, k), k); });
  };
  with_float_type(of.s.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    auto over_rows = [&](auto&& f) {
      parallel_for(n > 0 && rows > 0 ? chunks : 0, 1, [&](int64_t first, int64_t last) {
        for (int64_t c = first; c < last; ++c) {
          const int64_t begin = rows * c / chunks, end = rows * (c + 1) / chunks;
          f(begin, std::min(begin + block, end), sums(c, 0), sums(c, 1));
          for (int64_t r = begin + block; r < end; r += block) {
            std::fill_n(sums(c, 2), 2 * stride, 0.0f);
            f(r, std::min(r + block, end), sums(c, 2), sums(c, 3));
            add(sums(c, 0), sums(c, 2));
            if constexpr (centered) add(sums(c, 1), sums(c, 3));
          }
        }
      });
    };
    if (of.dx.defined()) {
      const bool streaming = outlives_cache(rows * n * int64_t(sizeof(T))) && can_stream_rows<T>(of.dx);
      with_parameter_type<T>(offset != 0.0f, weight, View{}, [&](auto* p) {
        using P = std::remove_pointer_t<decltype(p)>;
        const Parameter<T, P> w(weight, n, 1.0f, offset);
        auto run = [&](auto with_sum, auto past_cache) {
          over_rows([&](int64_t begin, int64_t end, float* dw, float* db) {
            NormBackward<centered, with_sum.value, past_cache.value, T, P>(of, w.data(), dw, db)(begin, end);
          });
        };
        auto with = [&](auto with_sum) {
          streaming ? run(with_sum, std::true_type{}) : run(with_sum, std::false_type{});
        };
        of.dsummed.defined() ? with(std::true_type{}) : with(std::false_type{});
      });
    } else {
      over_rows([&](int64_t begin, int64_t end, float* dw, float* db) {
        norm_column_sums<centered, T>(begin, end, of, dw, db);
      });
    }
    for (int which = 0; which < 2; ++which) {
      const View& out = which ? dbias : dweight;
      if (!out.defined()) continue;
      for (int64_t c = 1; c < chunks; ++c) add(sums(0, which), sums(c, which));
      with_float_type(out.dtype, [&](auto* o) {
        from_pair_order<T>(sums(0, which), n, out.as<std::remove_pointer_t<decltype(o)>>());
      });
    }
  });
}

}  // namespace opsmith
