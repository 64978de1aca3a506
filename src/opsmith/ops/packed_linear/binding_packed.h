// What the memory safety of products with quantized weights needs.
#pragma once

#include "binding.h"
#include "packed_linear/packed_linear.h"

namespace opsmith {

enum : int64_t { kPlain, kDynamic, kHalf, kNested, kFloat8, kFloat4 };  // formats.py: Scales

// The weights [n, k] that packed tensors hold, of so many experts, which are their first dimension; of one and without it for 0.
inline QuantizedWeight packed_weight(const char* op, const Tensor& weight, const Tensor& scale,
                                     const Optional& zero, const Optional& outer, int64_t bits, int64_t group,
                                     int64_t scales, int64_t n, int64_t k, int64_t experts = 0) {
  using torch::headeronly::ScalarType;
  const auto round_up = [](int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; };
  STD_TORCH_CHECK(bits == 8 || bits == 4, op, ": weights have 8 or 4 bits, not ", bits);
  const bool half = scales == kHalf, nested = scales == kNested, dynamic = scales == kDynamic,
             floats = scales == kFloat8, small = scales == kFloat4;
  STD_TORCH_CHECK(scales == kPlain || dynamic || half || nested || floats || small, op,
                  ": no scales of kind ", scales);
  const bool apart = group == 16 ? nested : group == 32 || group == 64 || group == 128;
  const bool whole = group == 0 || (floats && group == 128);
  const bool fits = small            ? bits == 4 && group == 32
                    : half || nested ? apart
                    : bits == 8      ? whole
                                     : apart && !floats;
  STD_TORCH_CHECK(fits, op, ": no group of ", group, " for ", bits, " bits");
  STD_TORCH_CHECK(!dynamic || bits == 8, op, ": with dynamic, weights have 8 bits");
  STD_TORCH_CHECK(outer.has_value() == nested, op, ": outer belongs to scales of kind ", kNested);
  // Rows may be columns of a larger tensor: the scales of a layer that shares its packed weight with others.
  const auto has = [&](const Tensor& t, ScalarType type, std::initializer_list<int64_t> sizes) {
    const int64_t lead = experts > 0, dim = lead + int64_t(sizes.size());
    return t.dim() == dim && (!lead || t.size(0) == experts) && t.scalar_type() == type &&
           std::equal(sizes.begin(), sizes.end(), t.sizes().begin() + lead) &&
           (*(sizes.end() - 1) < 2 || t.stride(dim - 1) == 1);
  };
  const int64_t rows = round_up(n, kLeastPanel), bytes = round_up(k, kDepth) * bits / 8;
  STD_TORCH_CHECK(has(weight, ScalarType::Byte, {rows, bytes}) && weight.is_contiguous(), op,
                  ": the packed weight must be a contiguous uint8 [", rows, ", ", bytes, "]");
  const int64_t groups = group ? (k + group - 1) / group : 0, blocks = (k + kSuper - 1) / kSuper;
  if (group == 0) {
    STD_TORCH_CHECK(has(scale, ScalarType::Float, {n}), op, ": scale must be a contiguous float32 [", n, "]");
  } else {
    const auto type = nested   ? ScalarType::Char
                      : half   ? ScalarType::Half
                      : floats ? ScalarType::Float
                      : small  ? ScalarType::Byte
                               : ScalarType::BFloat16;
    const bool others = scales == kPlain && has(scale, ScalarType::Half, {groups, n});  // of GPTQ and AWQ
    STD_TORCH_CHECK(others || has(scale, type, {groups, n}), op, ": scale must be a ",
                    torch::headeronly::toString(type), " [", groups, ", ", n, "] with contiguous rows");
    STD_TORCH_CHECK(!zero || has(*zero, ScalarType::Char, {groups, n}), op, ": zero must be an int8 [",
                    groups, ", ", n, "] with contiguous rows");
  }
  STD_TORCH_CHECK(!zero || (group > 0 && !half && !floats && !small), op, ": zeros belong to groups");
  STD_TORCH_CHECK(!outer || has(*outer, ScalarType::Half, {zero ? 2 : 1, blocks, n}), op,
                  ": outer must be a float16 [", zero ? 2 : 1, ", ", blocks, ", ", n,
                  "] with contiguous rows");
  const View packed{weight.data_ptr(), DType::i8, weight.dim(), weight.sizes().data(),
                    weight.strides().data()};
  const View steps{scale.data_ptr(), small ? DType::i8 : dtype_of(scale), scale.dim(), scale.sizes().data(),
                   scale.strides().data()};
  return {packed, steps, view_of(zero), view_of(outer), bits, group, floats};
}

}  // namespace opsmith
