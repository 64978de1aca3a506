// The backward pass of both norms. With s the normalized tensor, g = dy * weight and xhat = (s - mean) * rstd,
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed,  dweight = sum of dy * xhat,  dbias = sum of dy;
// RMSNorm is the same without the mean of s and the mean of g.
#pragma once

#include "schedules/column_sums.h"
#include "norm.h"

namespace opsmith {

struct NormGradients {
  View dy, dsummed, s;  // [rows, n]
  const float *mean, *rstd;  // [rows]
  View dx;  // [rows, n]
};

// One thread's rows; the sums over them are added to `dweight` and `dbias`, [n] float32 in the order of pairs.
// Rows go in blocks that stay in the second-level cache and are looked at twice: all together, for their means and for the
// columns' sums, which are loaded and stored once for a block; and then one by one, to be written, since stores past the
// cache that turn between rows take longer. In both looks half of the next block is fetched.
template <bool centered, class T, class P>
class NormBackward {
 public:
  NormBackward(const NormGradients& of, bool streaming, const P* weight, float* dweight, float* dbias)
      : of_(of), streaming_(streaming), n_(of.s.sizes[1]), weight_(weight), dweight_(dweight), dbias_(dbias) {
  }

  void operator()(int64_t begin, int64_t end) const {
    const bool fits = 2 * 2 * most * n_ * int64_t(sizeof(T)) <= int64_t{1} << 20;  // two blocks, two tensors
    int64_t r = begin;
    for (; fits && r + most <= end; r += most) block<most>(r);
    for (; r < end; ++r) block<1>(r);
    if (streaming_) stream_fence();
  }

 private:
  static constexpr int most = 4;  // rows of a block

  struct Means {  // of g and of g * xhat
    float g, along;
  };

  template <int count>
  void block(int64_t first) const {
    Means means[count];
    sum<count>(first, means);
    for (int r = 0; r < count; ++r) write(first + r, first + r + count, means[r]);
  }

  template <int count>
  void sum(int64_t first, Means* means) const {
    const int64_t n = n_, next_g = count * of_.dy.strides[0], next_s = count * of_.s.strides[0];
    const T *g[count], *s[count];
    float center[count], scale[count];
    Vec total[count] = {}, along[count] = {};
    for (int r = 0; r < count; ++r) {
      g[r] = row(of_.dy, first + r);
      s[r] = row(of_.s, first + r);
      center[r] = centered ? of_.mean[first + r] : 0.0f;
      scale[r] = of_.rstd[first + r];
    }
    float *const dweight = dweight_, *const dbias = dbias_;
    const P* const weight = weight_;
    auto add = [&](int64_t i, auto k) __attribute__((always_inline)) {
      using V = decltype(load(g[0], k));
      const V w = load(weight + i, k);
      V column_along = load(dweight + i, k), column_total{};
      if constexpr (centered) column_total = load(dbias + i, k);
#pragma GCC unroll 4
      for (int r = 0; r < count; ++r) {
        const V d = load(g[r] + i, k);
        V h = load(s[r] + i, k);
        if constexpr (centered) h = h - center[r];
        h = h * scale[r];
        column_along = fma(d, h, column_along);
        if constexpr (centered) column_total = column_total + d;
        const V v = d * w;
        if constexpr (std::is_same_v<decltype(k), Both>) {
          along[r] = fma(v.a, h.a, fma(v.b, h.b, along[r]));
          if constexpr (centered) total[r] += v.a + v.b;
        } else {
          along[r] += keep(v * h, k, 0.0f);
          if constexpr (centered) total[r] += v;
        }
      }
      store(dweight + i, column_along, k);
      if constexpr (centered) store(dbias + i, column_total, k);
    };
    int64_t i = 0;
    for (; i < paired(n); i += 4 * W) {
#pragma GCC unroll 4
      for (int r = 0; r < count; ++r) fetch(g[r] + next_g + i / 2, s[r] + next_s + i / 2);
      add(i, Both{});
      add(i + 2 * W, Both{});
    }
    for_lanes(n - i, [&](int64_t lane, auto k) __attribute__((always_inline)) { add(i + lane, k); });
    for (int r = 0; r < count; ++r) {
      means[r] = {centered ? reduce_add(total[r]) / float(n) : 0.0f, reduce_add(along[r]) / float(n)};
    }
  }

  void write(int64_t r, int64_t next, const Means& mean) const {
    const bool streaming = streaming_;
    const int64_t n = n_;
    const T *const g = row(of_.dy, r), *const s = row(of_.s, r),
                   *const sum = of_.dsummed.defined() ? row(of_.dsummed, r) : nullptr;
    const T *const next_g = row(of_.dy, next) + n / 2, *const next_s = row(of_.s, next) + n / 2;
    T* const x = row(of_.dx, r);
    const P* const weight = weight_;
    const float center = centered ? of_.mean[r] : 0.0f, scale = of_.rstd[r], mean_g = mean.g,
                mean_along = mean.along;
    const float shift = scale * mean_g, slope = -scale * scale * mean_along;
    auto put_one = [=](int64_t i, auto k) __attribute__((always_inline)) {
      const auto d = load(g + i, k);
      auto h = load(s + i, k), v = d * load(weight + i, k);
      if constexpr (centered) h = h - center;
      if constexpr (std::is_same_v<decltype(k), Both>) {
        v = v * scale;
        if constexpr (centered) v = v - shift;
        v = fma(h, slope, v);
      } else {  // in this order, and rounded alike, the terms of a row of one element cancel
        if constexpr (centered) v = v - mean_g;
        v = (v - rounded(h * scale * mean_along)) * scale;
      }
      if (sum) v = v + load(sum + i, k);
      put(x + i, v, k, streaming);
    };
    int64_t i = 0;
    for (; i < paired(n); i += 4 * W) {
      fetch(next_g + i / 2, next_s + i / 2);
      if (sum) {
        fetch_pair(sum + sum_ahead + i);
        fetch_pair(sum + sum_ahead + i + 2 * W);
      }
      if (streaming) look_ahead(x, i);
      put_one(i, Both{});
      put_one(i + 2 * W, Both{});
    }
    for_lanes(n - i, [&](int64_t lane, auto k) __attribute__((always_inline)) { put_one(i + lane, k); });
  }

  // Half as much as two pairs.
  static void fetch(const T* g, const T* s) {
    for (int64_t j = 0; j < 2 * W; j += 64 / int64_t(sizeof(T))) {
      prefetch_far(g + j);
      prefetch_far(s + j);
    }
  }

  static T* row(const View& v, int64_t r) { return v.as<T>() + r * v.strides[0]; }

  static constexpr int64_t sum_ahead = 4096 / int64_t(sizeof(T));
  const NormGradients of_;
  const bool streaming_;
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
    for_pairs<paired_block>(n, [=](int64_t i, auto k) {
      const auto d = load(g + i, k), h = (load(s + i, k) - center) * scale;
      store(dweight + i, fma(d, h, load(dweight + i, k)), k);
      if constexpr (centered) store(dbias + i, d + load(dbias + i, k), k);
    });
  }
}

// All of it. `offset` is added to the weight.
template <bool centered>
void norm_backward(const NormGradients& of, const View& weight, float offset, const View& dweight,
                   const View& dbias) {
  const int64_t rows = of.s.sizes[0], n = of.s.sizes[1];
  ColumnSums<2> sums(rows, n, row_grain(n, norm_task));  // dweight and dbias
  with_float_type(of.s.dtype, [&]<class T>(T*) {
    if (of.dx.defined()) {
      const int64_t tensors = of.dsummed.defined() ? 4 : 3;
      const bool streaming = outlives_cache(rows * n * int64_t(sizeof(T)), tensors) &&
                             can_stream_rows<T>(of.dx);
      with_parameter_type<T>(offset != 0.0f, weight, View{}, [&]<class P>(P*) {
        const Parameter<T, P> w(weight, n, 1.0f, offset);
        sums.over_rows([&](int64_t begin, int64_t end, const auto& to) {
          NormBackward<centered, T, P>(of, streaming, w.data(), to[0], to[1])(begin, end);
        });
      });
    } else {
      sums.over_rows([&](int64_t begin, int64_t end, const auto& to) {
        norm_column_sums<centered, T>(begin, end, of, to[0], to[1]);
      });
    }
    if (dweight.defined()) sums.template write<T>(0, dweight);
    if (dbias.defined()) sums.template write<T>(1, dbias);
  });
}

}  // namespace opsmith
