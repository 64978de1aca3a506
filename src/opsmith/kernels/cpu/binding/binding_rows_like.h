// What generated bindings check beside binding.h: rows that must be like others, and numbers.
#pragma once

#include "binding.h"

namespace opsmith {

class RowsLike {
 public:
  RowsLike(const char* op, const char* name, const Optional& t, const Rows& other) {
    if (!t) return;
    rows_.emplace(op, name, *t);
    STD_TORCH_CHECK(rows_->like(other), op, ": ", name, " must be rows like the input's, in its dtype");
  }

  View view() const { return rows_ ? rows_->view() : View{}; }

 private:
  std::optional<Rows> rows_;
};

inline bool is_number(const Tensor& t) { return t.numel() == 1 && dtype_of(t) == DType::f32; }

inline void check_number_each(const char* op, const char* name, const Optional& t, int64_t rows) {
  STD_TORCH_CHECK(!t || (t->numel() == rows && t->is_contiguous() && dtype_of(*t) == DType::f32), op, ": ",
                  name, " must be contiguous float32, one for each row");
}

}  // namespace opsmith
