// Numbers as a vector core knows them, and the names that its instructions take.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/types.h"  // of the core: how numbers of 16 bits are made float, and rounded

struct half {
  uint16_t bits;
  half() = default;
  explicit half(float value) : bits(opsmith::from_float<opsmith::float16>(value).bits) {}
  operator float() const { return opsmith::to_float(opsmith::float16{bits}); }
};

struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  explicit bfloat16_t(float value) : bits(opsmith::from_float<opsmith::bfloat16>(value).bits) {}
  operator float() const { return opsmith::to_float(opsmith::bfloat16{bits}); }
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
