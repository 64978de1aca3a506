// What a kernel file knows about a tensor. No torch header: kernels see pointers, sizes and strides only.
#pragma once

#include <cstdint>
#include <cstring>

namespace opsmith {

// The first three are what operators compute in; the others are masks, ids and quantized values.
enum class DType { f32, bf16, f16, boolean, i32, i64, i8 };

// A borrowed tensor. Sizes and strides are in elements and live as long as the tensor does.
struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;

  bool defined() const { return sizes != nullptr; }  // false for an optional tensor that was not given
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

inline bool is_id(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }

// A number of such a tensor.
inline int64_t integer_at(const View& x, int64_t at) {
  return x.dtype == DType::i32 ? x.as<int32_t>()[at] : x.as<int64_t>()[at];
}

// The product of the sizes of a view's dimensions, counted from the right: `first` ... `last`, the last axis being 1.
inline int64_t sizes_between(const View& v, int64_t first, int64_t last) {
  int64_t product = 1;
  for (int64_t d = first; d <= last && d <= v.dim; ++d) product *= v.sizes[v.dim - d];
  return product;
}

// Calls f with a null pointer of the ids' type, so that a lambda can name it: `[&]<class T>(T*)`.
template <class F>
inline void with_id_type(DType dtype, F&& f) {
  if (dtype == DType::i32) {
    f(static_cast<int32_t*>(nullptr));
  } else {
    f(static_cast<int64_t*>(nullptr));
  }
}

// The 16-bit floating-point types, as bits, with their scalar conversions.
struct bfloat16 {
  uint16_t bits;
};

struct float16 {
  uint16_t bits;
};

inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}

inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) { return bits_float(uint32_t(x.bits) << 16); }

inline float to_float(float16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31,
                 fraction = x.bits & 1023;
  if (exponent == 31) return bits_float(sign | 0x7f800000u | (fraction << 13));
  if (exponent == 0) {  // subnormal: fraction * 2^-24, exact in float
    const float magnitude = float(fraction) * 5.9604644775390625e-08f;
    return sign ? -magnitude : magnitude;
  }
  return bits_float(sign | ((exponent + 112) << 23) | (fraction << 13));
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

// Round to nearest even; a NaN stays a (quiet) NaN instead of rounding up to infinity.
template <>
inline bfloat16 from_float<bfloat16>(float x) {
  const uint32_t u = float_bits(x);
  if (x != x) return {uint16_t((u >> 16) | 0x40)};
  return {uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

template <>
inline float16 from_float<float16>(float x) {
  const uint32_t u = float_bits(x), magnitude = u & 0x7fffffffu;
  const uint16_t sign = uint16_t((u >> 16) & 0x8000);
  if (magnitude > 0x7f800000u) return {uint16_t(sign | 0x7e00)};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 puts the subnormal's unit at float's last bit
    return {uint16_t(sign | (float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u))};
  }
  return {uint16_t(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13))};
}

}  // namespace opsmith
