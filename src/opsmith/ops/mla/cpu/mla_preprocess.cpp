// MLA pre-processing by its form, and the keys' part of it for itself.
#include "mla_region.h"

namespace opsmith {

int64_t mla_bad_slot(View slots, int64_t end) {
  for (int64_t t = 0; t < slots.sizes[0]; ++t) {
    const int64_t slot = mla_slot(slots, t);
    if (slot < -1 || slot >= end) return t;
  }
  return -1;
}

void mla_kv_epilogue(View a, View gamma2, MlaRotation rotation, View slots, int64_t rope, float eps,
                     MlaCacheView cache) {
  const FloatVector gamma(gamma2);
  const int64_t kv_lora = gamma2.sizes[0];
  with_float_type(a.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    parallel_for(a.sizes[0], row_grain(kv_lora + rope, 8192), [&](int64_t begin, int64_t end) {
      float* const memory = scratch(mla_key_memory(kv_lora, rope));
      for (int64_t i = begin; i < end; ++i) {
        mla_write_key(a.as<T>() + i * a.strides[0], kv_lora, rope, gamma.data(), rotation, i,
                      mla_slot(slots, i), eps, cache, memory);
      }
    });
  });
}

void mla_preprocess(const MlaCall& call) {
  if (call.x.sizes[0] == 0) return;
  switch (call.quant) {
    case MlaQuant::none: return mla_in_floats(call);
    case MlaQuant::per_tensor:
    case MlaQuant::per_token: return mla_in_integers(call);
    case MlaQuant::weight_int8:
    case MlaQuant::weight_int4: return mla_with_small_weights(call);
  }
}

}  // namespace opsmith
