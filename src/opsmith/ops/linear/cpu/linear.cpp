// The linear layer: the product with bias, activation and residual behind it, while the sums are in cache.
#include "linear/linear_product.h"

namespace opsmith {

void linear_packed(View x, View packed, View bias, View residual, Activation activation, View y) {
  if (y.sizes[0] == 0 || y.sizes[1] == 0) return;
  with_float_type(x.dtype, [&]<class T>(T*) {
    const auto behind = epilogue<T>(bias, residual, activation, y);
    if (packed.dtype == x.dtype) return packed_product<T>(x, packed, 1, behind);
    packed_product<T, WideBFloatFormat>(x, packed, 1, behind);
  });
}

void linear_unpacked(View x, View weight, View bias, View residual, Activation activation, View y,
                     View before) {
  if (y.sizes[0] == 0 || y.sizes[1] == 0) return;
  with_float_type(x.dtype, [&]<class T>(T*) {
    plain_product<T>(x, weight, epilogue<T>(bias, residual, activation, y, before));
  });
}

}  // namespace opsmith
