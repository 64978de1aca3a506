// Packs a linear layer's weight into panels, once for many products.
#include "linear/linear_pack.h"

#include "rows.h"

namespace opsmith {

void linear_pack(View weight, View packed) {
  const int64_t n = weight.sizes[0], k = weight.sizes[1];
  const int64_t depth = packed.sizes[2] / elements_per_unit(weight.dtype);
  with_float_type(weight.dtype, [&]<class T>(T*) {
    parallel_for(ceil_div(n, kLinearPanel), row_grain(kLinearPanel * k, 16384),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t column = begin * kLinearPanel; column < std::min(n, end * kLinearPanel);
                        column += kLinearPanel) {
                     pack_block<T>(weight, column, std::min(kLinearPanel, n - column), 0, depth,
                                   packed.as<PackedUnit<T>>() + column * depth);
                   }
                 });
  });
}

}  // namespace opsmith
