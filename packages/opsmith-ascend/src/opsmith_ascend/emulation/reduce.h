// Vector instructions that go across lanes: sums and extremes of a repeat or a data block, a number spread over a data
// block, elements gathered by their addresses, comparisons to bits and a choice by bits.
#pragma once

#include <algorithm>

#include "vector.h"

namespace AscendC {

namespace emulation {

// Pairs are added first, then pairs of pairs: the order of a board, and its rounding error.
template <class T, class F>
T fold(T* values, int64_t n, F f) {
  for (; n > 1; n = (n + 1) / 2) {
    for (int64_t i = 0; i < n / 2; ++i) values[i] = f(values[2 * i], values[2 * i + 1]);
    if (n % 2) values[n / 2] = values[n - 1];
  }
  return values[0];
}

struct Plus {
  template <class T>
  T operator()(T a, T b) const {
    return T(float(a) + float(b));
  }
};
struct Larger {
  template <class T>
  T operator()(T a, T b) const {
    return float(a) > float(b) || float(a) != float(a) ? a : b;
  }
};
struct Smaller {
  template <class T>
  T operator()(T a, T b) const {
    return float(a) < float(b) || float(a) != float(a) ? a : b;
  }
};

// Each repeat of src to `results` numbers, one for every 256 / results bytes; dst advances by them times its stride.
template <int results, class T, class F>
void reduce_repeats(const char* name, Here here, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                    int64_t mask, int64_t times, int64_t dst_stride, int64_t block_stride,
                    int64_t repeat_stride, F f) {
  static_assert(one_of<T, half, float>, "a reduction takes half, float");
  Core& core = emulation::core();
  core.begin(PIPE_V, name, here);
  constexpr int64_t per_repeat = kRepeatBytes / sizeof(T), per_result = per_repeat / results;
  within("mask", mask, 1, per_repeat);
  within("repeatTime", times, 1, kMaxRepeats);
  check_strides({block_stride, repeat_stride});
  within("dstRepStride", dst_stride, 0, 65535);
  dst.aligned("dst", results * sizeof(T));
  src.aligned("src");
  const Operand<T> from{src, block_stride, repeat_stride};
  for (int64_t r = 0; r < times; ++r) {
    from.pieces(r, mask, [&](int64_t at, int64_t bytes) { src.read(at, bytes); });
    const int64_t made = (mask + per_result - 1) / per_result;
    T* to = reinterpret_cast<T*>(dst.write(r * dst_stride * results * sizeof(T), made * sizeof(T)));
    for (int64_t i = 0; i < made; ++i) {
      T values[per_repeat];
      int64_t n = 0;
      for (int64_t lane = i * per_result; lane < (i + 1) * per_result && lane < mask; ++lane)
        values[n++] = *from.at(r, lane);
      to[i] = fold(values, n, f);
    }
  }
  core.spend(kVectorStart + double(times));
}

template <class T, class F>
void reduce_all(const char* name, Here here, const LocalTensor<T>& dst, const LocalTensor<T>& src,
                const LocalTensor<T>& work, int64_t count, F f) {
  static_assert(one_of<T, half, float>, "a reduction takes half, float");
  Core& core = emulation::core();
  core.begin(PIPE_V, name, here);
  if (count < 1) core.fault("reduces no elements");
  dst.aligned("dst"), src.aligned("src"), work.aligned("the work tensor");
  constexpr int64_t per_repeat = kRepeatBytes / sizeof(T);
  const T* from = reinterpret_cast<const T*>(src.read(0, count * int64_t(sizeof(T))));
  // Each repeat leaves a number, the numbers are reduced the same way: the work tensor holds the first of them.
  std::vector<T> level(from, from + count);
  int64_t repeats = (count + per_repeat - 1) / per_repeat, all = 0;
  work.write(0, padded(repeats * int64_t(sizeof(T))));
  while (level.size() > 1) {
    std::vector<T> next;
    for (size_t i = 0; i < level.size(); i += per_repeat)
      next.push_back(fold(level.data() + i, std::min<int64_t>(per_repeat, level.size() - i), f));
    all += int64_t(next.size());
    level.swap(next);
  }
  *reinterpret_cast<T*>(dst.write(0, sizeof(T))) = level[0];
  core.spend(2 * kVectorStart + double(all));
}

}  // namespace emulation

// The result is element 0 of dst; work has room for a number of each 256 bytes of src, in whole data blocks.
template <class T>
void ReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
               int32_t count, Here here = Here::now()) {
  emulation::reduce_all("ReduceSum", here, dst, src, work, count, emulation::Plus());
}
template <class T>
void ReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
               int32_t count, bool calIndex = false, Here here = Here::now()) {
  emulation::reduce_all("ReduceMax", here, dst, src, work, count, emulation::Larger());
  if (calIndex) emulation::core().fault("calIndex is not emulated: leave it false");
}
template <class T>
void ReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<T>& work,
               int32_t count, bool calIndex = false, Here here = Here::now()) {
  emulation::reduce_all("ReduceMin", here, dst, src, work, count, emulation::Smaller());
  if (calIndex) emulation::core().fault("calIndex is not emulated: leave it false");
}

// One number for each repeat; dstRepStride in elements.
template <class T>
void WholeReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t mask, int64_t repeatTime,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride,
                    Here here = Here::now()) {
  emulation::reduce_repeats<1>("WholeReduceSum", here, dst, src, mask, repeatTime, dstRepStride, srcBlkStride,
                               srcRepStride, emulation::Plus());
}
template <class T>
void WholeReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t mask, int64_t repeatTime,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride, ReduceOrder order,
                    Here here = Here::now()) {
  emulation::reduce_repeats<1>("WholeReduceMax", here, dst, src, mask, repeatTime, dstRepStride, srcBlkStride,
                               srcRepStride, emulation::Larger());
  if (order != ReduceOrder::ORDER_ONLY_VALUE)
    emulation::core().fault("only ReduceOrder::ORDER_ONLY_VALUE is emulated");
}
template <class T>
void WholeReduceMin(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t mask, int64_t repeatTime,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride, ReduceOrder order,
                    Here here = Here::now()) {
  emulation::reduce_repeats<1>("WholeReduceMin", here, dst, src, mask, repeatTime, dstRepStride, srcBlkStride,
                               srcRepStride, emulation::Smaller());
  if (order != ReduceOrder::ORDER_ONLY_VALUE)
    emulation::core().fault("only ReduceOrder::ORDER_ONLY_VALUE is emulated");
}

// One number for each data block, eight for each repeat; dstRepStride in eight elements.
template <class T>
void BlockReduceSum(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t repeatTime, int64_t mask,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride,
                    Here here = Here::now()) {
  emulation::reduce_repeats<8>("BlockReduceSum", here, dst, src, mask, repeatTime, dstRepStride, srcBlkStride,
                               srcRepStride, emulation::Plus());
}
template <class T>
void BlockReduceMax(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t repeatTime, int64_t mask,
                    int64_t dstRepStride, int64_t srcBlkStride, int64_t srcRepStride,
                    Here here = Here::now()) {
  emulation::reduce_repeats<8>("BlockReduceMax", here, dst, src, mask, repeatTime, dstRepStride, srcBlkStride,
                               srcRepStride, emulation::Larger());
}

struct BrcbRepeatParams {
  int64_t dstBlkStride = 1, dstRepStride = 8;
  BrcbRepeatParams() = default;
  BrcbRepeatParams(int64_t block, int64_t repeat) : dstBlkStride(block), dstRepStride(repeat) {}
};

// Eight elements of src a repeat, each spread over a data block of dst.
template <class T>
void Brcb(const LocalTensor<T>& dst, const LocalTensor<T>& src, int64_t repeatTime,
          const BrcbRepeatParams& params, Here here = Here::now()) {
  using namespace emulation;
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Brcb takes numbers of 16 and 32 bits");
  Core& core = emulation::core();
  core.begin(PIPE_V, "Brcb", here);
  within("repeatTime", repeatTime, 1, kMaxRepeats);
  check_strides({params.dstBlkStride, params.dstRepStride});
  dst.aligned("dst"), src.aligned("src");
  for (int64_t r = 0; r < repeatTime; ++r) {
    const T* from = reinterpret_cast<const T*>(src.read(r * 8 * int64_t(sizeof(T)), 8 * sizeof(T)));
    for (int64_t b = 0; b < 8; ++b) {
      const int64_t at = (r * params.dstRepStride + b * params.dstBlkStride) * kDataBlock;
      T* to = reinterpret_cast<T*>(dst.write(at, kDataBlock));
      for (size_t i = 0; i < kDataBlock / sizeof(T); ++i) to[i] = from[b];
    }
  }
  core.spend(kVectorStart + double(repeatTime));
}

// dst[i] = the element of src at srcBaseAddr + srcOffset[i] bytes.
template <class T>
void Gather(const LocalTensor<T>& dst, const LocalTensor<T>& src, const LocalTensor<uint32_t>& srcOffset,
            uint32_t srcBaseAddr, uint32_t count, Here here = Here::now()) {
  using namespace emulation;
  static_assert(sizeof(T) == 2 || sizeof(T) == 4, "Gather takes numbers of 16 and 32 bits");
  Core& core = emulation::core();
  core.begin(PIPE_V, "Gather", here);
  if (!count) core.fault("gathers no elements");
  dst.aligned("dst"), src.aligned("src"), srcOffset.aligned("srcOffset");
  const auto* offsets = reinterpret_cast<const uint32_t*>(srcOffset.read(0, int64_t(count) * 4));
  std::vector<T> found(count);
  for (uint32_t i = 0; i < count; ++i) {
    const int64_t at = int64_t(srcBaseAddr) + offsets[i];
    if (at % int64_t(sizeof(T)))
      core.fault("offset %u is %lld bytes, expected a multiple of the element's %zu", i, (long long)at,
                 sizeof(T));
    std::memcpy(&found[i], src.read(at, sizeof(T)), sizeof(T));
  }
  std::memcpy(dst.write(0, int64_t(count) * sizeof(T)), found.data(), count * sizeof(T));
  core.spend(kVectorStart + double(count) / 8);  // assumed: eight addresses a cycle
}

// dst[i] = firstValue + i
template <class T>
void CreateVecIndex(const LocalTensor<T>& dst, std::common_type_t<T> firstValue, emulation::Repeats repeats) {
  static_assert(emulation::one_of<T, half, float, int16_t, int32_t>,
                "CreateVecIndex takes half, float, int16_t, int32_t");
  int64_t next = 0;
  emulation::lanewise("CreateVecIndex", repeats, emulation::Operand<T>{dst},
                      [&] { return T(firstValue + T(next++)); });
}

namespace emulation {

template <class T>
bool compare(T a, T b, CMPMODE mode) {
  switch (mode) {
    case CMPMODE::LT: return a < b;
    case CMPMODE::GT: return a > b;
    case CMPMODE::EQ: return a == b;
    case CMPMODE::LE: return a <= b;
    case CMPMODE::GE: return a >= b;
    default: return a != b;
  }
}

// `other()` reads the second operand, once the instruction has begun.
template <class T, class Other>
void compare_all(const char* name, Here here, const LocalTensor<uint8_t>& dst, const LocalTensor<T>& src,
                 Other other, CMPMODE mode, int64_t count) {
  Core& core = emulation::core();
  core.begin(PIPE_V, name, here);
  const int64_t bytes = count * int64_t(sizeof(T));
  if (count < 1 || bytes % kRepeatBytes)
    core.fault("compares %lld bytes, expected a multiple of %u", (long long)bytes, kRepeatBytes);
  dst.aligned("dst"), src.aligned("src0");
  const T* left = reinterpret_cast<const T*>(src.read(0, bytes));
  const auto right = other();
  std::vector<uint8_t> bits(count / 8);
  for (int64_t i = 0; i < count; ++i)
    bits[i / 8] |= uint8_t(compare<float>(left[i], right(i), mode)) << (i % 8);
  std::memcpy(dst.write(0, count / 8), bits.data(), bits.size());
  core.spend(kVectorStart + double(bytes) / kRepeatBytes);
}

template <class T, class Mask, class Other>
void select_all(Here here, const LocalTensor<T>& dst, const LocalTensor<Mask>& mask,
                const LocalTensor<T>& src, SELMODE mode, SELMODE expected, Other other, int64_t count) {
  static_assert(one_of<T, half, float>, "Select takes half, float");
  Core& core = emulation::core();
  core.begin(PIPE_V, "Select", here);
  if (mode != expected)
    core.fault(
        "two tensors take SELMODE::VSEL_TENSOR_TENSOR_MODE, a tensor and a number VSEL_TENSOR_SCALAR_MODE");
  if (count < 1) core.fault("chooses among no elements");
  dst.aligned("dst"), mask.aligned("selMask"), src.aligned("src0");
  const uint8_t* bits = mask.read(0, (count + 7) / 8);
  const T* yes = reinterpret_cast<const T*>(src.read(0, count * int64_t(sizeof(T))));
  const auto no = other();
  T* to = reinterpret_cast<T*>(dst.write(0, count * int64_t(sizeof(T))));
  for (int64_t i = 0; i < count; ++i) to[i] = bits[i / 8] >> (i % 8) & 1 ? yes[i] : no(i);
  core.spend(kVectorStart + double(count * int64_t(sizeof(T))) / kRepeatBytes);
}

}  // namespace emulation

// One bit an element, the first lowest; count fills whole repeats of 256 bytes.
template <class T>
void Compare(const LocalTensor<uint8_t>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,
             CMPMODE mode, uint32_t count, Here here = Here::now()) {
  static_assert(emulation::one_of<T, half, float>, "Compare takes half, float");
  const auto other = [&] {
    const T* right = reinterpret_cast<const T*>(src1.read(0, int64_t(count) * sizeof(T)));
    return [right](int64_t i) { return float(right[i]); };
  };
  emulation::compare_all("Compare", here, dst, src0, other, mode, count);
}
template <class T>
void CompareScalar(const LocalTensor<uint8_t>& dst, const LocalTensor<T>& src0, std::common_type_t<T> scalar,
                   CMPMODE mode, uint32_t count, Here here = Here::now()) {
  static_assert(emulation::one_of<T, half, float>, "CompareScalar takes half, float");
  const auto other = [scalar] { return [scalar](int64_t) { return float(scalar); }; };
  emulation::compare_all("CompareScalar", here, dst, src0, other, mode, count);
}

// src0 where the bit is set, else src1 or the number.
template <class T, class Mask>
void Select(const LocalTensor<T>& dst, const LocalTensor<Mask>& selMask, const LocalTensor<T>& src0,
            const LocalTensor<T>& src1, SELMODE mode, uint32_t count, Here here = Here::now()) {
  const auto other = [&] {
    const T* no = reinterpret_cast<const T*>(src1.read(0, int64_t(count) * sizeof(T)));
    return [no](int64_t i) { return no[i]; };
  };
  emulation::select_all(here, dst, selMask, src0, mode, SELMODE::VSEL_TENSOR_TENSOR_MODE, other, count);
}
template <class T, class Mask>
void Select(const LocalTensor<T>& dst, const LocalTensor<Mask>& selMask, const LocalTensor<T>& src0,
            std::common_type_t<T> scalar, SELMODE mode, uint32_t count, Here here = Here::now()) {
  const auto other = [scalar] { return [scalar](int64_t) { return scalar; }; };
  emulation::select_all(here, dst, selMask, src0, mode, SELMODE::VSEL_TENSOR_SCALAR_MODE, other, count);
}

}  // namespace AscendC
