// Embedding: gathers rows of a table; backward adds gradients up per row of the table, so that threads never race.
#include <algorithm>
#include <cstring>
#include <vector>

#include "embedding.h"
#include "rows.h"

namespace opsmith {
namespace {

constexpr int64_t task_bytes = 1 << 16;
constexpr int64_t rows_ahead = 2;
constexpr int64_t few_ids = 32;  // rows for each id from which the ids are sorted

inline int64_t element_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Copies a row, whatever it holds; past the cache in whole vectors where `streaming`, which takes an aligned `to`. Rows lie
// anywhere in the table, so that no CPU foresees the next one: `soon` is asked for meanwhile.
inline void copy_row(char* to, const char* from, const char* soon, int64_t bytes, bool streaming) {
  int64_t b = 0;
  for (; b + 64 <= bytes; b += 64) {
    prefetch(soon + b);
    for (int64_t v = b; v < b + 64; v += int64_t(sizeof(Vec))) {
      put(reinterpret_cast<float*>(to + v), load(reinterpret_cast<const float*>(from + v)), Full{},
          streaming);
    }
  }
  std::memcpy(to + b, from + b, size_t(bytes - b));
}

template <class Id>
void gather(const View& ids, const View& table, const View& y) {
  const int64_t tokens = ids.sizes[0], size = element_bytes(y.dtype), bytes = y.sizes[1] * size;
  const int64_t step = ids.strides[0], pitch = table.strides[0] * size, out_pitch = y.strides[0] * size;
  const char* rows = table.as<char>();
  char* out = y.as<char>();
  const Id* id = ids.as<Id>();
  const bool streaming = outlives_cache(tokens * bytes) && can_stream(reinterpret_cast<float*>(out)) &&
                         out_pitch % sizeof(Vec) == 0;
  parallel_for(tokens, row_grain(bytes, task_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      char* const to = out + t * out_pitch;
      const int64_t soon = std::min(t + rows_ahead, end - 1);
      look_ahead_of_row(to, bytes);
      copy_row(to, rows + int64_t(id[t * step]) * pitch, rows + int64_t(id[soon * step]) * pitch, bytes,
               streaming);
    }
    if (streaming) stream_fence();
  });
}

// Where an id stands among the ids.
struct Place {
  int64_t row, at;
  bool operator<(const Place& other) const { return row < other.row || (row == other.row && at < other.at); }
};

// All places, by row and then in order. Rows are counted, unless there are so many that sorting the ids takes less time.
std::vector<Place> by_row(const View& ids, int64_t rows) {
  const int64_t tokens = ids.sizes[0];
  const auto id = [&](int64_t t) { return integer_at(ids, t * ids.strides[0]); };
  std::vector<Place> places(size_t(tokens), Place{});
  if (tokens * few_ids < rows) {
    for (int64_t t = 0; t < tokens; ++t) places[size_t(t)] = {id(t), t};
    std::sort(places.begin(), places.end());
    return places;
  }
  std::vector<int64_t> ends(size_t(rows), 0);
  for (int64_t t = 0; t < tokens; ++t) ++ends[size_t(id(t))];
  int64_t end = 0;
  for (int64_t& e : ends) e = end += e;
  for (int64_t t = tokens - 1; t >= 0; --t) places[size_t(--ends[size_t(id(t))])] = {id(t), t};
  return places;
}

template <class T>
void scatter(const std::vector<Place>& places, const View& dy, int64_t padding_idx, bool zeroed,
             const View& dtable) {
  const int64_t rows = dtable.sizes[0], n = dtable.sizes[1], pitch = dtable.strides[0];
  const auto gradient = [&](const Place& p) { return dy.as<T>() + p.at * dy.strides[0]; };
  const auto zero = [&](int64_t begin, int64_t end) {
    if (zeroed) return;
    T* const from = dtable.as<T>() + begin * pitch;
    if (pitch == n) {
      std::memset(from, 0, size_t((end - begin) * n) * sizeof(T));
    } else {
      for (int64_t v = begin; v < end; ++v) std::memset(from + (v - begin) * pitch, 0, size_t(n) * sizeof(T));
    }
  };
  parallel_for(rows, row_grain(n * int64_t(sizeof(T)), task_bytes), [&](int64_t begin, int64_t end) {
    float* const sums = scratch(round_up(n, W));
    const auto first = std::lower_bound(places.begin(), places.end(), Place{begin, 0});
    const auto last = std::lower_bound(first, places.end(), Place{end, 0});
    int64_t written = begin;  // rows before this one
    for (auto p = first, next = p; p != last; p = next) {
      next = std::find_if(p, last, [&](const Place& other) { return other.row != p->row; });
      if (p->row == padding_idx) continue;
      zero(written, p->row);
      written = p->row + 1;
      T* out = dtable.as<T>() + p->row * pitch;
      if (next - p == 1) {
        std::memcpy(out, gradient(*p), size_t(n) * sizeof(T));
        continue;
      }
      std::fill_n(sums, n, 0.0f);
      for (auto one = p; one != next; ++one) {
        const T* g = gradient(*one);
        for_lanes(n, [&](int64_t i, auto k) { store(sums + i, load(sums + i, k) + load(g + i, k), k); });
      }
      for_lanes(n, [&](int64_t i, auto k) { store(out + i, load(sums + i, k), k); });
    }
    zero(written, end);
  });
}

}  // namespace

int64_t first_bad_id(View ids, int64_t rows) {
  int64_t bad = -1;
  with_id_type(ids.dtype, [&]<class Id>(Id*) {
    const Id* id = ids.as<Id>();
    const int64_t tokens = ids.sizes[0], step = ids.strides[0];
    bool outside = false;  // without an exit in the loop, it is vectorized
    for (int64_t i = 0; i < tokens; ++i) outside |= uint64_t(int64_t(id[i * step])) >= uint64_t(rows);
    for (int64_t i = 0; outside && bad < 0; ++i) {
      if (uint64_t(int64_t(id[i * step])) >= uint64_t(rows)) bad = i;
    }
  });
  return bad;
}

void embedding(View ids, View table, View y) {
  if (y.sizes[1] == 0) return;  // such tensors may have no memory, which not even a copy of nothing may touch
  with_id_type(ids.dtype, [&]<class Id>(Id*) { gather<Id>(ids, table, y); });
}

void embedding_backward(View dy, View ids, int64_t padding_idx, bool zeroed, View dtable) {
  if (dtable.sizes[1] == 0) return;
  const auto places = by_row(ids, dtable.sizes[0]);
  with_float_type(dtable.dtype, [&]<class T>(T*) { scatter<T>(places, dy, padding_idx, zeroed, dtable); });
}

}  // namespace opsmith
