// What kernels made from a formula are written in: functions of lanes, and rows of tensors that broadcast. A value is a float (one for a row), a Vec or a Pair; every function takes all three.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "curves.h"
#include "rope_row.h"
#include "schedules/column_sums.h"
#include "schedules/element_walk.h"
#include "schedules/row_statistics.h"

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
    return larger(vec(x), vec(y));
  }
}
template <class A, class B>
inline auto smaller(A x, B y) {
  if constexpr (with_pair<A, B>) {
    return Pair{smaller(pair(x).a, pair(y).a), smaller(pair(x).b, pair(y).b)};
  } else if constexpr (std::is_same_v<A, float> && std::is_same_v<B, float>) {
    return x < y || x != x ? x : y;
  } else {
    return smaller(vec(x), vec(y));
  }
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

// A function of vectors, as one of vectors, pairs and floats.
template <class F>
struct OfLanes {
  F f;
  template <class V>
  V operator()(V x) const {
    return apply(x, f);
  }
};
template <class F>
OfLanes(F) -> OfLanes<F>;

// P is the type that the result is rounded to.
template <class P>
constexpr OfLanes exp_of{[](Vec x) { return exp_for<P>(x); }};
template <class P>
constexpr OfLanes log_of{[](Vec x) { return log(x); }};
template <class P>
constexpr OfLanes sqrt_of{[](Vec x) { return sqrt(x); }};
template <class P>
constexpr OfLanes rsqrt_of{[](Vec x) { return 1.0f / sqrt(x); }};
template <class P>
constexpr OfLanes tanh_of{[](Vec x) {  // near 0 the series, which has x itself and a small rest
  const Vec t = x * x;
  Vec p = fma(t, -0.00886323553f, 0.0218694885f);
  p = fma(p, t, -0.0539682540f);
  p = fma(p, t, 0.133333333f);
  p = fma(p, t, -0.333333333f);
  const Vec small = fma(x * t, p, x);
  if constexpr (!std::is_same_v<P, float>) return select(abs(x) < 0.25f, small, tanh(x));
  // A slope is 1 - tanh^2, of which a few units are many.
  const Vec e = exp_for<P>(2.0f * max(-10.0f, min(10.0f, x)));
  return select(abs(x) < 0.25f, small, (e - 1.0f) / (e + 1.0f));
}};
template <class P>
constexpr OfLanes erf_of{[](Vec x) { return erf(x); }};
template <class P>
constexpr OfLanes abs_of{[](Vec x) { return abs(x); }};
template <class P>
constexpr OfLanes relu_of{[](Vec x) { return max(0.0f, x); }};
template <class P>
constexpr OfLanes sigmoid_of{[](Vec x) { return reciprocal_for<P>(1.0f + exp_for<P>(-x)); }};
template <class P>
constexpr OfLanes silu_of{[](Vec x) { return Silu<P>::value(x); }};
template <class P>
constexpr OfLanes gelu_of{[](Vec x) { return Gelu<P>::value(x); }};
template <class P>
constexpr OfLanes gelu_tanh_of{[](Vec x) { return GeluTanh<P>::value(x); }};
template <class P>
constexpr OfLanes silu_slope_of{[](Vec x) { return Silu<P>::both(x).slope; }};
template <class P>
constexpr OfLanes gelu_slope_of{[](Vec x) { return Gelu<P>::both(x).slope; }};
template <class P>
constexpr OfLanes gelu_tanh_slope_of{[](Vec x) { return GeluTanh<P>::both(x).slope; }};
template <class T>
constexpr OfLanes cast_to{[](Vec x) { return round_to<T>(x); }};

// The type that shows the most: float where one of them is.
template <class... T>
using Finest = std::conditional_t<(std::is_same_v<T, float> || ...), float,
                                  std::conditional_t<(std::is_same_v<T, float16> || ...), float16, bfloat16>>;

inline IVec truth(const bool* p, Full) { return load(reinterpret_cast<const int8_t*>(p), Full{}) != 0.0f; }
inline IVec truth(const bool* p, Part k) { return load(reinterpret_cast<const int8_t*>(p), k) != 0.0f; }

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

// To the sums of a column.
template <class V, class Lanes>
inline void add_to(float* p, V v, Lanes lanes) {
  store(p, load(p, lanes) + v, lanes);
}

inline int64_t rows_of(const View& v) { return sizes_between(v, 2, v.dim); }
inline int64_t size_of(const View& v) { return v.sizes[v.dim - 1]; }

}  // namespace opsmith
