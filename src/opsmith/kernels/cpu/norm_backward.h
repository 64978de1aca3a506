// The backward pass of both norms. With s the normalized tensor, g = dy * weight and xhat = (s - mean) * rstd,
//   dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed,  dweight = sum of dy * xhat,  dbias = sum of dy;
// RMSNorm is the same without the mean of s and the mean of g.
#pragma once

#include "column_sums.h"
#include "norm.h"

namespace opsmith {

struct NormGradients {
  View dy, dsummed, s;       // [rows, n]
  const float *mean, *rstd;  // [rows]
  View dx;                   // [rows, n]
};

// One thread's rows; the sums over them are added to `dweight` and `dbias`, [n] float32 in the order of pairs.
// Rows go in blocks that stay in the second-level cache and are looked at twice: along the rows, for their means, and then
// down the columns, a strip at a time, so that the columns' sums and the weight stay in registers for all rows of a block.
// In both looks half of the next block is fetched.
template <bool centered, bool with_sum, bool streaming, class T, class P>
class NormBackward {
 public:
  NormBackward(const NormGradients& of, const P* weight, float* dweight, float* dbias)
      : of_(of), n_(of.s.sizes[1]), weight_(weight), dweight_(dweight), dbias_(dbias) {}

  void operator()(int64_t begin, int64_t end) const {
    constexpr int64_t cache = int64_t{512} << 10;
    const int64_t fit = cache / (2 * 2 * n_ * int64_t(sizeof(T)));  // two blocks, two tensors
    const int64_t step = std::min(most, std::max<int64_t>(1, fit));
    for (int64_t r = begin; r < end; r += step) block(r, std::min(step, end - r), step);
    if (streaming) stream_fence();
  }

 private:
  // Rows of a block. Columns' sums would be loaded and stored less often with more, but stores past the cache that turn
  // between more rows take longer: 16 bits best by two, 32 bits by four.
  static constexpr int64_t most = sizeof(T) == 2 ? 2 : 4;

  struct Scalars {  // of a row
    float center, scale, mean_g, mean_along;
    float shift, slope;  // rstd * mean_g, -rstd^2 * mean_along
  };

  void block(int64_t first, int64_t rows, int64_t step) const {
    Scalars scalars[most];
    for (int64_t r = 0; r < rows; r += 2) {
      rows - r > 1 ? means<2>(first + r, step, scalars + r) : means<1>(first + r, step, scalars + r);
    }
    int64_t i = 0;
    for (; i < paired(n_); i += 4 * W) strip<2>(first, i, Both{}, rows, step, scalars);
    for (; i + W <= n_; i += W) strip<1>(first, i, Full{}, rows, step, scalars);
    if (i < n_) strip<1>(first, i, Part{int(n_ - i)}, rows, step, scalars);
  }

  // mean(g) and mean(g * xhat) of `count` rows.
  template <int count>
  void means(int64_t first, int64_t step, Scalars* scalars) const {
    const int64_t n = n_;
    const P* const weight = weight_;
    const T *g[count], *s[count], *sum[count], *next_g[count], *next_s[count];
    float center[count];
    Vec total[count][2] = {}, along[count][2] = {};
    for (int r = 0; r < count; ++r) {
      g[r] = row(of_.dy, first + r);
      s[r] = row(of_.s, first + r);
      sum[r] = with_sum ? row(of_.dsummed, first + r) : nullptr;
      next_g[r] = row(of_.dy, first + r + step) + n / 2;
      next_s[r] = row(of_.s, first + r + step) + n / 2;
      center[r] = centered ? of_.mean[first + r] : 0.0f;
    }
    int64_t i = 0;
    for (; i < paired(n); i += 4 * W) {
#pragma GCC unroll 2
      for (int r = 0; r < count; ++r) fetch(next_g[r] + i / 2, next_s[r] + i / 2);
#pragma GCC unroll 2
      for (int64_t at = i; at < i + 4 * W; at += 2 * W) {
        const Pair w = load(weight + at, Both{});
#pragma GCC unroll 2
        for (int r = 0; r < count; ++r) {
          const Pair v = load(g[r] + at, Both{}) * w;
          Pair h = load(s[r] + at, Both{});
          if constexpr (with_sum) fetch_pair(sum[r] + at);
          if constexpr (centered) h = h - center[r];
          along[r][0] = fma(v.a, h.a, along[r][0]);
          along[r][1] = fma(v.b, h.b, along[r][1]);
          if constexpr (centered) {
            total[r][0] += v.a;
            total[r][1] += v.b;
          }
        }
      }
    }
    for_lanes(n - i, [&](int64_t lane, auto k) __attribute__((always_inline)) {
      const Vec w = load(weight + i + lane, k);
      for (int r = 0; r < count; ++r) {
        const Vec v = load(g[r] + i + lane, k) * w, h = load(s[r] + i + lane, k);
        along[r][0] = fma(v, centered ? keep(h - center[r], k, 0.0f) : h, along[r][0]);
        if constexpr (centered) total[r][0] += v;
      }
    });
    for (int r = 0; r < count; ++r) {
      const float scale = of_.rstd[first + r];
      const float mean_g = centered ? reduce_add(total[r][0] + total[r][1]) / float(n) : 0.0f;
      const float mean_along = reduce_add(along[r][0] + along[r][1]) / float(n) * scale;
      scalars[r] = {center[r], scale, mean_g, mean_along, scale * mean_g, -scale * scale * mean_along};
    }
  }

  // `count` pairs or vectors side by side, from column i on, in all rows of a block.
  template <int count, class Lanes>
  void strip(int64_t first, int64_t i, Lanes k, int64_t rows, int64_t step, const Scalars* scalars) const {
    constexpr int64_t lanes = std::is_same_v<Lanes, Both> ? 2 * W : W;
    const int64_t gs = of_.dy.strides[0], ss = of_.s.strides[0], xs = of_.dx.strides[0];
    const T *g = row(of_.dy, first) + i, *s = row(of_.s, first) + i, *sum = with_sum ? row(of_.dsummed, first) + i : nullptr;
    T* x = row(of_.dx, first) + i;
    if constexpr (streaming) look_down(x, i, rows);
    const int64_t next_g = step * gs + i / 2 - i, next_s = step * ss + i / 2 - i;
    using V = decltype(load(g, k));
    V w[count], along[count], total[count];
    for (int c = 0; c < count; ++c) {
      w[c] = load(weight_ + i + c * lanes, k);
      along[c] = load(dweight_ + i + c * lanes, k);
      total[c] = load(dbias_ + i + c * lanes, k);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const Scalars of = scalars[r];
      if constexpr (count == 2) fetch(g + next_g, s + next_s);
#pragma GCC unroll 2
      for (int c = 0; c < count; ++c) {
        const V d = load(g + c * lanes, k);
        V h = load(s + c * lanes, k);
        if constexpr (centered) h = h - of.center;
        if constexpr (centered) total[c] = total[c] + d;
        V v;
        if constexpr (std::is_same_v<Lanes, Both>) {
          const V scaled = d * of.scale;
          along[c] = fma(scaled, h, along[c]);
          v = scaled * w[c];
          if constexpr (centered) v = v - of.shift;
          v = fma(h, of.slope, v);
        } else {  // in this order the terms of a row of one element cancel
          h = h * of.scale;
          along[c] = fma(d, h, along[c]);
          v = d * w[c];
          if constexpr (centered) v = v - of.mean_g;
          v = (v - h * of.mean_along) * of.scale;
        }
        if constexpr (with_sum) v = v + load(sum + c * lanes, k);
        put(x + c * lanes, v, k, streaming);
      }
      g += gs;
      s += ss;
      x += xs;
      if constexpr (with_sum) sum += of_.dsummed.strides[0];
    }
    for (int c = 0; c < count; ++c) {
      store(dweight_ + i + c * lanes, along[c], k);
      if constexpr (centered) store(dbias_ + i + c * lanes, total[c], k);
    }
  }

  // Half as much as two pairs.
  static void fetch(const T* g, const T* s) {
    for (int64_t j = 0; j < 2 * W; j += 64 / int64_t(sizeof(T))) {
      prefetch_far(g + j);
      prefetch_far(s + j);
    }
  }

  // The pages that come next in what is written at x, element i of its row.
  void look_down(const T* x, int64_t i, int64_t rows) const {
    constexpr int64_t page = 4096 / int64_t(sizeof(T));
    if (i % page != 0) return;
    const int64_t xs = of_.dx.strides[0], next = i + page < n_ ? page : rows * xs - i;
    for (int64_t r = 0; r < rows; ++r) prefetch(x + r * xs + next);
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

// All of it. `offset` is added to the weight.
template <bool centered>
void norm_backward(const NormGradients& of, const View& weight, float offset, const View& dweight, const View& dbias) {
  const int64_t rows = of.s.sizes[0], n = of.s.sizes[1];
  ColumnSums<2> sums(rows, n, row_grain(n, norm_task));  // dweight and dbias
  with_float_type(of.s.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    if (of.dx.defined()) {
      const bool streaming = outlives_cache(rows * n * int64_t(sizeof(T))) && can_stream_rows<T>(of.dx);
      with_parameter_type<T>(offset != 0.0f, weight, View{}, [&](auto* p) {
        using P = std::remove_pointer_t<decltype(p)>;
        const Parameter<T, P> w(weight, n, 1.0f, offset);
        auto run = [&](auto with_sum, auto past_cache) {
          sums.over_rows([&](int64_t begin, int64_t end, const auto& to) {
            NormBackward<centered, with_sum.value, past_cache.value, T, P>(of, w.data(), to[0], to[1])(begin, end);
          });
        };
        auto with = [&](auto with_sum) {
          streaming ? run(with_sum, std::true_type{}) : run(with_sum, std::false_type{});
        };
        of.dsummed.defined() ? with(std::true_type{}) : with(std::false_type{});
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
