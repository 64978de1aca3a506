// One vector of float lanes, whatever the instruction set: 16 lanes on AVX-512, 8 on AVX2, 4 on NEON and elsewhere.
//
// `Vec` is a GCC/Clang vector type, so + - * / and comparisons are the language's own, and a scalar broadcasts.
// Memory may hold float, bfloat16 or float16: load and store convert; load also takes int8. Every access names its lanes, `Full` or
// `Part`, and `for_lanes` hands them out, so that a loop's body and tail are one piece of code.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "types.h"

namespace opsmith {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define OPSMITH_AVX512 1
constexpr int W = 16, kRoundings = 1;  // of a multiplication with an addition, `fma`
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define OPSMITH_AVX2 1
constexpr int W = 8, kRoundings = 1;
#elif defined(__aarch64__)
#define OPSMITH_NEON 1
constexpr int W = 4, kRoundings = 1;
#else
constexpr int W = 4, kRoundings = 2;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef double DVec __attribute__((vector_size(8 * W)));  // for sums that float would spoil
typedef int32_t IVec __attribute__((vector_size(4 * W)));  // what comparing two Vecs gives, too: 0 or -1

inline Vec splat(float x) { return x - Vec{}; }  // 0 would turn -0 into +0 with `+`
inline Vec as_float(IVec v) { return (Vec)v; }
inline IVec as_int(Vec v) { return (IVec)v; }
inline DVec to_double(Vec v) { return __builtin_convertvector(v, DVec); }

struct Full {
  static constexpr int count = W;
};

struct Part {  // the first `count` lanes, 0 < count < W
  int count;
};

template <class F>
inline __attribute__((always_inline)) void for_lanes(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + W <= n; i += W) f(i, Full{});
  if (i < n) f(i, Part{int(n - i)});
}

// The same with an accumulator number 0..U-1 that changes from one step to the next: breaks dependency chains.
template <int U, class F>
inline __attribute__((always_inline)) void for_lanes_unrolled(int64_t n, F&& f) {
  int64_t i = 0;
  for (; i + U * W <= n; i += U * W) {
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) f(i + u * W, u, Full{});
  }
  int u = 0;
  for (; i + W <= n; i += W, u = (u + 1) % U) f(i, u, Full{});
  if (i < n) f(i, u, Part{int(n - i)});
}

// The lanes of two vectors that have these numbers, b's behind a's.
template <int... from>
inline Vec shuffle(Vec a, Vec b, std::integer_sequence<int, from...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, from...);
#else
  return __builtin_shuffle(a, b, IVec{from...});
#endif
}

// The lanes of v, each an E, as one: halves folded onto each other, so that the order is that of a tree.
template <class E, class V, class Op>
inline E reduce(const V& v, Op op) {
  E lane[W];
  std::memcpy(lane, &v, sizeof v);
  for (int h = W / 2; h > 0; h /= 2) {
    for (int i = 0; i < h; ++i) lane[i] = op(lane[i], lane[i + h]);
  }
  return lane[0];
}

// v rounded to bfloat16, in the upper halves of its lanes: to nearest, ties to even; a NaN stays one.
inline IVec round_to_upper_half(Vec v) {
  const IVec u = (IVec)v;
  return v != v ? u | 0x400000 : u + (0x7fff + ((u >> 16) & 1));
}

#if defined(OPSMITH_AVX512)

inline __mmask16 lane_mask(Part p) { return __mmask16((1u << p.count) - 1); }
inline Vec widen_bfloat16(__m256i h) { return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16); }
inline __m256i narrow_bfloat16(Vec v) {
#if defined(__AVX512BF16__)
  return (__m256i)_mm512_cvtneps_pbh(v);
#else
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)round_to_upper_half(v), 16));
#endif
}
constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
inline Vec widen_float16(__m256i h) { return _mm512_cvtph_ps(h); }
inline __m256i narrow_float16(Vec v) { return _mm512_cvtps_ph(v, nearest); }

inline Vec load(const float* p, Full) { return _mm512_loadu_ps(p); }
inline Vec load(const bfloat16* p, Full) { return widen_bfloat16(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load(const float16* p, Full) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Vec load(const float* p, Part k) { return _mm512_maskz_loadu_ps(lane_mask(k), p); }
inline Vec load(const bfloat16* p, Part k) {
  return widen_bfloat16(_mm256_maskz_loadu_epi16(lane_mask(k), p));
}
inline Vec load(const float16* p, Part k) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lane_mask(k), p));
}
inline Vec widen_int8(__m128i b) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); }
inline Vec load(const int8_t* p, Full) { return widen_int8(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load(const int8_t* p, Part k) { return widen_int8(_mm_maskz_loadu_epi8(lane_mask(k), p)); }

inline void store(float* p, Vec v, Full) { _mm512_storeu_ps(p, v); }
inline void store(bfloat16* p, Vec v, Full) { _mm256_storeu_si256((__m256i*)p, narrow_bfloat16(v)); }
inline void store(float16* p, Vec v, Full) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, nearest)); }
inline void store(float* p, Vec v, Part k) { _mm512_mask_storeu_ps(p, lane_mask(k), v); }
inline void store(bfloat16* p, Vec v, Part k) {
  _mm256_mask_storeu_epi16(p, lane_mask(k), narrow_bfloat16(v));
}
inline void store(float16* p, Vec v, Part k) {
  _mm256_mask_storeu_epi16(p, lane_mask(k), _mm512_cvtps_ph(v, nearest));
}

// Past the cache, for whole aligned vectors only (`can_stream`); end a row's worth of them with `stream_fence`.
inline void stream(float* p, Vec v) { _mm512_stream_ps(p, v); }
inline void stream(bfloat16* p, Vec v) { _mm256_stream_si256((__m256i*)p, narrow_bfloat16(v)); }
inline void stream(float16* p, Vec v) { _mm256_stream_si256((__m256i*)p, _mm512_cvtps_ph(v, nearest)); }
inline void stream_fence() { _mm_sfence(); }

inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
inline Vec abs(Vec a) { return _mm512_abs_ps(a); }
inline Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
inline float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
inline float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
inline float reduce_min(Vec v) { return _mm512_reduce_min_ps(v); }

#else

#if defined(OPSMITH_AVX2)

inline Vec widen_bfloat16(__m128i h) { return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16); }
inline __m128i narrow_bfloat16(Vec v) {
  const __m256i wide = _mm256_srli_epi32((__m256i)round_to_upper_half(v), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}
constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
inline Vec widen_float16(__m128i h) { return _mm256_cvtph_ps(h); }
inline __m128i narrow_float16(Vec v) { return _mm256_cvtps_ph(v, nearest); }

inline Vec load(const float* p, Full) { return _mm256_loadu_ps(p); }
inline Vec load(const bfloat16* p, Full) { return widen_bfloat16(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load(const float16* p, Full) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline Vec load(const int8_t* p, Full) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline void store(float* p, Vec v, Full) { _mm256_storeu_ps(p, v); }
inline void store(bfloat16* p, Vec v, Full) { _mm_storeu_si128((__m128i*)p, narrow_bfloat16(v)); }
inline void store(float16* p, Vec v, Full) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, nearest)); }

inline void stream(float* p, Vec v) { _mm256_stream_ps(p, v); }
inline void stream(bfloat16* p, Vec v) { _mm_stream_si128((__m128i*)p, narrow_bfloat16(v)); }
inline void stream(float16* p, Vec v) { _mm_stream_si128((__m128i*)p, _mm256_cvtps_ph(v, nearest)); }
inline void stream_fence() { _mm_sfence(); }

inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
inline Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }

#else

#if defined(OPSMITH_NEON)
inline Vec widen_bfloat16(uint16x4_t h) { return (Vec)vshll_n_u16(h, 16); }
inline uint16x4_t narrow_bfloat16(Vec v) { return vshrn_n_u32((uint32x4_t)round_to_upper_half(v), 16); }
inline Vec widen_float16(uint16x4_t h) { return vcvt_f32_f16((float16x4_t)h); }
inline uint16x4_t narrow_float16(Vec v) { return (uint16x4_t)vcvt_f16_f32(v); }
inline int16x8_t widen_four_bytes(const int8_t* p) {  // the upper half is 0
  uint32_t word;
  std::memcpy(&word, p, 4);
  return vmovl_s8(vcreate_s8(word));
}

inline Vec load(const bfloat16* p, Full) { return widen_bfloat16(vld1_u16(&p->bits)); }
inline Vec load(const float16* p, Full) { return widen_float16(vld1_u16(&p->bits)); }
inline Vec load(const int8_t* p, Full) { return vcvtq_f32_s32(vmovl_s16(vget_low_s16(widen_four_bytes(p)))); }
inline void store(bfloat16* p, Vec v, Full) { vst1_u16(&p->bits, narrow_bfloat16(v)); }
inline void store(float16* p, Vec v, Full) { vst1_u16(&p->bits, narrow_float16(v)); }

inline Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
inline Vec sqrt(Vec a) { return vsqrtq_f32(a); }
#else
template <class T>
__attribute__((noinline)) Vec load(const T* p,
                                   Full) {  // called, as inlining this everywhere takes long to compile
  return Vec{to_float(p[0]), to_float(p[1]), to_float(p[2]), to_float(p[3])};
}
inline Vec load(const int8_t* p, Full) { return Vec{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
template <class T>
__attribute__((noinline)) void store(T* p, Vec v, Full) {
  for (int i = 0; i < W; ++i) p[i] = from_float<T>(v[i]);
}

inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
inline Vec sqrt(Vec a) {
  for (int i = 0; i < W; ++i) a[i] = __builtin_sqrtf(a[i]);
  return a;
}
#endif

inline Vec load(const float* p, Full) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v, Full) { std::memcpy(p, &v, sizeof v); }
template <class T>
inline void stream(T* p, Vec v) {
  store(p, v, Full{});
}
inline void stream_fence() {}

inline Vec max(Vec a, Vec b) { return a > b ? a : b; }  // not NEON's own, which lets any NaN through
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

#endif

// Without mask registers a tail goes through a small buffer: nothing outside the row is ever touched.
template <class T>
inline Vec load(const T* p, Part k) {
  T buffer[W] = {};
  std::memcpy(buffer, p, size_t(k.count) * sizeof(T));
  return load(buffer, Full{});
}
template <class T>
inline void store(T* p, Vec v, Part k) {
  T buffer[W];
  store(buffer, v, Full{});
  std::memcpy(p, buffer, size_t(k.count) * sizeof(T));
}

inline Vec abs(Vec a) { return as_float(as_int(a) & 0x7fffffff); }

inline float reduce_add(Vec v) { return reduce<float>(v, std::plus<>{}); }
inline float reduce_max(Vec v) {
  return reduce<float>(v, [](float a, float b) { return a > b ? a : b; });
}
inline float reduce_min(Vec v) {
  return reduce<float>(v, [](float a, float b) { return a < b ? a : b; });
}

#endif

inline double reduce_add(const DVec& v) { return reduce<double>(v, std::plus<>{}); }
inline int32_t reduce_add(IVec v) { return reduce<int32_t>(v, std::plus<>{}); }

// A sum of squares in double, in two registers: compilers keep a vector of two in memory.
class SquareSum {
  typedef double Half __attribute__((vector_size(4 * W)));

 public:
  void add(Vec v) {
    Half low, high;
#if defined(OPSMITH_AVX512)
    low = _mm512_cvtps_pd(_mm512_castps512_ps256(v)), high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
#elif defined(OPSMITH_AVX2)
    low = _mm256_cvtps_pd(_mm256_castps256_ps128(v)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
#else
    const DVec wide = to_double(v);
    std::memcpy(&low, &wide, sizeof low);
    std::memcpy(&high, (const char*)&wide + sizeof low, sizeof high);
#endif
    low_ += low * low, high_ += high * high;
  }
  double total() const {
    const Half both = low_ + high_;
    double sum = 0;
    for (int i = 0; i < W / 2; ++i) sum += both[i];
    return sum;
  }

 private:
  Half low_{}, high_{};
};

// max and min give their SECOND argument when either is NaN: `max(bound, x)` keeps a NaN in x.

template <class T>
inline Vec load(const T* p) {
  return load(p, Full{});
}
template <class T>
inline void store(T* p, Vec v) {
  store(p, v, Full{});
}

// A product that is rounded before it is added: compilers for ARM would fuse the two.
inline Vec rounded(Vec v) {
#if defined(OPSMITH_NEON)
  asm("" : "+w"(v));
#endif
  return v;
}

inline IVec max(IVec a, IVec b) { return a > b ? a : b; }
inline IVec min(IVec a, IVec b) { return a < b ? a : b; }
inline Vec select(IVec mask, Vec yes, Vec no) { return mask ? yes : no; }
inline Vec fma(Vec a, float b, Vec c) { return fma(a, splat(b), c); }
inline Vec fma(Vec a, Vec b, float c) { return fma(a, b, splat(c)); }
inline Vec fma(Vec a, float b, float c) { return fma(a, splat(b), splat(c)); }
inline Vec max(float a, Vec b) { return max(splat(a), b); }
inline Vec min(float a, Vec b) { return min(splat(a), b); }
inline bool any(IVec mask) {
#if defined(OPSMITH_AVX512)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(OPSMITH_AVX2)
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(OPSMITH_NEON)
  return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

inline IVec lane_index() {
  IVec v;
  for (int i = 0; i < W; ++i) v[i] = i;
  return v;
}

// The lanes outside `Part` replaced by `other`, so that they do not count in a reduction.
inline Vec keep(Vec v, Full, float) { return v; }
inline Vec keep(Vec v, Part k, float other) { return select(lane_index() < k.count, v, splat(other)); }

template <class T>
inline bool can_stream(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % (W * sizeof(T)) == 0;
}

// GCC takes a function of prefetches alone for one without effect, and drops calls of it: an empty `asm` is an effect.
template <int write, int cache>
inline void ask_for(const void* p) {
  __builtin_prefetch(p, write, cache);
  asm volatile("");
}
inline void prefetch(const void* p) { ask_for<0, 3>(p); }
inline void prefetch_far(const void* p) { ask_for<0, 2>(p); }  // to the second-level cache
inline void prefetch_written(const void* p) { ask_for<1, 2>(p); }
// What is read once: to the nearest cache alone, so that the others keep what a model's code and Python's objects are made of.
inline void prefetch_once(const void* p) { ask_for<0, 0>(p); }
constexpr int64_t kOnce = 4096;  // bytes from what is used to what is best asked for so
// Whether what streams from memory is asked for far ahead, into the second-level cache first, however few rows meet it: Intel's
// look ahead too little by themselves for the memory of a server. Who is not asked so is asked once.
inline bool asks_always() {
#if defined(__x86_64__)
  static const bool intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
  return intel;
#else
  return false;
#endif
}

// What a value becomes when it is stored as T and read back.
template <class T>
inline Vec round_to(Vec v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    T buffer[W];
    store(buffer, v, Full{});
    return load(buffer, Full{});
  }
}
#if defined(OPSMITH_AVX512) || defined(OPSMITH_AVX2) || defined(OPSMITH_NEON)
template <>
inline Vec round_to<bfloat16>(Vec v) {
  return widen_bfloat16(narrow_bfloat16(v));
}
template <>
inline Vec round_to<float16>(Vec v) {
  return widen_float16(narrow_float16(v));
}
#endif

constexpr float log2_e = 1.44269504088896341f;

// p * 2^n for integral n in [-254, 160]; overflows to infinity and underflows to 0 as it should. At -254 both factors are 0:
// a product that underflows takes tens of cycles. `normal`: n in [-127, 128], in one step; 0 below the normal numbers too.
template <bool normal = false>
inline Vec scale_exponent(Vec p, Vec n) {
#if defined(OPSMITH_AVX512)
  return _mm512_scalef_ps(p, n);
#else  // 1.5 * 2^23: the integer lands in the low bits
  if constexpr (normal) return p * as_float(as_int(n + (12582912.0f + 127.0f)) << 23);
  const IVec i = as_int(n + 12582912.0f) - 0x4b400000;
  const IVec half = i >> 1;  // in two steps, as 2^n alone may not be a float
  return p * as_float((half + 127) << 23) * as_float((i - half + 127) << 23);
#endif
}

inline Vec round_to_integer(Vec x) {
#if defined(OPSMITH_AVX512)
  return _mm512_roundscale_ps(x, nearest);
#elif defined(OPSMITH_NEON)
  return vrndnq_f32(x);
#else
  return (x + 12582912.0f) - 12582912.0f;
#endif
}

// What `scale_exponent` makes 2^x of: a whole number, and what is left for a polynomial, 0 to 1; of 0 both are 0.
struct WholeAndRest {
  Vec whole, rest;
};
template <bool normal = false>
inline WholeAndRest whole_and_rest(Vec x) {
#if defined(OPSMITH_AVX512)
  // scalef takes the floor itself, and both know what to do with infinities
  return {x, _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};
#else
  x = max(normal ? -126.5f : -253.5f, min(normal ? 128.0f : 160.0f, x));
  const Vec whole = round_to_integer(x - 0.5f);
  return {whole, x - whole};
#endif
}

// e^x within 1 ulp or so; 0 at -inf, inf at inf, NaN at NaN.
inline Vec exp(Vec x) {
  x = max(-176.0f, min(89.0f, x));  // beyond, the result is 0 or inf already
  const Vec n = round_to_integer(x * log2_e);
  Vec r = fma(n, -0.693359375f, x);  // ln 2 in two parts, the first with so few bits that n * it is exact
  r = fma(n, 2.12194440054690583e-4f, r);
  Vec p = fma(r, 1.9875691500e-4f, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  return scale_exponent(p, n);
}

// 2^x for results of type T, of 16 bits, with half the arithmetic of exp. 0 at -inf, NaN at NaN. To 8e-5 of itself for
// bfloat16, a fiftieth of what rounding takes, and to 3e-6 for float16; float32 would need more.
template <class T, bool normal = false>
inline Vec exp2_for(Vec x) {
  const auto [n, r] = whole_and_rest<normal>(x);
  if constexpr (std::is_same_v<T, bfloat16>) {
    return scale_exponent<normal>(
        fma(fma(fma(r, 0.0780245364f, 0.2260672003f), r, splat(0.6958335042f)), r, splat(0.9999252558f)), n);
  } else {
    const Vec low = fma(r, 0.693003835f, 1.00000259f), high = fma(r, 0.052011463f, 0.241442755f);
    return scale_exponent<normal>(fma(fma(r * r, 0.0135341667f, high), r * r, low), n);
  }
}

// 1 / x to 7e-5 of itself, for results that are rounded to 16 bits; 0 at infinity.
inline Vec reciprocal_coarse(Vec x) {
#if defined(OPSMITH_AVX512)
  return _mm512_rcp14_ps(x);
#elif defined(OPSMITH_NEON)
  const Vec estimate = vrecpeq_f32(x);  // to 2^-8, and twice the bits after a step of Newton's
  return vrecpsq_f32(x, estimate) * estimate;
#else
  return 1.0f / x;
#endif
}

// erf as an odd rational function, absolute error below 2e-7; exact at both ends, NaN at NaN.
inline Vec erf(Vec x) {
  x = max(-4.0f, min(4.0f, x));
  const Vec t = x * x;
  Vec p = fma(t, -2.72614225801306e-10f, 2.77068142495902e-08f);
  p = fma(p, t, -2.10102402082508e-06f);
  p = fma(p, t, -5.69250639462346e-05f);
  p = fma(p, t, -7.34990630326855e-04f);
  p = fma(p, t, -2.95459980854025e-03f);
  p = fma(p, t, -1.60960333262415e-02f);
  Vec q = fma(t, -1.45660718464996e-05f, -2.13374055278905e-04f);
  q = fma(q, t, -1.68282697438203e-03f);
  q = fma(q, t, -7.37332916720468e-03f);
  q = fma(q, t, -1.42647390514189e-02f);
  return max(-1.0f, min(1.0f, x * p / q));
}

// tanh as an odd rational function, a few ulp; +-1 at the ends, NaN at NaN.
inline Vec tanh(Vec x) {
  const Vec c = max(-7.90531110763549805f, min(7.90531110763549805f, x));
  const Vec t = c * c;
  Vec p = fma(t, -2.76076847742355e-16f, 2.00018790482477e-13f);
  p = fma(p, t, -8.60467152213735e-11f);
  p = fma(p, t, 5.12229709037114e-08f);
  p = fma(p, t, 1.48572235717979e-05f);
  p = fma(p, t, 6.37261928875436e-04f);
  p = fma(p, t, 4.89352455891786e-03f);
  Vec q = fma(t, 1.19825839466702e-06f, 1.18534705686654e-04f);
  q = fma(q, t, 2.26843463243900e-03f);
  q = fma(q, t, 4.89352518554385e-03f);
  return select(abs(x) < 4e-4f, x, c * p / q);
}

}  // namespace opsmith
