// Numbers as a vector core knows them, and the names that its instructions take.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace AscendC::emulation {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The nearest 16-bit number with `mantissa` bits after the point; to even in the middle.
inline uint16_t half_bits(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u);          // NaN
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // subnormal: units of 2^-24
    const float units = float_of(magnitude) * 16777216.0f;
    return uint16_t(sign | uint32_t(std::nearbyint(units)));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

inline float half_value(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest < 0x400u) return (sign ? -1.0f : 1.0f) * float(rest) / 16777216.0f;
  return float_of(sign | ((rest << 13) + 0x38000000u));
}

inline uint16_t bfloat16_bits(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return uint16_t((bits >> 16) | 0x40u);  // NaN
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace AscendC::emulation

struct half {
  uint16_t bits;
  half() = default;
  explicit half(float value) : bits(AscendC::emulation::half_bits(value)) {}
  operator float() const { return AscendC::emulation::half_value(bits); }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits(AscendC::emulation::bfloat16_bits(value)) {}
  operator float() const { return AscendC::emulation::float_of(uint32_t(bits) << 16); }
};

enum pipe_t : uint8_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };

namespace AscendC {

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC, LCM = VECCALC };
using QuePosition = TPosition;

enum class RoundMode : uint8_t { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC };
enum class CMPMODE : uint8_t { LT, GT, EQ, LE, GE, NE };
enum class SELMODE : uint8_t { VSEL_CMPMASK_SPR, VSEL_TENSOR_SCALAR_MODE, VSEL_TENSOR_TENSOR_MODE };
enum class ReduceOrder : uint8_t { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

// An event goes from the pipe named first to the pipe named second.
enum class HardEvent : uint8_t {
  S_V = PIPE_S * 4 + PIPE_V,
  S_MTE2 = PIPE_S * 4 + PIPE_MTE2,
  S_MTE3 = PIPE_S * 4 + PIPE_MTE3,
  V_S = PIPE_V * 4 + PIPE_S,
  V_MTE2 = PIPE_V * 4 + PIPE_MTE2,
  V_MTE3 = PIPE_V * 4 + PIPE_MTE3,
  MTE2_S = PIPE_MTE2 * 4 + PIPE_S,
  MTE2_V = PIPE_MTE2 * 4 + PIPE_V,
  MTE2_MTE3 = PIPE_MTE2 * 4 + PIPE_MTE3,
  MTE3_S = PIPE_MTE3 * 4 + PIPE_S,
  MTE3_V = PIPE_MTE3 * 4 + PIPE_V,
  MTE3_MTE2 = PIPE_MTE3 * 4 + PIPE_MTE2,
};
using TEventID = int8_t;
using event_t = int8_t;

inline float ToFloat(bfloat16_t value) { return float(value); }
inline bfloat16_t ToBfloat16(float value) { return bfloat16_t(value); }

}  // namespace AscendC
