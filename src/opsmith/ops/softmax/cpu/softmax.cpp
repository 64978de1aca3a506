// Softmax: one scan of the row finds maximum and sum together, a second, over scratch in cache, writes the result.
#include <cmath>
#include <limits>

#include "tables/exp_table.h"
#include "pair.h"

namespace opsmith {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float lowest = -std::numeric_limits<float>::max();
constexpr int64_t task = 8192;
constexpr int64_t alone = 24576;  // elements without a mask that one thread is done with before two are
constexpr int block = 8 * W;  // elements between two looks at the running maximum
constexpr int piece = 8 * block;  // elements summed before the sum is added to the row's
constexpr int ahead = 2048;  // bytes from what is read to what is asked for, into the next row at a row's end
constexpr int far_ahead = 8192;  // the same, into the second-level cache
constexpr int page = 4096;  // stores past the cache wait for a new page's address: looked up one ahead

enum Method : int64_t { automatic = 0, stable = 1, fast = 2 };

// Without subtraction, a row is safe if its sum shows that nothing overflowed and nothing was lost: up to safe_sum no
// term came near float's end, and with a sum of at least 1, terms too small for a float are as negligible as they are
// after subtracting the maximum. A narrow range alone would not do: 1000..1001 overflows, -1001..-1000 is lost. After a
// row that was subtracted, the next one is tried without if the maximum was in [0, safe_maximum].
constexpr float safe_sum = 1e30f;
constexpr float safe_maximum = 60.0f;

inline float exp1(float x) { return exp_by_table(splat(x))[0]; }

// Every term is 0 only where every score is -inf: nothing to attend to gives zeros, or NaN where nobody masked.
inline float inverse_of(float sum, bool masked) { return sum == 0 && masked ? 0.0f : 1.0f / sum; }

// e^(z - top), as precise as T can show.
template <class T>
inline Vec exp_above(Vec z, float top) {
  if constexpr (std::is_same_v<T, float>) {
    return exp_by_table(z - top);
  } else {
    return exp2_for<T>((z - top) * log2_e);
  }
}

// z = x * scale + bias in float32, which may be missing; or, `hiding`, z = -inf where bias is, whatever x holds there.
template <class T>
struct Scores {
  const T* x;
  const float* bias;
  bool hiding;
  float scale;
  template <class Lanes>
  Vec operator()(int64_t i, Lanes k) const {
    prefetch((const char*)(x + i) + ahead);
    const Vec z = load(x + i, k) * scale;
    if (!bias) return z;
    const Vec b = load(bias + i, k);
    return hiding ? select(b < 0.0f, b, z) : z + b;
  }
};

// A row whose terms stand in scratch, its result not yet written: that is done while the next row is read, so that
// memory is read and written all the time, and the arithmetic of one row hides behind the traffic of the other.
template <class T>
struct Unwritten {
  T* y = nullptr;
  int64_t n = 0, hidden = 0;  // terms, and how many more results there are, all hidden
  float inverse = 0;  // of the sum
  bool biased = false, streaming = false;
};

// The result of a row from 2 W of its terms, which are in the order of pairs unless a bias, that is not, met them.
template <class T, bool biased>
inline void put_terms(const Unwritten<T> done, int64_t i, const float* const terms) {
  const Pair y = load(terms + i, Both{}) * done.inverse;
  if constexpr (biased) {
    put_in_order(done.y + i, y, done.streaming);
  } else {
    put(done.y + i, y, Both{}, done.streaming);
  }
}

// Writes `done`'s result from `terms`, and e^z of a row in its place. Returns the sum of these, added up in pieces,
// since each addition to a sum that holds a dominating term loses half a unit of that term.
template <class T, bool writing, bool biased>
inline __attribute__((always_inline)) float scan_fast(const Scores<T> z, int64_t n, float* const terms,
                                                      const Unwritten<T> done) {
  constexpr bool exact = std::is_same_v<T, float>;
  constexpr float unit = exact ? 1.0f : log2_e;  // rounded results are good enough in powers of two
  const float factor = z.scale * unit;
  auto power = [](Vec v) { return exact ? exp_by_table(v) : exp2_for<T>(v); };
  auto with_bias = [&](Vec v, Vec b) { return z.hiding ? select(b < 0.0f, b, v) : fma(b, unit, v); };
  Vec total{};
  for (int64_t first = 0; first < n; first += piece) {
    if constexpr (writing) prefetch((const char*)(done.y + first) + page);
    Pair sums[2] = {};
    int64_t i = first;
    const int64_t end = std::min(first + piece, n);
    constexpr int64_t step = 4 * W;
    for (; i + step <= end; i += step) {
      for (size_t line = 0; line < step * sizeof(T); line += 64)
        prefetch_far((const char*)(z.x + i) + line + far_ahead);
      if constexpr (writing) {
        for (int64_t j = i; j < i + step; j += 2 * W) put_terms<T, biased>(done, j, terms);
      }
      for (int u = 0; u < 2; ++u) {
        const int64_t j = i + u * 2 * W;
        Pair v;
        if constexpr (biased) {
          v = {with_bias(load(z.x + j) * factor, load(z.bias + j)),
               with_bias(load(z.x + j + W) * factor, load(z.bias + j + W))};
        } else {
          v = load(z.x + j, Both{}) * factor;
        }
        const Pair e{power(v.a), power(v.b)};
        sums[u] = sums[u] + e;
        store(terms + j, e, Both{});
      }
    }
    for_lanes(end - i, [&](int64_t at, auto k) {
      const int64_t j = i + at;
      if constexpr (writing) store(done.y + j, load(terms + j) * done.inverse, k);
      Vec v = load(z.x + j, k) * factor;
      if constexpr (biased) v = with_bias(v, load(z.bias + j, k));
      const Vec e = power(keep(v, k, -infinity));
      sums[0].a += e;
      store(terms + j, e);
    });
    total += (sums[0].a + sums[0].b) + (sums[1].a + sums[1].b);
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

// What is hidden at a row's end: zeros, or NaN as all of its row; in whole lines, past the cache where asked to.
template <class T>
inline void hide(T* y, int64_t n, float inverse, bool streaming) {
  if (n == 0) return;
  const Vec value = splat(inverse == inverse ? 0.0f : inverse);
  constexpr int64_t line = 64 / sizeof(T);
  int64_t i = streaming ? std::min<int64_t>(n, -(reinterpret_cast<uintptr_t>(y) / sizeof(T)) % line) : 0;
  for_lanes(i, [&](int64_t at, auto k) { store(y + at, value, k); });
  for (; i + 2 * W <= n; i += 2 * W) put_in_order(y + i, {value, value}, streaming);
  for_lanes(n - i, [&](int64_t at, auto k) { store(y + i + at, value, k); });
}

template <class T, bool biased>
inline void write_terms(const Unwritten<T> done, const float* const terms) {
  const int64_t paired = done.n / (4 * W) * (4 * W);  // as scan_fast has left them
  for (int64_t i = 0; i < paired; i += 2 * W) put_terms<T, biased>(done, i, terms);
  for_lanes(done.n - paired, [&](int64_t at, auto k) {
    store(done.y + paired + at, load(terms + paired + at) * done.inverse, k);
  });
}

template <class T>
inline void write(Unwritten<T>& last, const float* terms) {
  if (!last.y) return;
  last.biased ? write_terms<T, true>(last, terms) : write_terms<T, false>(last, terms);
  hide(last.y + last.n, last.hidden, last.inverse, last.streaming);
  last.y = nullptr;
}

// A row with its maximum subtracted. Returns the maximum.
template <class T>
inline float row_stable(Scores<T> z, int64_t n, bool masked, float* terms, float* tops, T* y, bool streaming,
                        float& sum) {
  const float maximum = scan_stable(z, n, terms, tops, sum);
  const float inverse = inverse_of(sum, masked);
  for (int64_t first = 0; first < n; first += block) {
    const float top = tops[first / block], factor = top == maximum ? inverse : exp1(top - maximum) * inverse;
    for_lanes(std::min<int64_t>(block, n - first),
              [=](int64_t i, auto k) { put(y + first + i, load(terms + first + i) * factor, k, streaming); });
  }
  return maximum;
}

// What a mask says of a row.
struct Masked {
  int64_t n;  // elements to look at: all behind them are hidden
  bool biased;  // whether something is added to these, or hides some
};

// The mask of a row, written as float32 to add where there is something to add: -inf where a boolean one hides.
inline Masked unpack_mask(const View& mask, int64_t offset, int64_t n, float* bias) {
  const int64_t stride = mask.strides[2];
  if (mask.dtype == DType::boolean) {
    const bool* p = mask.as<bool>() + offset;
    const int64_t all = n;
    while (n > 0 && !p[(n - 1) * stride]) --n;  // as padding does
    n = std::min(all, round_up(n, 4 * W));  // whole lines: one that is written in two parts waits for memory
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) kept += p[i * stride];
    if (kept < n) {
      for (int64_t i = 0; i < n; ++i) bias[i] = p[i * stride] ? 0.0f : -infinity;
    }
    return {n, kept < n};
  }
  with_float_type(mask.dtype, [&]<class T>(T*) {
    const T* p = mask.as<T>() + offset;
    if (stride == 1) {
      for_lanes(n, [&](int64_t i, auto k) { store(bias + i, load(p + i, k), k); });
    } else {
      for (int64_t i = 0; i < n; ++i) bias[i] = to_float(p[i * stride]);
    }
  });
  return {n, true};
}

// Rows one after the other.
template <class T>
struct Forward {
  View x, y;
  float scale;
  bool causal, may_hide, past_cache;
  int64_t method;
  float *terms, *tops;  // scratch: tops one a block
  bool try_fast = method != stable;
  Unwritten<T> last{};

  // Some rows under one row of a mask, which lets them look at n elements; `bias` is what it adds to or hides of these.
  template <bool biased>
  void rows(int64_t begin, int64_t end, int64_t most, const float* bias, bool hiding) {
    const int64_t L = x.sizes[1], S = x.sizes[2];
    if (last.biased != biased) write(last, terms);
    for (int64_t r = begin; r < end; ++r) {
      const int64_t o = r / L, l = r % L;
      const int64_t n = causal ? std::clamp<int64_t>(l + S - L + 1, 0, most) : most;
      T* const out = y.as<T>() + o * y.strides[0] + l * y.strides[1];
      const Scores<T> z{x.as<T>() + o * x.strides[0] + l * x.strides[1], bias, hiding, scale};
      const bool streaming = past_cache && can_stream_both(out);
      if (last.n != n || !try_fast) write(last, terms);
      float sum = 0;
      if (try_fast) {
        if (last.y) {
          sum = scan_fast<T, true, biased>(z, n, terms, last);
          hide(last.y + n, last.hidden, last.inverse, last.streaming);
          last.y = nullptr;
        } else {
          sum = scan_fast<T, false, biased>(z, n, terms, last);
        }
        try_fast = (sum >= 1.0f && sum <= safe_sum) || method == fast;
        if (try_fast) {
          last = {out, n, S - n, inverse_of(sum, may_hide), biased, streaming};
          continue;
        }
      }
      const float maximum = row_stable(z, n, may_hide, terms, tops, out, streaming, sum);
      hide(out + n, S - n, sum, streaming);
      // The next row is probably like this one.
      try_fast = method == automatic && maximum >= 0 && maximum <= safe_maximum;
    }
  }
};

// Rows per task.
int64_t grain_of(int64_t rows, int64_t n, bool masked) {
  return row_grain(n, !masked && rows * n <= alone ? alone : task);
}

template <class T>
void forward(const View& x, const View& mask, float scale, bool causal, int64_t method, const View& y) {
  const int64_t L = x.sizes[1], S = x.sizes[2], rows = x.sizes[0] * L;
  const int64_t width = round_up(S, W);
  const bool past_cache = outlives_cache(rows * S * int64_t(sizeof(T)));
  parallel_rows(rows, grain_of(rows, S, mask.defined()), [&](int64_t begin, int64_t end) {
    float* const terms = scratch(2 * width + width / block + 1);
    float* const bias = terms + width;
    Forward<T> some{x, y, scale, causal, mask.defined() || causal, past_cache, method, terms, bias + width};
    auto offset = [&](int64_t r) { return r / L * mask.strides[0] + r % L * mask.strides[1]; };
    for (int64_t r = begin, next = end; r < end; r = next, next = end) {
      Masked masked{S, false};
      if (mask.defined()) {  // one that broadcasts is unpacked once
        for (next = r + 1; next < end && offset(next) == offset(r);) ++next;
        masked = unpack_mask(mask, offset(r), S, bias);
      }
      if (masked.biased) {
        some.template rows<true>(r, next, masked.n, bias, mask.dtype == DType::boolean);
      } else {
        some.template rows<false>(r, next, masked.n, nullptr, false);
      }
    }
    write(some.last, terms);
    if (past_cache) stream_fence();
  });
}

// A row of the gradient: dx = scale * y * (dy - sum(dy * y)).
template <class T>
struct Gradient {
  const T* dy = nullptr;
  const T* y = nullptr;
  T* dx = nullptr;
  bool streaming = false;
  float scale = 1, high = 0, low = 0;  // the sum is high + low, as dy - sum may cancel
  Vec operator()(Vec g, Vec p) const { return (g - high - low) * p * scale; }
};

// Writes row `done`, which is in cache, and finds the sum of row `next`, which is in memory, as scan_fast does.
template <class T, bool writing>
inline double dot_and_write(const Gradient<T> next, int64_t n, const Gradient<T> done) {
  constexpr int64_t step = 4 * W, piece = 8 * step;  // a few products in float, then their sum in double
  DVec total{};
  for (int64_t first = 0; first < n; first += piece) {
    if constexpr (writing) prefetch((const char*)(done.dx + first) + page);
    Pair sums[2] = {};
    int64_t i = first;
    const int64_t end = std::min(first + piece, n);
    for (; i + step <= end; i += step) {
      for (size_t line = 0; line < step * sizeof(T); line += 64) {
        prefetch_far((const char*)(next.dy + i) + line + far_ahead);
        prefetch_far((const char*)(next.y + i) + line + far_ahead);
        // While the first row is read nothing is written yet, so its dx can come in beside it.
        if constexpr (!writing) prefetch_far((const char*)(next.dx + i) + line + far_ahead);
      }
      for (int u = 0; u < 2; ++u) {
        const int64_t j = i + u * 2 * W;
        if constexpr (writing) {
          const Pair g = load(done.dy + j, Both{}), p = load(done.y + j, Both{});
          put(done.dx + j, {done(g.a, p.a), done(g.b, p.b)}, Both{}, done.streaming);
        }
        sums[u] = fma(load(next.dy + j, Both{}), load(next.y + j, Both{}), sums[u]);
      }
    }
    for_lanes(end - i, [&](int64_t at, auto k) {
      const int64_t j = i + at;
      if constexpr (writing) store(done.dx + j, done(load(done.dy + j, k), load(done.y + j, k)), k);
      total += to_double(load(next.dy + j, k)) * to_double(load(next.y + j, k));
    });
    total += (to_double(sums[0].a) + to_double(sums[0].b)) + (to_double(sums[1].a) + to_double(sums[1].b));
  }
  return reduce_add(total);
}

template <class T>
void backward(const View& dy, const View& y, float scale, const View& dx) {
  const int64_t L = y.sizes[1], S = y.sizes[2], rows = y.sizes[0] * L;
  const bool past_cache = outlives_cache(rows * S * int64_t(sizeof(T)), 3);
  parallel_rows(rows, grain_of(rows, S, false), [&](int64_t begin, int64_t end) {
    Gradient<T> last;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t o = r / L, l = r % L;
      Gradient<T> row{dy.as<T>() + o * dy.strides[0] + l * dy.strides[1],
                      y.as<T>() + o * y.strides[0] + l * y.strides[1],
                      dx.as<T>() + o * dx.strides[0] + l * dx.strides[1]};
      row.streaming = past_cache && can_stream_both(row.dx);
      const double sum = last.dx ? dot_and_write<T, true>(row, S, last)
                                 : dot_and_write<T, false>(row, S, last);
      row.scale = scale;
      row.high = float(sum);
      row.low = float(sum - row.high);
      last = row;
    }
    for_lanes(S, [&](int64_t i, auto k) {
      store(last.dx + i, last(load(last.dy + i, k), load(last.y + i, k)), k);
    });
    if (past_cache) stream_fence();
  });
}

}  // namespace

void softmax(View x, View mask, double scale, bool causal, int64_t method, View y) {
  if (x.sizes[2] == 0) return;
  with_float_type(x.dtype, [&]<class T>(T*) { forward<T>(x, mask, float(scale), causal, method, y); });
}

void softmax_backward(View dy, View y, double scale, View dx) {
  with_float_type(y.dtype, [&]<class T>(T*) { backward<T>(dy, y, float(scale), dx); });
}

}  // namespace opsmith
