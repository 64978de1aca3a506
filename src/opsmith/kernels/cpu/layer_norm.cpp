// LayerNorm: each row is read from memory once; the second look at it finds it in cache.
#include <cmath>

#include "kernels.h"
#include "rows.h"

namespace opsmith {
namespace {

constexpr int block = 8;  // vectors that enter the statistics together
constexpr int64_t task = 16384;

// Mean as high + low, as a float alone is too coarse where the mean is large beside the deviation.
struct Moments {
  float high, low, variance;
};

// As a tree: short chains, so that one block overlaps the next.
template <int k>
inline Vec add_up(const Vec* v) {
  if constexpr (k == 1) {
    return v[0];
  } else {
    return add_up<k / 2>(v) + add_up<k / 2>(v + k / 2);
  }
}

// Statistics of a row in one pass. Each lane holds the mean and the summed squared deviation (m2) of what it saw,
// both taken around a pivot near its mean. A block of vectors gets its own two moments first (exact, the values are
// still in registers) and is merged by Chan's formula, which is Welford's update for a block:
//   delta = block_mean - mean,  mean += delta * k / (count + k),  m2 += block_m2 + delta^2 * count * k / (count + k)
template <class Value>
inline Moments moments(int64_t n, Value&& value) {
  const int64_t vectors = n / W;
  Vec pivot{}, mean{}, m2{};
  int64_t count = 0;
  auto merge = [&](int64_t first, auto size) {
    constexpr int k = decltype(size)::value;
    Vec v[k];
#pragma GCC unroll 8
    for (int j = 0; j < k; ++j) v[j] = value((first + j) * W, Full{});
    if (first == 0) pivot = add_up<k>(v) * (1.0f / k);
#pragma GCC unroll 8
    for (int j = 0; j < k; ++j) v[j] -= pivot;
    const Vec block_mean = add_up<k>(v) * (1.0f / k);
#pragma GCC unroll 8
    for (int j = 0; j < k; ++j) {
      const Vec d = v[j] - block_mean;
      v[j] = d * d;
    }
    const Vec squares = add_up<k>(v);
    const float share = float(k) / float(count + k);
    const Vec delta = block_mean - mean;
    mean = fma(delta, share, mean);
    m2 += fma(delta * delta, share * float(count), squares);
    count += k;
  };
  int64_t i = 0;
  for (; i + block <= vectors; i += block) merge(i, std::integral_constant<int, block>{});
  for (; i < vectors; ++i) merge(i, std::integral_constant<int, 1>{});

  // Across lanes, all with the same count: Chan again, in one step.
  float high = 0, low = 0, sum2 = 0;
  if (vectors > 0) {
    high = reduce_add(pivot) * (1.0f / W);
    const Vec center = (pivot - high) + mean;
    low = reduce_add(center) * (1.0f / W);
    const Vec off = center - low;
    sum2 = reduce_add(m2 + off * off * float(count));
  }
  if (const int rest = int(n % W)) {  // and with the last, shorter vector
    const Part k{rest};
    const Vec v = value(n - rest, k);
    if (vectors == 0) high = v[0];
    const Vec d = keep(v - high - low, k, 0.0f);
    const float delta = reduce_add(d) / float(rest), share = float(rest) / float(n);
    const Vec off = keep(d - delta, k, 0.0f);
    low += delta * share;
    sum2 += reduce_add(off * off) + delta * delta * share * float(n - rest);
  }
  return {high, low, sum2 / float(n)};
}

template <class T, class P>
void forward(const View& x, const View& residual, const P* weight, const P* bias, float eps, const View& y,
             const View& summed, float* mean, float* rstd) {
  const int64_t rows = x.sizes[0], n = x.sizes[1];
  const bool past_cache = outlives_cache(rows * n * int64_t(sizeof(T)));
  // While one row is worked on, the next is on its way: half of it is asked for in each of the two looks.
  parallel_for(rows, row_grain(n, task), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* xr = x.as<T>() + r * x.strides[0];
      const T* ar = residual.defined() ? residual.as<T>() + r * residual.strides[0] : nullptr;
      T* sr = summed.defined() ? summed.as<T>() + r * summed.strides[0] : nullptr;
      T* yr = y.as<T>() + r * y.strides[0];
      // By value, here and below: a reference would be read again after every store.
      auto sum_at = [=](int64_t i, auto k) { return round_to<T>(load(xr + i, k) + load(ar + i, k)); };
      auto write = [&](Moments m, auto&& value) {
        const float scale = 1.0f / std::sqrt(m.variance + eps);
        if (mean) mean[r] = m.high + m.low;
        if (rstd) rstd[r] = scale;
        auto normalized = [=](int64_t i, auto k) { return (value(i, k) - m.high - m.low) * scale; };
        const bool streaming = past_cache && can_stream(yr);
        if (weight && bias) {
          for_lanes(n, [=](int64_t i, auto k) {
            put(yr + i, fma(normalized(i, k), load(weight + i, k), load(bias + i, k)), k, streaming);
          });
        } else {
          for_lanes(n, [=](int64_t i, auto k) {
            Vec v = normalized(i, k);
            if (weight) v *= load(weight + i, k);
            if (bias) v += load(bias + i, k);
            put(yr + i, v, k, streaming);
          });
        }
      };
      auto stored = [](const T* p) { return [p](int64_t i, auto k) { return load(p + i, k); }; };
      if (!ar) {
        const T* const next = r + 1 < end ? xr + x.strides[0] : xr;
        auto first = [=](int64_t i, auto k) { return prefetch(next + i / 2), load(xr + i, k); };
        auto second = [=](int64_t i, auto k) { return prefetch(next + (n + i) / 2), load(xr + i, k); };
        write(moments(n, first), second);
      } else if (sr) {
        const Moments m = moments(n, [=](int64_t i, auto k) {
          const Vec s = sum_at(i, k);
          store(sr + i, s, k);
          return s;
        });
        write(m, stored(sr));
      } else {
        write(moments(n, sum_at), sum_at);
      }
    }
    if (past_cache) stream_fence();
  });
}

// A parameter as P: as it is, or converted where weight and bias came in different types.
template <class P>
const P* parameter(const View& v, int64_t n, std::unique_ptr<float[]>& converted) {
  if (!v.defined()) return nullptr;
  if constexpr (std::is_same_v<P, float>) {
    if (v.dtype != DType::f32) {
      converted.reset(new float[size_t(n)]);
      with_float_type(v.dtype, [&](auto* t) {
        for (int64_t i = 0; i < n; ++i) converted[i] = to_float(v.as<std::remove_pointer_t<decltype(t)>>()[i]);
      });
      return converted.get();
    }
  }
  return v.as<P>();
}

// Calls f with a pointer of the type in which weight and bias are read: T where both given ones are T, else float.
template <class T, class F>
void with_parameter_type(const View& weight, const View& bias, F&& f) {
  auto is_float = [](const View& v) { return v.defined() && v.dtype == DType::f32; };
  if (is_float(weight) || is_float(bias)) {
    f(static_cast<float*>(nullptr));
  } else {
    f(static_cast<T*>(nullptr));
  }
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)) + dsummed, with g = dy * weight and xhat = (s - mean) * rstd.
// dweight and dbias of a chunk of rows are added up in `partial`, [2, n] float32.
template <class T, class P>
void backward_rows(int64_t begin, int64_t end, const View& dy, const View& dsummed, const View& s, const float* mean,
                   const float* rstd, const P* weight, const View& dx, float* dweight, float* dbias) {
  const int64_t n = s.sizes[1];
  for (int64_t r = begin; r < end; ++r) {
    const T* gr = dy.as<T>() + r * dy.strides[0];
    const T* sr = s.as<T>() + r * s.strides[0];
    const T* ar = dsummed.defined() ? dsummed.as<T>() + r * dsummed.strides[0] : nullptr;
    const float m = mean[r], scale = rstd[r];
    Vec total[4] = {}, along[4] = {};
    for_lanes_unrolled<4>(n, [&](int64_t i, int u, auto k) {
      const Vec d = load(gr + i, k), hat = keep((load(sr + i, k) - m) * scale, k, 0.0f);
      if (dbias) store(dbias + i, load(dbias + i, k) + d, k);
      if (dweight) store(dweight + i, fma(d, hat, load(dweight + i, k)), k);
      const Vec g = weight ? d * load(weight + i, k) : d;
      total[u] += g;
      along[u] = fma(g, hat, along[u]);
    });
    if (!dx.defined()) continue;
    T* xr = dx.as<T>() + r * dx.strides[0];
    const float a = reduce_add((total[0] + total[1]) + (total[2] + total[3])) / float(n);
    const float b = reduce_add((along[0] + along[1]) + (along[2] + along[3])) / float(n);
    for_lanes(n, [&](int64_t i, auto k) {
      const Vec d = load(gr + i, k), hat = (load(sr + i, k) - m) * scale;
      const Vec g = weight ? d * load(weight + i, k) : d;
      Vec v = (g - a - hat * b) * scale;
      if (ar) v += load(ar + i, k);
      store(xr + i, v, k);
    });
  }
}

}  // namespace

void layer_norm(View x, View residual, View weight, View bias, double eps, View y, View summed, View mean,
                View rstd) {
  if (x.sizes[0] == 0 || x.sizes[1] == 0) return;
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_parameter_type<T>(weight, bias, [&](auto* p) {
      using P = std::remove_pointer_t<decltype(p)>;
      std::unique_ptr<float[]> w, b;
      const int64_t n = x.sizes[1];
      forward<T, P>(x, residual, parameter<P>(weight, n, w), parameter<P>(bias, n, b), float(eps), y, summed,
                    mean.as<float>(), rstd.as<float>());
    });
  });
}

void layer_norm_backward(View dy, View dsummed, View s, View mean, View rstd, View weight, View dx, View dweight,
                         View dbias) {
  const int64_t rows = s.sizes[0], n = s.sizes[1];
  // The split into chunks, and so the order of every addition, depends on the shape and the thread count alone.
  const int64_t chunks = std::max<int64_t>(1, std::min(num_threads(), rows / row_grain(n, task)));
  const int64_t stride = round_up(n, W), width = dweight.defined() + dbias.defined();
  std::unique_ptr<float[]> partial(new float[size_t(chunks * width * stride)]());
  auto sums = [&](int64_t c, bool bias) {
    return partial.get() + (c * width + (bias && dweight.defined())) * stride;
  };
  with_float_type(s.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    with_parameter_type<T>(weight, View{}, [&](auto* p) {
      using P = std::remove_pointer_t<decltype(p)>;
      parallel_for(n > 0 ? chunks : 0, 1, [&](int64_t first, int64_t last) {
        for (int64_t c = first; c < last; ++c) {
          backward_rows<T, P>(rows * c / chunks, rows * (c + 1) / chunks, dy, dsummed, s, mean.as<float>(),
                              rstd.as<float>(), weight.as<P>(), dx, dweight.defined() ? sums(c, false) : nullptr,
                              dbias.defined() ? sums(c, true) : nullptr);
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
        for (int64_t c = 0; c < chunks; ++c) total += load(sums(c, out == &dbias) + i, k);
        store(result + i, total, k);
      });
    });
  }
}

}  // namespace opsmith
