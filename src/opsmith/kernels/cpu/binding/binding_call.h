// The checks that the memory safety of a project's kernels rests on, for the bindings of all its back ends.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "binding.h"

namespace opsmith {

// One call of an operator: every tensor is contiguous and on one device, sizes under one symbol agree, and the dtypes are a combination
// that the operator names. A size is a symbol, a number, or "...": any leading dimensions, the same for all.
class Call {
 public:
  explicit Call(const char* op) : op_(op) {}

  void tensor(const char* name, const Tensor& t, std::initializer_list<const char*> sizes) {
    STD_TORCH_CHECK(t.is_contiguous(), op_, ": ", name, " must be contiguous");
    const Place place{t.device_type, t.device_index};
    if (!place_) place_ = place;
    STD_TORCH_CHECK(place == *place_, op_, ": ", name, " is on another device than the tensors before it");
    const bool leading = sizes.size() > 0 && std::string_view(*sizes.begin()) == "...";
    const int64_t dims = int64_t(sizes.size()) - leading, first = t.dim() - dims;
    STD_TORCH_CHECK(leading ? first >= 0 : first == 0, op_, ": ", name, " must have ",
                    leading ? "at least " : "", dims, " dimension(s), got ", t.dim());
    if (leading) {
      const int64_t* const from = t.sizes().data();
      int64_t product = 1;
      for (int64_t d = 0; d < first; ++d) product *= from[d];
      agree(name, "...", product);
      if (leads_ < 0) lead_ = from, leads_ = first;
      STD_TORCH_CHECK(std::equal(from, from + first, lead_, lead_ + leads_), op_, ": ", name,
                      " must have the leading dimensions of the tensors before it");
    }
    int64_t d = first;
    for (const char* const* size = sizes.begin() + leading; size != sizes.end(); ++size)
      agree(name, *size, t.size(d++));
  }

  void tensor(const char* name, const std::optional<Tensor>& t, std::initializer_list<const char*> sizes) {
    if (t) tensor(name, *t, sizes);
  }

  // The dtypes of all tensors at once, in any of these combinations; an output that is not there has the one asked for.
  void dtypes(std::initializer_list<std::optional<DType>> got,
              std::initializer_list<std::initializer_list<DType>> columns) {
    for (const auto& column : columns) {
      bool fits = true;
      const DType* expected = column.begin();
      for (const auto& one : got) fits = (!one || *one == *expected) && (++expected, fits);
      if (fits) return;
    }
    STD_TORCH_CHECK(false, op_, ": the tensors' dtypes are no combination that the operator takes");
  }

 private:
  void agree(const char* name, std::string_view symbol, int64_t size) {
    if (symbol[0] >= '0' && symbol[0] <= '9') {
      STD_TORCH_CHECK(std::to_string(size) == symbol, op_, ": ", name, " has a size of ", size, ", expected ",
                      std::string(symbol));
      return;
    }
    for (const auto& [known, before] : sizes_) {
      if (known != symbol) continue;
      STD_TORCH_CHECK(before == size, op_, ": ", name, " has ", size, " where ", std::string(symbol), " is ",
                      before);
      return;
    }
    sizes_.emplace_back(symbol, size);
  }

  using Place = std::pair<torch::headeronly::DeviceType, int32_t>;

  const char* op_;
  std::optional<Place> place_;
  const int64_t* lead_ = nullptr;  // of the first tensor that has leading dimensions
  int64_t leads_ = -1;
  std::vector<std::pair<std::string_view, int64_t>> sizes_;
};

inline std::optional<DType> dtype_of(const std::optional<Tensor>& t) {
  if (!t) return std::nullopt;
  return dtype_of(*t);
}

}  // namespace opsmith
