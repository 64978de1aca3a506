// New keys and values to their slots of a cache in blocks: copied, or rounded to int8 with a scale for each head.
#include "fixed_point.h"
#include "paged_attention/paged_attention.h"
#include "rows.h"

namespace opsmith {
namespace {

constexpr int64_t kGrain = 16 << 10;  // elements worth a thread

// x = scale * to, |to| <= 127; the scale, that of the largest element, is returned: NaN where an element is not finite.
template <class T>
float quantize(const T* x, int64_t n, int8_t* to) {
  const float most = largest_finite(x, n), inverse = most > kLeast ? 127.0f / most : 0.0f;
  for_lanes(n, [&](int64_t i, auto lanes) {
    store_low_bytes(to + i, nearest_integers(keep(load(x + i, lanes), lanes, 0.0f) * inverse), lanes);
  });
  return most / 127.0f;
}

template <class T>
void write(const View& x, int64_t token, int64_t head, const View& cache, const View& scale, int64_t block,
           int64_t slot) {
  const int64_t row = token / x.sizes[1] * x.strides[0] + token % x.sizes[1] * x.strides[1];
  const T* from = x.as<T>() + row + head * x.strides[2];
  const int64_t at = block * cache.strides[0] + slot * cache.strides[1] + head * cache.strides[2],
                n = x.sizes[3];
  if (scale.defined()) {
    scale.as<float>()[block * scale.strides[0] + slot * scale.strides[1] + head * scale.strides[2]] = quantize(
        from, n, cache.as<int8_t>() + at);
  } else {
    std::memcpy(cache.as<T>() + at, from, size_t(n) * sizeof(T));
  }
}

}  // namespace

void reshape_and_cache(const View& k, const View& v, const View& slots, const PagedCache& cache) {
  const int64_t tokens = k.sizes[0] * k.sizes[1], heads = k.sizes[2], size = cache.block_size();
  with_float_type(k.dtype, [&]<class T>(T*) {
    parallel_for(tokens, row_grain(heads * (k.sizes[3] + v.sizes[3]), kGrain),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t token = begin; token < end; ++token) {
                     const int64_t slot = integer_at(slots, token * slots.strides[0]);
                     if (slot < 0) continue;
                     for (int64_t head = 0; head < heads; ++head) {
                       write<T>(k, token, head, cache.keys, cache.key_scale, slot / size, slot % size);
                       write<T>(v, token, head, cache.values, cache.value_scale, slot / size, slot % size);
                     }
                   }
                 });
  });
}

}  // namespace opsmith
