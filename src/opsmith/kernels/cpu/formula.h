// What kernels made from a formula are written in: functions of lanes, reductions along a row, and rows of tensors that
// broadcast. A value is a float (one for a row), a Vec or a Pair; every function takes all three.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "elementwise.h"
#include "rope_row.h"

namespace opsmith {

struct Masks {  // of a pair
  IVec a, b;
};

inline Pair pair(Pair x) { return x; }
inline Pair pair(float x) { return {splat(x), splat(x)}; }
inline Vec vec(Vec x) { return x; }
inline Vec vec(float x) { return splat(x); }

// What a whole row has, in every lane.
inline Pair lanes_of(float x, Both) { return pair(x); }
template <class Lanes>
inline Vec lanes_of(float x, Lanes) {
  return splat(x);
}

inline Pair operator-(Pair x) { return {-x.a, -x.b}; }
inline Pair operator/(Pair x, Pair y) { return {x.a / y.a, x.b / y.b}; }
inline Pair operator/(Pair x, float y) { return {x.a / y, x.b / y}; }
inline Pair operator+(Pair x, float y) { return {x.a + y, x.b + y}; }
inline Pair operator+(float x, Pair y) { return {x + y.a, x + y.b}; }
inline Pair operator-(float x, Pair y) { return {x - y.a, x - y.b}; }
inline Pair operator*(float x, Pair y) { return {x * y.a, x * y.b}; }
inline Pair operator/(float x, Pair y) { return {x / y.a, x / y.b}; }

template <class A, class B>
constexpr bool with_pair = std::is_same_v<A, Pair> || std::is_same_v<B, Pair>;
template <class A, class B>
using IfPair = std::enable_if_t<with_pair<A, B>, Masks>;
template <class A, class B, class F>
inline Masks compare(A x, B y, F&& f) {
  const Pair p = pair(x), q = pair(y);
  return {f(p.a, q.a), f(p.b, q.b)};
}
template <class A, class B>
inline IfPair<A, B> operator<(A x, B y) {
  return compare(x, y, [](Vec p, Vec q) { return p < q; });
}
template <class A, class B>
inline IfPair<A, B> operator<=(A x, B y) {
  return compare(x, y, [](Vec p, Vec q) { return p <= q; });
}
template <class A, class B>
inline IfPair<A, B> operator>(A x, B y) {
  return compare(x, y, [](Vec p, Vec q) { return p > q; });
}
template <class A, class B>
inline IfPair<A, B> operator>=(A x, B y) {
  return compare(x, y, [](Vec p, Vec q) { return p >= q; });
}
template <class A, class B>
inline IfPair<A, B> operator==(A x, B y) {
  return compare(x, y, [](Vec p, Vec q) { return p == q; });
}
template <class A, class B>
inline IfPair<A, B> operator!=(A x, B y) {
  return compare(x, y, [](Vec p, Vec q) { return p != q; });
}

template <class A, class B>
inline auto where(bool condition, A yes, B no) {
  if constexpr (with_pair<A, B>) {
    return condition ? pair(yes) : pair(no);
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) {
    return condition ? yes : no;
  } else {
    return condition ? vec(yes) : vec(no);
  }
}
template <class A, class B>
inline Vec where(IVec mask, A yes, B no) {
  return select(mask, vec(yes), vec(no));
}
template <class A, class B>
inline Pair where(Masks mask, A yes, B no) {
  return {select(mask.a, pair(yes).a, pair(no).a), select(mask.b, pair(yes).b, pair(no).b)};
}

// The larger and the smaller of two; a NaN in either stays, as in PyTorch.
template <class A, class B>
inline auto larger(A x, B y) {
  if constexpr (with_pair<A, B>) {
    return Pair{larger(pair(x).a, pair(y).a), larger(pair(x).b, pair(y).b)};
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) {
    return x > y || x != x ? x : y;
  } else {
    return select((vec(x) > vec(y)) | (vec(x) != vec(x)), vec(x), vec(y));
  }
}
template <class A, class B>
inline auto smaller(A x, B y) {
  if constexpr (with_pair<A, B>) {
    return Pair{smaller(pair(x).a, pair(y).a), smaller(pair(x).b, pair(y).b)};
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) {
    return x < y || x != x ? x : y;
  } else {
    return select((vec(x) < vec(y)) | (vec(x) != vec(x)), vec(x), vec(y));
  }
}

template <class F>
inline Vec apply(Vec x, F f) {
  return f(x);
}
template <class F>
inline Pair apply(Pair x, F f) {
  return {f(x.a), f(x.b)};
}
template <class F>
inline float apply(float x, F f) {
  return f(splat(x))[0];
}

// Natural logarithm, to a unit or so: x = m 2^e with m around 1, and log m = 2 artanh((m - 1) / (m + 1)).
inline Vec log(Vec x) {
  constexpr float least = std::numeric_limits<float>::min(),
                  infinity = std::numeric_limits<float>::infinity();
  const IVec tiny = x < least;
  const Vec scaled = select(tiny, x * 8388608.0f, x);  // subnormals; zero and less are seen to below
  const IVec bits = as_int(scaled) - 0x3f3504f3;  // sqrt(1/2)
  const Vec exponent = __builtin_convertvector(bits >> 23, Vec) - select(tiny, splat(23.0f), Vec{});
  const Vec m = as_float((bits & 0x7fffff) + 0x3f3504f3);
  const Vec s = (m - 1.0f) / (m + 1.0f), t = s * s;
  Vec p = fma(t, 0.181818182f, 0.222222222f);
  p = fma(p, t, 0.285714286f);
  p = fma(p, t, 0.4f);
  p = fma(p, t, 0.666666667f);
  const Vec of_m = fma(s * t, p, 2.0f * s);
  const Vec y = fma(exponent, 0.693359375f, fma(exponent, -2.12194440e-4f, of_m));
  const Vec ends = select(x == 0.0f, splat(-infinity), splat(std::numeric_limits<float>::quiet_NaN()));
  return select(x > 0.0f, select(x < infinity, y, x), ends);
}

template <class P, class V>
inline V exp_of(V x) {
  return apply(x, [](Vec v) { return exp_for<P>(v); });
}
template <class P, class V>
inline V log_of(V x) {
  return apply(x, [](Vec v) { return log(v); });
}
template <class P, class V>
inline V sqrt_of(V x) {
  return apply(x, [](Vec v) { return sqrt(v); });
}
template <class P, class V>
inline V rsqrt_of(V x) {
  return apply(x, [](Vec v) { return 1.0f / sqrt(v); });
}
template <class P, class V>
inline V tanh_of(V x) {
  return apply(x, [](Vec v) {  // near 0 the series, which has x itself and a small rest
    const Vec t = v * v;
    Vec p = fma(t, -0.00886323553f, 0.0218694885f);
    p = fma(p, t, -0.0539682540f);
    p = fma(p, t, 0.133333333f);
    p = fma(p, t, -0.333333333f);
    return select(abs(v) < 0.25f, fma(v * t, p, v), tanh(v));
  });
}
template <class P, class V>
inline V erf_of(V x) {
  return apply(x, [](Vec v) { return erf(v); });
}
template <class P, class V>
inline V abs_of(V x) {
  return apply(x, [](Vec v) { return abs(v); });
}
template <class P, class V>
inline V relu_of(V x) {
  return apply(x, [](Vec v) { return max(0.0f, v); });
}
template <class P, class V>
inline V sigmoid_of(V x) {
  return apply(x, [](Vec v) { return reciprocal_for<P>(1.0f + exp_for<P>(-v)); });
}
template <class P, class V>
inline V silu_of(V x) {
  return apply(x, [](Vec v) { return Silu<P>::value(v); });
}
template <class P, class V>
inline V gelu_of(V x) {
  return apply(x, [](Vec v) { return Gelu<P>::value(v); });
}
template <class P, class V>
inline V gelu_tanh_of(V x) {
  return apply(x, [](Vec v) { return GeluTanh<P>::value(v); });
}
template <class P, class V>
inline V silu_slope_of(V x) {
  return apply(x, [](Vec v) { return Silu<P>::both(v).slope; });
}
template <class P, class V>
inline V gelu_slope_of(V x) {
  return apply(x, [](Vec v) { return Gelu<P>::both(v).slope; });
}
template <class P, class V>
inline V gelu_tanh_slope_of(V x) {
  return apply(x, [](Vec v) { return GeluTanh<P>::both(v).slope; });
}
// What a value is after it was rounded to T.
template <class T, class V>
inline V cast_to(V x) {
  return apply(x, [](Vec v) { return round_to<T>(v); });
}

// The type that shows the most: float where one of them is.
template <class... T>
using Finest = std::conditional_t<(std::is_same_v<T, float> || ...), float,
                                  std::conditional_t<(std::is_same_v<T, float16> || ...), float16, bfloat16>>;

inline IVec truth(const bool* p, Full) { return load(reinterpret_cast<const int8_t*>(p), Full{}) != 0.0f; }
inline IVec truth(const bool* p, Part k) { return load(reinterpret_cast<const int8_t*>(p), k) != 0.0f; }

// A row pair by pair where all tensors have one type, else vector by vector: pairs of other types have another order.
template <bool pairs, class F>
inline __attribute__((always_inline)) void along(int64_t size, F&& f) {
  if constexpr (pairs) {
    for_pairs(size, f);
  } else {
    for_lanes(size, f);
  }
}

// Loads what is read once, and asks for what comes next.
template <class T, class Lanes>
inline auto read(const T* p, Lanes lanes) {
  prefetch_ahead(p, lanes);
  return load(p, lanes);
}

template <class T, class Lanes>
inline void read_pairs(const T* p, Lanes lanes, Vec& even, Vec& odd) {
  for (size_t line = 0; line < 2 * W * sizeof(T); line += 64)
    prefetch(reinterpret_cast<const char*>(p) + line + 2048);
  load_pairs(p, lanes, even, odd);
}

// Writes at element `at` of a row, past the cache where asked to.
template <class T, class V, class Lanes>
inline void write(T* row, int64_t at, V v, Lanes lanes, bool streaming) {
  look_ahead(row, at);
  put(row + at, v, lanes, streaming);
}

// Sums over rows are written in the order of memory, by one thread each.
inline void add_to(float* p, Vec v, Full) { store(p, load(p, Full{}) + v, Full{}); }
inline void add_to(float* p, Vec v, Part k) { store(p, load(p, k) + v, k); }

// The product of the sizes of a view's dimensions, counted from the right: `first` ... `last`, the last axis being 1.
inline int64_t sizes_between(const View& v, int64_t first, int64_t last) {
  int64_t product = 1;
  for (int64_t d = first; d <= last && d <= v.dim; ++d) product *= v.sizes[v.dim - d];
  return product;
}
inline int64_t rows_of(const View& v) { return sizes_between(v, 2, v.dim); }
inline int64_t size_of(const View& v) { return v.sizes[v.dim - 1]; }

constexpr int64_t kRowTask = 16384;  // elements that are worth a thread's wake-up
constexpr int64_t kPiece = 1024;  // elements at a time, where rows do not matter

// Sums over the rows of each task, added up at the end: the result does not depend on which thread was faster. A few rows
// are summed by themselves first, so that errors grow with the root of the rows at most.
class ColumnSums {
 public:
  ColumnSums(int64_t tasks, int64_t size) : tasks_(tasks), size_(size), sums_(size_t(2 * tasks * size)) {}
  float* of(int64_t task) { return sums_.data() + 2 * task * size_; }
  void settle(int64_t task, int64_t row) {
    if (tasks_ > 0 && row % 8 == 7) settle(task);
  }
  template <class T>
  void write(T* p) {
    for (int64_t task = 0; task < tasks_; ++task) settle(task);
    float* const total = of(0) + size_;
    for (int64_t task = 1; task < tasks_; ++task) {
      for_lanes(size_, [&](int64_t at, auto lanes) {
        add_to(total + at, load(of(task) + size_ + at, lanes), lanes);
      });
    }
    for_lanes(size_, [&](int64_t at, auto lanes) { store(p + at, load(total + at, lanes), lanes); });
  }

 private:
  void settle(int64_t task) {
    float *const recent = of(task), *const total = recent + size_;
    for_lanes(size_, [=](int64_t at, auto lanes) {
      add_to(total + at, load(recent + at, lanes), lanes);
      store(recent + at, Vec{}, lanes);
    });
  }

  int64_t tasks_, size_;
  std::vector<float> sums_;  // of a task: of the last few rows, of all before
};
inline int64_t column_tasks(int64_t rows, int64_t size) {
  return std::max<int64_t>(1, std::min(num_threads(), rows / row_grain(size, kRowTask)));
}

struct Sum {
  Pair sum{};
  void add(Pair v, Both) { sum = sum + v; }
  void add(Vec v, Full) { sum.a += v; }
  void add(Vec v, Part k) { sum.b += keep(v, k, 0.0f); }
  float value() const { return reduce_add(sum.a + sum.b); }
};

template <bool greatest>
struct Extreme {
  static constexpr float worst = greatest ? -std::numeric_limits<float>::infinity()
                                          : std::numeric_limits<float>::infinity();
  Pair best = pair(worst);
  static Vec better(Vec x, Vec y) {
    if constexpr (greatest) return larger(x, y);
    return smaller(x, y);
  }
  void add(Pair v, Both) { best = {better(best.a, v.a), better(best.b, v.b)}; }
  void add(Vec v, Full) { best.a = better(best.a, v); }
  void add(Vec v, Part k) { best.b = better(best.b, keep(v, k, worst)); }
  float value() const {
    const Vec v = better(best.a, best.b);
    if (any(v != v)) return std::numeric_limits<float>::quiet_NaN();
    return greatest ? reduce_max(v) : reduce_min(v);
  }
};
using Max = Extreme<true>;
using Min = Extreme<false>;

// Mean and variance in one pass: Welford's update in every lane, lanes merged by Chan's formula.
class Moments {
 public:
  void add(Pair v, Both) {
    const float rate = 1.0f / float(++count_.both);
    step(mean_.a, m2_.a, v.a, rate);
    step(mean_.b, m2_.b, v.b, rate);
  }
  void add(Vec v, Full) {
    const float rate = 1.0f / float(++count_.full);
    step(single_, m2_single_, v, rate);
  }
  void add(Vec v, Part k) { merge_part(v, k); }

  float mean() const { return whole().mean; }
  float variance() const {
    const Group g = whole();
    return g.m2 / float(g.count);
  }

 private:
  struct Group {
    int64_t count = 0;
    float mean = 0, m2 = 0;
    void merge(const Group& g) {
      if (g.count == 0) return;
      const float share = float(g.count) / float(count + g.count), delta = g.mean - mean;
      mean += delta * share;
      m2 += g.m2 + delta * delta * share * float(count);
      count += g.count;
    }
  };
  static void step(Vec& mean, Vec& m2, Vec v, float rate) {
    const Vec delta = v - mean;
    mean = fma(delta, rate, mean);
    m2 = fma(delta, v - mean, m2);
  }
  static Group group(int64_t count, Vec mean, Vec m2) {  // of W lanes with the same count
    if (count == 0) return {};
    const float center = reduce_add(mean) * (1.0f / W);
    const Vec off = mean - center;
    const float rest = reduce_add(off) * (1.0f / W);
    return {count * W, center + rest,
            reduce_add(m2 + off * off * float(count)) - rest * rest * float(count * W)};
  }
  void merge_part(Vec v, Part k) {
    const float mean = reduce_add(keep(v, k, 0.0f)) / float(k.count);
    const Vec off = keep(v - mean, k, 0.0f);
    rest_.merge({k.count, mean, reduce_add(off * off)});
  }
  Group whole() const {
    Group g = group(count_.both, mean_.a, m2_.a);
    g.merge(group(count_.both, mean_.b, m2_.b));
    g.merge(group(count_.full, single_, m2_single_));
    g.merge(rest_);
    return g;
  }

  struct {
    int64_t both = 0, full = 0;
  } count_;
  Pair mean_{}, m2_{};
  Vec single_{}, m2_single_{};
  Group rest_;
};

// The maximum, and the sum of e^(x - maximum), in one pass: the sum is scaled down where a larger element turns up.
template <class P>
class Online {
 public:
  void add(Pair v, Both) {
    step(top_.a, sum_.a, v.a);
    step(top_.b, sum_.b, v.b);
  }
  void add(Vec v, Full) { step(top_.a, sum_.a, v); }
  void add(Vec v, Part k) { step(top_.b, sum_.b, keep(v, k, least)); }

  float max() const {
    const Vec v = larger(top_.a, top_.b);
    return any(v != v) ? std::numeric_limits<float>::quiet_NaN() : reduce_max(v);
  }
  float sum() const {
    const float top = max();
    if (top == least) return std::numeric_limits<float>::quiet_NaN();  // as infinity - infinity is
    return reduce_add(sum_.a * scale(top_.a, splat(top)) + sum_.b * scale(top_.b, splat(top)));
  }

 private:
  static constexpr float least = -std::numeric_limits<float>::infinity();
  // e^(x - top), and 0 where x is -infinity, whatever top is.
  static Vec scale(Vec x, Vec top) { return select(x == least, Vec{}, exp_for<P>(x - top)); }
  static void step(Vec& top, Vec& sum, Vec v) {
    if (any(v > top)) {
      const Vec higher = max_of(top, v);
      sum *= scale(top, higher);
      top = higher;
    }
    sum += scale(v, top);
  }
  static Vec max_of(Vec top, Vec v) { return select(v > top, v, top); }

  Pair top_ = pair(least), sum_{};
};

}  // namespace opsmith
