// Rows that an operator may be given beside others, and that must then be like them.
#pragma once

#include "binding.h"

namespace opsmith {

class RowsLike {
 public:
  RowsLike(const char* op, const char* name, const std::optional<Tensor>& t, const Rows& other) {
    if (!t) return;
    rows_.emplace(op, name, *t);
    STD_TORCH_CHECK(rows_->like(other), op, ": ", name, " must be rows like the input's, in its dtype");
  }

  View view() const { return rows_ ? rows_->view() : View{}; }

 private:
  std::optional<Rows> rows_;
};

}  // namespace opsmith
