// Dot products of weights of a byte with whole numbers in digits: unsigned bytes of each lane times as many digits, added to
// 32-bit sums. Exact in every tier. VNNI and ARM's dotprod multiply all four of a lane by digits of 8 bits. The others multiply
// the even or the odd two as 16-bit numbers, for AVX2's own instruction for bytes saturates: digits have 16 bits, half as many.
#pragma once

#include "nearest.h"

namespace opsmith {

#if (defined(OPSMITH_AVX512) && defined(__AVX512VNNI__)) || (defined(OPSMITH_AVX2) && defined(__AVXVNNI__))
#define OPSMITH_VNNI 1
#define OPSMITH_BYTE_DIGITS 1

using Bytes = IVec;  // of the weight, W columns by 4
using Four = IVec;  // of x
constexpr int kTaken = 0;  // what `bytes_of` takes from each byte
constexpr bool kDotsOfBytes = W == 16;  // in one instruction, of as many as a vector of 64 holds

inline Bytes bytes_of(IVec v, int = 0) { return v; }
inline Four four_of(IVec v) { return v; }
inline IVec dot(IVec sum, Bytes w, Four x) {
#if defined(OPSMITH_AVX512)
  return (IVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#else
  return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#endif
}
// For an x that is used several times: the instruction can take it from memory, and the compiler would load it for each.
inline void load_once(Four& x) { asm("" : "+v"(x)); }

#elif defined(OPSMITH_NEON) && defined(__ARM_FEATURE_DOTPROD)
#define OPSMITH_BYTE_DIGITS 1

// Both factors are signed: a byte is taken as 128 less, which whoever adds has to make up for; a nibble is as it is.
using Bytes = int8x16_t;
using Four = int8x16_t;
constexpr int kTaken = 128;
constexpr bool kDotsOfBytes = false;

inline Bytes bytes_of(IVec v, int = 0) { return (Bytes)(v ^ int32_t(0x80808080)); }
inline Four four_of(IVec v) { return (Four)v; }
inline IVec dot(IVec sum, Bytes w, Four x) { return (IVec)vdotq_s32((int32x4_t)sum, w, x); }
inline void load_once(Four&) {}

#else

// Two of the four numbers of a lane, in its halves: the even ones or the odd ones.
using Bytes = IVec;
using Four = IVec;
using Digit = int16_t;
constexpr int kTaken = 0;
constexpr bool kDotsOfBytes = false;

typedef int16_t Shorts __attribute__((vector_size(4 * W)));
typedef uint16_t UnsignedShorts __attribute__((vector_size(4 * W)));
inline IVec multiply_pairs(IVec a, IVec b) {
#if defined(OPSMITH_AVX512)
  return (IVec)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(OPSMITH_AVX2)
  return (IVec)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (IVec)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(OPSMITH_NEON)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (IVec)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

inline Bytes bytes_of(IVec v, int odd) { return odd ? (IVec)((UnsignedShorts)v >> 8) : v & 0x00ff00ff; }
inline Four four_of(IVec v) { return v; }
inline Bytes nibbles_of(IVec v, int high, int odd) {
  const IVec shifted = (IVec)((UnsignedShorts)v >> (8 * odd + 4 * high));
  return high && odd ? shifted : shifted & 0x000f000f;
}
inline IVec dot(IVec sum, Bytes w, Four x) {
  sum = sum + multiply_pairs(w, x);
#if defined(OPSMITH_AVX2)
  asm volatile("" : "+x"(sum));  // one after the other: all products first are more than 16 registers hold
#endif
  return sum;
}
#endif

#if defined(OPSMITH_BYTE_DIGITS)
using Digit = int8_t;
inline Bytes nibbles_of(IVec v, int high, int) { return four_of((v >> 4 * high) & 0x0f0f0f0f); }
#endif

constexpr int kTakes = 4 / sizeof(Digit);  // numbers of a lane that an instruction multiplies
// Of the digits that lie as store_fours leaves them.
inline Four broadcast_four(const Digit* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return four_of(four - IVec{});
}

// Floats of four bits (e2m1), one in each byte, as bytes that hold twice the number, and 128 more.
inline IVec double_floats(IVec v) {
  alignas(16) static constexpr uint8_t table[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                                    128, 127, 126, 125, 124, 122, 120, 116};
#if defined(OPSMITH_AVX512)
  const __m128i t = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (IVec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), (__m512i)v);
#elif defined(OPSMITH_AVX2)
  const __m128i t = _mm_load_si128(reinterpret_cast<const __m128i*>(table));
  return (IVec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), (__m256i)v);
#elif defined(OPSMITH_NEON)
  return (IVec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)v);
#else
  uint8_t bytes[sizeof v];
  std::memcpy(bytes, &v, sizeof v);
  for (uint8_t& b : bytes) b = table[b];
  std::memcpy(&v, bytes, sizeof v);
  return v;
#endif
}

inline IVec load_words(const void* p) {
  IVec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// The lanes as digits, fours of them `step` apart: those of 8 bits in order, of 16 the even two before the odd ones.
inline void store_fours(Digit* p, int64_t step, IVec v, int64_t count) {
  alignas(64) Digit digits[W];
#if defined(OPSMITH_BYTE_DIGITS)
  store_low_bytes(digits, v);
#else
  for (int i = 0; i < W; i += 4) {
    for (int j = 0; j < 4; ++j) digits[i + (j & 1) * 2 + j / 2] = Digit(v[i + j]);
  }
#endif
  for (int64_t i = 0; i < W && i < count; i += 4)
    std::memcpy(p + i / 4 * step, digits + i, sizeof(Digit) * 4);
}

inline Vec to_float(IVec v) { return __builtin_convertvector(v, Vec); }
inline IVec to_int(Vec v) { return __builtin_convertvector(v, IVec); }  // of whole numbers

// Halves, for doubled floats, of the powers of two that bytes stand for, which were loaded as if they had signs.
inline Vec half_powers(Vec bytes) {
  return max(as_float((to_int(bytes) & 255) << 23), splat(bits_float(1u << 22))) * 0.5f;
}

}  // namespace opsmith
