// Softmax: one scan of the row finds maximum and sum together, a second, over scratch in cache, writes the result.
#include <cmath>
#include <limits>

#include "kernels.h"
#include "rows.h"

namespace opsmith {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float lowest = -std::numeric_limits<float>::max();
constexpr int64_t task = 8192;
constexpr int block = 8 * W;  // elements between two looks at the running maximum
constexpr int piece = 8 * block;  // elements summed before the sum is added to the row's

enum Method : int64_t { automatic = 0, stable = 1, fast = 2 };

// Without subtraction, a row is safe if its sum shows that nothing overflowed and nothing was lost: up to safe_sum no
// term came near float's end, and with a sum of at least 1, terms too small for a float are as negligible as they are
// after subtracting the maximum. A narrow range alone would not do: 1000..1001 overflows, -1001..-1000 is lost. After a
// row that was subtracted, the next one is tried without if the maximum was in [0, safe_maximum].
constexpr float safe_sum = 1e30f;
constexpr float safe_maximum = 60.0f;

inline float exp1(float x) { return exp(splat(x))[0]; }

// e^(z - top), as precise as T can show.
template <class T>
inline Vec exp_above(Vec z, float top) {
  if constexpr (std::is_same_v<T, float>) {
    return exp(z - top);
  } else {
    return exp2_coarse((z - top) * 1.44269504088896341f);
  }
}

// z = x * scale + bias, where bias (float32, -inf where masked) may be missing.
template <class T>
struct Scores {
  const T* x;
  const T* next;  // the row after this one, asked for ahead of time: half of it in each of the two scans
  const float* bias;
  float scale;
  template <class Lanes>
  Vec operator()(int64_t i, Lanes k) const {
    prefetch(next + (i >> 1));
    const Vec z = load(x + i, k) * scale;
    return bias ? z + load(bias + i, k) : z;
  }
};

// Whether the second of two half-row prefetches is due at vector u of four: one for each line of 64 bytes.
template <class T>
constexpr bool next_line(int u) {
  return u * W * int(sizeof(T)) / 2 % 64 == 0;
}

// e^z of a row into `terms`. Returns their sum, added up in pieces, since each addition to a sum that holds a
// dominating term loses half a unit of that term.
template <class T, bool biased>
inline float scan_fast(const Scores<T> z, int64_t n, float* const terms) {
  constexpr bool exact = std::is_same_v<T, float>;
  constexpr float unit = exact ? 1.0f : 1.44269504088896341f;  // rounded results are good enough in powers of two
  const float factor = z.scale * unit;
  Vec total{};
  for (int64_t first = 0; first < n; first += piece) {
    Vec part[4] = {};
    for_lanes_unrolled<4>(std::min<int64_t>(piece, n - first), [&](int64_t at, int u, auto k) {
      const int64_t i = first + at;
      if (next_line<T>(u)) prefetch(z.next + (i >> 1));
      Vec v = load(z.x + i, k) * factor;
      if constexpr (biased) v = fma(load(z.bias + i, k), unit, v);
      v = keep(v, k, -infinity);
      const Vec e = exact ? exp(v) : exp2_coarse(v);
      part[u] += e;
      store(terms + i, e);
    });
    total += (part[0] + part[1]) + (part[2] + part[3]);
  }
  return float(reduce_add(to_double(total)));
}

// The same, against a running maximum, which `tops` records per block of the row; when it grows, the sum so far is
// scaled down. Lanes add up apart and are merged at the end.
template <class T>
inline float scan_stable(Scores<T> z, int64_t n, float* terms, float* tops, float& sum) {
  float top = lowest;  // not -inf: -inf - -inf is NaN, while -inf - lowest is -inf as it should be
  Vec total{};
  for (int64_t first = 0; first < n; first += block) {
    const int64_t size = std::min<int64_t>(block, n - first);
    Vec highest = splat(top);
    for_lanes(size, [&](int64_t i, auto k) {
      const Vec v = keep(z(first + i, k), k, -infinity);
      highest = max(highest, v);
      store(terms + first + i, v);
    });
    if (any(highest > top)) {
      const float higher = reduce_max(highest);
      total *= exp1(top - higher);
      top = higher;
    }
    *tops++ = top;
    Vec part[2] = {};
    for_lanes_unrolled<2>(size, [&](int64_t i, int u, auto) {
      const Vec e = exp_above<T>(load(terms + first + i), top);
      part[u] += e;
      store(terms + first + i, e);
    });
    total += part[0] + part[1];
  }
  sum = float(reduce_add(to_double(total)));
  return top;
}

// One row: y[0..n) from x[0..n), and zeros in y[n..length), which causality hides.
template <class T>
inline void row(Scores<T> z, int64_t n, int64_t length, bool masked, int64_t method, bool& try_fast, float* terms,
                float* tops, T* y, bool streaming) {
  float sum = 0, maximum = 0;
  bool subtracted = method == stable || (method == automatic && !try_fast);
  if (!subtracted) {
    sum = z.bias ? scan_fast<T, true>(z, n, terms) : scan_fast<T, false>(z, n, terms);
    try_fast = sum >= 1.0f && sum <= safe_sum;
    subtracted = method == automatic && !try_fast;
  }
  if (subtracted) {
    maximum = scan_stable(z, n, terms, tops, sum);
    try_fast = maximum >= 0 && maximum <= safe_maximum;  // the next row is probably like this one
  }

  // Every term is 0 only where every score is -inf: nothing to attend to gives zeros, or NaN where nobody masked.
  const T* const half = z.next + n / 2;
  float inverse = 1.0f / sum;
  if (sum == 0 && masked) inverse = 0;
  if (!subtracted) {
    for_lanes_unrolled<4>(n, [=](int64_t i, int u, auto k) {
      if (next_line<T>(u)) prefetch(half + (i >> 1));
      put(y + i, load(terms + i) * inverse, k, streaming);
    });
  } else {
    for (int64_t first = 0; first < n; first += block) {
      const float top = tops[first / block], factor = top == maximum ? inverse : exp1(top - maximum) * inverse;
      for_lanes(std::min<int64_t>(block, n - first), [=](int64_t i, auto k) {
        prefetch(half + ((first + i) >> 1));
        put(y + first + i, load(terms + first + i) * factor, k, streaming);
      });
    }
  }
  const Vec hidden = splat(sum == sum ? 0.0f : sum);
  for_lanes(length - n, [&](int64_t i, auto k) { store(y + n + i, hidden, k); });
}

// The mask of a row as float32 to add: 0 or -inf for a boolean one.
inline void unpack_mask(const View& mask, int64_t offset, int64_t n, float* bias) {
  const int64_t stride = mask.strides[2];
  if (mask.dtype == DType::boolean) {
    const bool* p = mask.as<bool>() + offset;
    for (int64_t i = 0; i < n; ++i) bias[i] = p[i * stride] ? 0.0f : -infinity;
    return;
  }
  with_float_type(mask.dtype, [&](auto* t) {
    const auto* p = mask.as<std::remove_pointer_t<decltype(t)>>() + offset;
    if (stride == 1) {
      for_lanes(n, [&](int64_t i, auto k) { store(bias + i, load(p + i, k), k); });
    } else {
      for (int64_t i = 0; i < n; ++i) bias[i] = to_float(p[i * stride]);
    }
  });
}

template <class T>
void forward(const View& x, const View& mask, float scale, bool causal, int64_t method, const View& y) {
  const int64_t L = x.sizes[1], S = x.sizes[2], rows = x.sizes[0] * L;
  const int64_t width = round_up(S, W);
  const bool past_cache = outlives_cache(rows * S * int64_t(sizeof(T)));
  parallel_for(rows, row_grain(S, task), [&](int64_t begin, int64_t end) {
    float* const terms = scratch(2 * width + width / block + 1);
    float* const bias = terms + width;  // then `tops`, one a block
    int64_t unpacked = -1;  // the mask row that `bias` holds: a mask that broadcasts is unpacked once
    bool try_fast = true;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t o = r / L, l = r % L;
      const int64_t n = causal ? std::clamp<int64_t>(l + S - L + 1, 0, S) : S;
      if (mask.defined()) {
        const int64_t offset = o * mask.strides[0] + l * mask.strides[1];
        if (offset != unpacked) unpack_mask(mask, offset, S, bias);
        unpacked = offset;
      }
      T* const out = y.as<T>() + o * y.strides[0] + l * y.strides[1];
      const T* const in = x.as<T>() + o * x.strides[0] + l * x.strides[1];
      const Scores<T> z{in, l + 1 < L ? in + x.strides[1] : in, mask.defined() ? bias : nullptr, scale};
      row(z, n, S, mask.defined() || causal, method, try_fast, terms, bias + width, out, past_cache && can_stream(out));
    }
    if (past_cache) stream_fence();
  });
}

// dx = scale * y * (dy - sum(dy * y))
template <class T>
void backward(const View& dy, const View& y, float scale, const View& dx) {
  const int64_t L = y.sizes[1], S = y.sizes[2], rows = y.sizes[0] * L;
  parallel_for(rows, row_grain(S, task), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const int64_t o = r / L, l = r % L;
      const T* gr = dy.as<T>() + o * dy.strides[0] + l * dy.strides[1];
      const T* yr = y.as<T>() + o * y.strides[0] + l * y.strides[1];
      T* xr = dx.as<T>() + o * dx.strides[0] + l * dx.strides[1];
      DVec total{};  // in double, as dy - sum may cancel
      for_lanes(S, [&](int64_t i, auto k) { total += to_double(load(gr + i, k)) * to_double(load(yr + i, k)); });
      const double sum = reduce_add(total);
      const float high = float(sum), low = float(sum - high);
      for_lanes(S, [&](int64_t i, auto k) {
        store(xr + i, (load(gr + i, k) - high - low) * load(yr + i, k) * scale, k);
      });
    }
  });
}

}  // namespace

void softmax(View x, View mask, double scale, bool causal, int64_t method, View y) {
  if (x.sizes[2] == 0) return;
  with_float_type(x.dtype, [&](auto* t) {
    forward<std::remove_pointer_t<decltype(t)>>(x, mask, float(scale), causal, method, y);
  });
}

void softmax_backward(View dy, View y, double scale, View dx) {
  with_float_type(y.dtype,
                  [&](auto* t) { backward<std::remove_pointer_t<decltype(t)>>(dy, y, float(scale), dx); });
}

}  // namespace opsmith
