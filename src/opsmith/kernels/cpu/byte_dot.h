// Dot products of bytes: four unsigned bytes of each lane times four signed ones, added to 32-bit sums. Exact in every
// tier: VNNI has one instruction for it, the others multiply even and odd bytes as 16-bit numbers, which cannot
// saturate as the 8-bit instruction of AVX2 does.
#pragma once

#include "simd.h"

namespace opsmith {

#if defined(OPSMITH_AVX512) && defined(__AVX512VNNI__)

using Bytes = __m512i;  // of the weight, W columns by 4
using Four = __m512i;  // of x

inline Bytes bytes_of(IVec v) { return (__m512i)v; }
inline Four four_of(IVec v) { return (__m512i)v; }
inline IVec dot4(IVec sum, Bytes w, Four x) { return (IVec)_mm512_dpbusd_epi32((__m512i)sum, w, x); }
// For an x that is used several times: the instruction can take it from memory, and the compiler would load it for each.
inline void load_once(Four& x) { asm("" : "+v"(x)); }

// v x + w y = (v + y) (w + x) - v w - x y: a multiplication less, where one is due in a cycle and two additions are. The
// last two terms are left in, as they are common to all rows and to all columns. For v, w below 16, x from -64 to 63 and
// y from 0 to 127.
constexpr bool kPairsPay = true;
inline IVec dot_pair(IVec sum, Bytes v, Bytes w, Four x, Four y) {
  return (IVec)_mm512_dpbusd_epi32((__m512i)sum, _mm512_add_epi8(v, y), _mm512_add_epi8(w, x));
}
inline IVec rest_of_pair(IVec sum, Bytes v, Bytes w) { return dot4(sum, v, w); }
// Of four numbers that follow each other times the next four.
inline IVec twice_products_of_fours(IVec v) {
  return v * (IVec)_mm512_shuffle_i32x4((__m512i)v, (__m512i)v, 0xb1);
}

#else

struct Bytes {
  IVec even, odd;
};
struct Four {
  IVec even, odd;
};

#if defined(OPSMITH_AVX512) || defined(OPSMITH_AVX2)

#if defined(OPSMITH_AVX512)
inline IVec high_bytes(IVec v) { return (IVec)_mm512_srli_epi16((__m512i)v, 8); }
inline IVec signed_high_bytes(IVec v) { return (IVec)_mm512_srai_epi16((__m512i)v, 8); }
inline IVec low_to_high_bytes(IVec v) { return (IVec)_mm512_slli_epi16((__m512i)v, 8); }
inline IVec multiply_pairs(IVec a, IVec b) { return (IVec)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
#else
inline IVec high_bytes(IVec v) { return (IVec)_mm256_srli_epi16((__m256i)v, 8); }
inline IVec signed_high_bytes(IVec v) { return (IVec)_mm256_srai_epi16((__m256i)v, 8); }
inline IVec low_to_high_bytes(IVec v) { return (IVec)_mm256_slli_epi16((__m256i)v, 8); }
inline IVec multiply_pairs(IVec a, IVec b) { return (IVec)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#endif

inline Bytes bytes_of(IVec v) { return {v & 0x00ff00ff, high_bytes(v)}; }
inline Four four_of(IVec v) { return {signed_high_bytes(low_to_high_bytes(v)), signed_high_bytes(v)}; }
inline IVec dot4(IVec sum, Bytes w, Four x) {
  return sum + multiply_pairs(w.even, x.even) + multiply_pairs(w.odd, x.odd);
}

#else

// Two 16-bit products a lane have no name here: plain multiplications of the four bytes.
inline Bytes bytes_of(IVec v) { return {v, IVec{}}; }
inline Four four_of(IVec v) { return {v, IVec{}}; }
inline IVec dot4(IVec sum, Bytes w, Four x) {
  typedef uint32_t UVec __attribute__((vector_size(4 * W)));
  for (int i = 0; i < 4; ++i) {
    const IVec byte = (IVec)(((UVec)w.even >> (8 * i)) & 255),
               number = (IVec)((UVec)x.even << (24 - 8 * i)) >> 24;
    sum += byte * number;
  }
  return sum;
}

#endif

inline void load_once(Four&) {}

constexpr bool kPairsPay = false;
inline IVec dot_pair(IVec sum, Bytes v, Bytes w, Four x, Four y) { return dot4(dot4(sum, v, x), w, y); }
inline IVec rest_of_pair(IVec sum, Bytes, Bytes) { return sum; }
inline IVec twice_products_of_fours(IVec) { return IVec{}; }

#endif

inline Four broadcast_four(const int8_t* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return four_of(four - IVec{});
}

inline IVec load_words(const void* p) {
  IVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The low byte of every lane.
inline void store_low_bytes(int8_t* p, IVec v) {
#if defined(OPSMITH_AVX512)
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
#else
  for (int i = 0; i < W; ++i) p[i] = int8_t(v[i]);
#endif
}

inline int32_t reduce_add(IVec v) {
  int32_t total = 0;
  for (int i = 0; i < W; ++i) total += v[i];
  return total;
}

inline Vec to_float(IVec v) { return __builtin_convertvector(v, Vec); }
inline IVec to_int(Vec v) { return __builtin_convertvector(v, IVec); }  // of whole numbers

}  // namespace opsmith
