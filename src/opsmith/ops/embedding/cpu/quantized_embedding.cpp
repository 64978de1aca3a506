// Rows of an int8 table, each dequantized by its own scale while it is gathered.
#include "embedding.h"
#include "rows.h"

namespace opsmith {
namespace {

constexpr int64_t task_elements = 1 << 14;
constexpr int64_t line = 64;

// Threads meet in these counters. An increment that is lost between two of them only makes a count a little lower, so
// none of them waits for the bus.
inline void count(int32_t* counter) {
  __atomic_store_n(counter, __atomic_load_n(counter, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

struct Table {
  const int8_t* rows;
  const float* scale;
  int64_t n, pitch, scale_step;

  void ask(int64_t v) const {
    prefetch(scale + v * scale_step);
    for (int64_t b = 0; b < n; b += line) prefetch(rows + v * pitch + b);
  }
};

template <class Id, class T>
void gather(const View& ids, const Table& table, int64_t ahead, const RowCache& cache, const View& y) {
  const int64_t tokens = ids.sizes[0], n = table.n, step = ids.strides[0];
  const Id* id = ids.as<Id>();
  const bool past_cache = outlives_cache(tokens * n * int64_t(sizeof(T))) && can_stream(y.as<T>()) &&
                          y.strides[0] % W == 0;
  const int32_t* slots = cache.slots.as<int32_t>();
  int32_t* counts = cache.counts.as<int32_t>();
  const uint32_t cached = slots ? uint32_t(cache.rows.sizes[0]) : 0;
  // Whatever slots hold, nothing outside the cached rows is read.
  auto is_cached = [&](int64_t v) { return slots && uint32_t(slots[v]) < cached; };
  parallel_for(tokens, row_grain(n, task_elements), [&](int64_t begin, int64_t end) {
    int64_t hits = 0;
    auto ask = [&](int64_t t) {
      const int64_t v = int64_t(id[t * step]);
      if (!is_cached(v)) table.ask(v);
    };
    for (int64_t t = begin; t < std::min(begin + ahead, end); ++t) ask(t);
    for (int64_t t = begin; t < end; ++t) {
      if (ahead > 0 && t + ahead < end) ask(t + ahead);
      const int64_t v = int64_t(id[t * step]);
      T* out = y.as<T>() + t * y.strides[0];
      if (counts) count(counts + v);
      if (is_cached(v)) {
        ++hits;
        const T* row = cache.rows.as<T>() + slots[v] * cache.rows.strides[0];
        for_lanes(n, [&](int64_t i, auto k) { put(out + i, load(row + i, k), k, past_cache); });
        continue;
      }
      const int8_t* row = table.rows + v * table.pitch;
      const Vec scale = splat(table.scale[v * table.scale_step]);
      for_lanes(n, [&](int64_t i, auto k) { put(out + i, load(row + i, k) * scale, k, past_cache); });
    }
    if (past_cache) stream_fence();
    if (cache.stats.defined()) {
      __atomic_fetch_add(cache.stats.as<int64_t>(), hits, __ATOMIC_RELAXED);
      __atomic_fetch_add(cache.stats.as<int64_t>() + 1, end - begin, __ATOMIC_RELAXED);
    }
  });
}

}  // namespace

void quantized_embedding(View ids, View table, View scale, int64_t ahead, View next_ids,
                         const RowCache& cache, View y) {
  const Table rows{table.as<int8_t>(), scale.as<float>(), table.sizes[1], table.strides[0], scale.strides[0]};
  with_id_type(ids.dtype, [&]<class Id>(Id*) {
    with_float_type(y.dtype, [&]<class T>(T*) { gather<Id, T>(ids, rows, ahead, cache, y); });
  });
  if (!next_ids.defined()) return;
  for (int64_t t = 0; t < next_ids.sizes[0]; ++t) rows.ask(integer_at(next_ids, t * next_ids.strides[0]));
}

}  // namespace opsmith
