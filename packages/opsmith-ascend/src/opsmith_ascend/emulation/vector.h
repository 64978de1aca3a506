// Vector instructions. One repeat works on 256 bytes, eight data blocks; an instruction has up to 255 of them, and steps
// its operands by a stride between data blocks and one between repeats. The forms that take a count do the same for any
// count, with operands that lie without gaps.
#pragma once

#include <type_traits>

#include "copy.h"

namespace AscendC {

// Strides in data blocks. Wider than a board's uint8_t, so that a value that does not fit is seen.
struct BinaryRepeatParams {
  int64_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
  int64_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
  BinaryRepeatParams() = default;
  BinaryRepeatParams(int64_t dst, int64_t src0, int64_t src1, int64_t dstRep, int64_t src0Rep,
                     int64_t src1Rep)
      : dstBlkStride(dst), src0BlkStride(src0), src1BlkStride(src1), dstRepStride(dstRep),
        src0RepStride(src0Rep), src1RepStride(src1Rep) {}
};

struct UnaryRepeatParams {
  int64_t dstBlkStride = 1, srcBlkStride = 1, dstRepStride = 8, srcRepStride = 8;
  UnaryRepeatParams() = default;
  UnaryRepeatParams(int64_t dst, int64_t src, int64_t dstRep, int64_t srcRep)
      : dstBlkStride(dst), srcBlkStride(src), dstRepStride(dstRep), srcRepStride(srcRep) {}
};

namespace emulation {

template <class T, class... Allowed>
constexpr bool one_of = (std::is_same_v<T, Allowed> || ...);

// What repeats an instruction makes, and where it stands: of a count of elements without gaps, which is all that a kernel
// gives, or of the first `mask` of each repeat.
struct Repeats {
  int64_t count, mask = 0, times = 0;
  Here here;
  Repeats(int64_t count, Here here = Here::now()) : count(count), here(here) {}
  Repeats(uint64_t mask, int64_t times, Here here)
      : count(-1), mask(int64_t(mask)), times(times), here(here) {}
};

template <class T>
struct Operand {
  const LocalTensor<T>& tensor;
  int64_t block_stride = 1, repeat_stride = 8;

  // Calls touch(byte offset, bytes) for the pieces of `lanes` elements of one repeat.
  template <class Touch>
  void pieces(int64_t repeat, int64_t lanes, Touch touch) const {
    const int64_t start = repeat * repeat_stride * kDataBlock, bytes = lanes * int64_t(sizeof(T));
    if (block_stride == 1) return touch(start, bytes);
    for (int64_t b = 0; b * kDataBlock < bytes; ++b)
      touch(start + b * block_stride * kDataBlock,
            bytes - b * kDataBlock < kDataBlock ? bytes - b * kDataBlock : int64_t(kDataBlock));
  }
  T* at(int64_t repeat, int64_t lane) const {
    constexpr int64_t per_block = kDataBlock / sizeof(T);
    const int64_t blocks = repeat * repeat_stride + lane / per_block * block_stride;
    return reinterpret_cast<T*>(core().local.data() + tensor.address() + blocks * kDataBlock) +
           lane % per_block;
  }
};

constexpr int64_t largest(std::initializer_list<size_t> sizes) {
  size_t found = 0;
  for (const size_t size : sizes) found = size > found ? size : found;
  return int64_t(found);
}

inline void check_strides(std::initializer_list<int64_t> strides) {
  for (const int64_t stride : strides) within("a stride in data blocks", stride, 0, 255);
}

// Partly overlapping operands: what one repeat writes another may read.
template <class D, class S>
void check_overlap(const LocalTensor<D>& dst, const LocalTensor<S>& src, int64_t count) {
  const int64_t to = dst.address(), from = src.address();
  if (to != from && to < from + count * int64_t(sizeof(S)) && from < to + count * int64_t(sizeof(D)))
    core().fault("dst begins %lld bytes from a source that it overlaps: let them be the same, or apart",
                 (long long)(to - from));
  if (to == from && sizeof(D) > sizeof(S) && count * int64_t(sizeof(S)) > int64_t(kDataBlock))
    core().fault(
        "dst lies on a source whose elements are smaller: it would overwrite what is yet to be read");
}

// dst[i] = f(src[i]...), lane by lane.
template <class D, class F, class... S>
void lanewise(const char* name, Repeats repeats, Operand<D> dst, F f, Operand<S>... src) {
  Core& core = emulation::core();
  core.begin(PIPE_V, name, repeats.here);
  constexpr int64_t per_repeat = kRepeatBytes / largest({sizeof(D), sizeof(S)...});
  const bool counted = repeats.count >= 0;
  if (counted) {
    if (!repeats.count) core.fault("works on no elements: skip the instruction, or let count be at least 1");
    repeats.times = (repeats.count + per_repeat - 1) / per_repeat;
    // Operands of a smaller type advance by as many elements, which are fewer data blocks.
    dst.repeat_stride = per_repeat * int64_t(sizeof(D)) / kDataBlock;
    ((src.repeat_stride = per_repeat * int64_t(sizeof(S)) / kDataBlock), ...);
    (check_overlap(dst.tensor, src.tensor, repeats.count), ...);
  } else {
    within("mask", repeats.mask, 1, per_repeat);
    within("repeatTime", repeats.times, 1, kMaxRepeats);
    check_strides({dst.block_stride, dst.repeat_stride, src.block_stride..., src.repeat_stride...});
  }
  dst.tensor.aligned("dst");
  (src.tensor.aligned("a source"), ...);
  for (int64_t r = 0; r < repeats.times; ++r) {
    const int64_t rest = repeats.count - r * per_repeat;
    const int64_t lanes = !counted ? repeats.mask : rest < per_repeat ? rest : per_repeat;
    (src.pieces(r, lanes, [&](int64_t at, int64_t bytes) { src.tensor.read(at, bytes); }), ...);
    dst.pieces(r, lanes, [&](int64_t at, int64_t bytes) { dst.tensor.write(at, bytes); });
    for (int64_t lane = 0; lane < lanes; ++lane) *dst.at(r, lane) = f(*src.at(r, lane)...);
  }
  core.spend(kVectorStart + double(repeats.times));
}

template <class T, class F>
void unary(const char* name, Repeats repeats, const LocalTensor<T>& dst, const LocalTensor<T>& src, F f,
           UnaryRepeatParams p = {}) {
  lanewise(name, repeats, Operand<T>{dst, p.dstBlkStride, p.dstRepStride}, f,
           Operand<T>{src, p.srcBlkStride, p.srcRepStride});
}

template <class T, class F>
void binary(const char* name, Repeats repeats, const LocalTensor<T>& dst, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, F f, BinaryRepeatParams p = {}) {
  lanewise(name, repeats, Operand<T>{dst, p.dstBlkStride, p.dstRepStride}, f,
           Operand<T>{src0, p.src0BlkStride, p.src0RepStride},
           Operand<T>{src1, p.src1BlkStride, p.src1RepStride});
}

// The type that arithmetic of T is thought in: float holds every half and the result of every operation on them.
template <class T>
using Wide = std::conditional_t<one_of<T, half, float>, float, int64_t>;

}  // namespace emulation

// Each instruction in both forms: with a count, and with a mask, repeats and strides.
#define OPSMITH_BINARY(Name, expression, ...)                                                               \
  template <class T>                                                                                        \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,              \
            emulation::Repeats repeats, const BinaryRepeatParams& params = {}) {                            \
    static_assert(emulation::one_of<T, __VA_ARGS__>, #Name " takes " #__VA_ARGS__);                         \
    using W = emulation::Wide<T>;                                                                           \
    emulation::binary(#Name, repeats, dst, src0, src1, [](W a, W b) { return T(expression); }, params);     \
  }                                                                                                         \
  template <class T>                                                                                        \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,              \
            uint64_t mask, int64_t repeatTime, const BinaryRepeatParams& params, Here here = Here::now()) { \
    Name(dst, src0, src1, emulation::Repeats(mask, repeatTime, here), params);                              \
  }

#define OPSMITH_UNARY(Name, expression, ...)                                                         \
  template <class T>                                                                                 \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, emulation::Repeats repeats,        \
            const UnaryRepeatParams& params = {}) {                                                  \
    static_assert(emulation::one_of<T, __VA_ARGS__>, #Name " takes " #__VA_ARGS__);                  \
    using W = emulation::Wide<T>;                                                                    \
    emulation::unary(#Name, repeats, dst, src, [](W a) { return T(expression); }, params);           \
  }                                                                                                  \
  template <class T>                                                                                 \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, int64_t repeatTime, \
            const UnaryRepeatParams& params, Here here = Here::now()) {                              \
    Name(dst, src, emulation::Repeats(mask, repeatTime, here), params);                              \
  }

#define OPSMITH_SCALAR(Name, expression, ...)                                                              \
  template <class T>                                                                                       \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, std::common_type_t<T> scalar,            \
            emulation::Repeats repeats, const UnaryRepeatParams& params = {}) {                            \
    static_assert(emulation::one_of<T, __VA_ARGS__>, #Name " takes " #__VA_ARGS__);                        \
    using W = emulation::Wide<T>;                                                                          \
    const W b = W(scalar);                                                                                 \
    emulation::unary(#Name, repeats, dst, src, [b](W a) { return T(expression); }, params);                \
  }                                                                                                        \
  template <class T>                                                                                       \
  void Name(const LocalTensor<T>& dst, const LocalTensor<T>& src, std::common_type_t<T> scalar,            \
            uint64_t mask, int64_t repeatTime, const UnaryRepeatParams& params, Here here = Here::now()) { \
    Name(dst, src, scalar, emulation::Repeats(mask, repeatTime, here), params);                            \
  }

OPSMITH_BINARY(Add, a + b, half, float, int16_t, int32_t)
OPSMITH_BINARY(Sub, a - b, half, float, int16_t, int32_t)
OPSMITH_BINARY(Mul, a* b, half, float, int16_t, int32_t)
OPSMITH_BINARY(Div, a / b, half, float)
OPSMITH_BINARY(Max, a > b || a != a ? a : b, half, float, int16_t, int32_t)
OPSMITH_BINARY(Min, a < b || a != a ? a : b, half, float, int16_t, int32_t)
OPSMITH_BINARY(And, a& b, int16_t, uint16_t)
OPSMITH_BINARY(Or, a | b, int16_t, uint16_t)

// Rsqrt and Reciprocal are left out on purpose: a board approximates them, beyond what a card's tolerance allows.
OPSMITH_UNARY(Exp, std::exp(a), half, float)
OPSMITH_UNARY(Ln, std::log(a), half, float)
OPSMITH_UNARY(Sqrt, std::sqrt(a), half, float)
OPSMITH_UNARY(Abs, std::fabs(a), half, float)
OPSMITH_UNARY(Relu, a > 0 ? a : 0, half, float, int32_t)
OPSMITH_UNARY(Not, ~a, int16_t, uint16_t)

OPSMITH_SCALAR(Adds, a + b, half, float, int16_t, int32_t)
OPSMITH_SCALAR(Muls, a* b, half, float, int16_t, int32_t)
OPSMITH_SCALAR(Maxs, a > b || a != a ? a : b, half, float, int16_t, int32_t)
OPSMITH_SCALAR(Mins, a < b || a != a ? a : b, half, float, int16_t, int32_t)
OPSMITH_SCALAR(ShiftLeft, a << b, int16_t, uint16_t, int32_t, uint32_t)
OPSMITH_SCALAR(ShiftRight, a >> b, int16_t, uint16_t, int32_t, uint32_t)

#undef OPSMITH_BINARY
#undef OPSMITH_UNARY
#undef OPSMITH_SCALAR

// dst = dst + src * scalar
template <class T>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<T>& src, std::common_type_t<T> scalar,
          emulation::Repeats repeats) {
  static_assert(emulation::one_of<T, half, float>, "Axpy takes half, float");
  const float b = float(scalar);
  emulation::binary("Axpy", repeats, dst, dst, src, [b](float a, float x) { return T(a + x * b); });
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, std::common_type_t<T> value, emulation::Repeats repeats,
               int64_t dstBlockStride = 1, int64_t dstRepeatStride = 8) {
  static_assert(emulation::one_of<T, half, bfloat16_t, int16_t, uint16_t, int32_t, uint32_t, float>,
                "Duplicate takes numbers of 16 and 32 bits");
  emulation::lanewise("Duplicate", repeats, emulation::Operand<T>{dst, dstBlockStride, dstRepeatStride},
                      [value] { return value; });
}

template <class T>
void Duplicate(const LocalTensor<T>& dst, std::common_type_t<T> value, uint64_t mask, int64_t repeatTime,
               int64_t dstBlockStride, int64_t dstRepeatStride, Here here = Here::now()) {
  Duplicate(dst, value, emulation::Repeats(mask, repeatTime, here), dstBlockStride, dstRepeatStride);
}

namespace emulation {

inline double rounded(double value, RoundMode mode) {
  switch (mode) {
    case RoundMode::CAST_FLOOR: return std::floor(value);
    case RoundMode::CAST_CEIL: return std::ceil(value);
    case RoundMode::CAST_ROUND: return std::round(value);
    case RoundMode::CAST_TRUNC: return std::trunc(value);
    default: return std::nearbyint(value);
  }
}

// Conversions that a vector core of the 910B has; others go by way of float or half.
template <class D, class S>
constexpr bool converts = (std::is_same_v<S, float> &&
                           one_of<D, float, half, bfloat16_t, int16_t, int32_t, int64_t>) ||
                          (std::is_same_v<S, half> && one_of<D, float, int8_t, uint8_t, int16_t, int32_t>) ||
                          (std::is_same_v<S, bfloat16_t> && one_of<D, float, int32_t>) ||
                          (one_of<S, int8_t, uint8_t> && one_of<D, half>) ||
                          (std::is_same_v<S, int16_t> && one_of<D, half, float>) ||
                          (std::is_same_v<S, int32_t> && one_of<D, float, int16_t, int64_t>) ||
                          (std::is_same_v<S, int64_t> && one_of<D, float, int32_t>);

template <class T>
constexpr bool is_integer = std::is_integral_v<T>;

template <class D, class S>
D convert(S value, RoundMode mode) {
  if constexpr (is_integer<D> && is_integer<S>) {
    return D(value);
  } else if constexpr (is_integer<D>) {
    const double r = rounded(double(float(value)), mode);
    const double low = double(std::is_signed_v<D> ? -std::ldexp(1.0, 8 * sizeof(D) - 1) : 0.0);
    const double high = std::ldexp(1.0, 8 * sizeof(D) - (std::is_signed_v<D> ? 1 : 0));
    if (r != r) return D(0);
    return r < low ? D(low) : r >= high ? D(sizeof(D) == 8 ? INT64_MAX : int64_t(high - 1)) : D(r);
  } else if constexpr (std::is_same_v<D, float> && std::is_same_v<S, float>) {
    return mode == RoundMode::CAST_NONE ? value : float(rounded(value, mode));
  } else {
    return D(float(value));
  }
}

// A conversion that may lose digits says how; one that cannot says CAST_NONE. To half and bfloat16 only the nearest is
// emulated, which is what one rounding at the end asks for.
template <class D, class S>
void check_round(RoundMode mode) {
  constexpr bool widens = !is_integer<D> &&
                          ((std::is_same_v<D, float> && one_of<S, half, bfloat16_t, int16_t>) ||
                           one_of<S, int8_t, uint8_t>);
  constexpr bool narrows = one_of<D, half, bfloat16_t> && one_of<S, float>;
  if (widens && mode != RoundMode::CAST_NONE)
    core().fault("rounds where nothing is lost: this conversion takes RoundMode::CAST_NONE");
  if (narrows && mode != RoundMode::CAST_RINT && !(mode == RoundMode::CAST_NONE && std::is_same_v<D, half>))
    core().fault("to half and bfloat16 the emulation rounds to nearest: RoundMode::CAST_RINT");
  if (is_integer<D> && !is_integer<S> && mode == RoundMode::CAST_NONE)
    core().fault(
        "to an integer a rounding mode must be said: CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND or "
        "CAST_TRUNC");
}

}  // namespace emulation

template <class D, class S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, RoundMode mode, emulation::Repeats repeats,
          const UnaryRepeatParams& p = {}) {
  static_assert(emulation::converts<D, S>,
                "a vector core has no such conversion; go by way of float or half");
  emulation::lanewise(
      "Cast", repeats, emulation::Operand<D>{dst, p.dstBlkStride, p.dstRepStride},
      [mode](S value) { return emulation::convert<D>(value, mode); },
      emulation::Operand<S>{src, p.srcBlkStride, p.srcRepStride});
  emulation::check_round<D, S>(mode);
}

template <class D, class S>
void Cast(const LocalTensor<D>& dst, const LocalTensor<S>& src, RoundMode mode, uint64_t mask,
          int64_t repeatTime, const UnaryRepeatParams& params, Here here = Here::now()) {
  Cast(dst, src, mode, emulation::Repeats(mask, repeatTime, here), params);
}

}  // namespace AscendC
