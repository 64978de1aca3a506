// What the norms share: weights in either type, and the walk over rows in which reading and writing overlap.
#pragma once

#include <memory>
#include <type_traits>

#include "pair.h"

namespace opsmith {

constexpr int64_t norm_task = 16384;   // elements worth a thread
constexpr int64_t norm_ahead = 16384;  // bytes by which memory is asked for before it is read

// A weight of rows of T, read as P (T or float): as it is where it has that type and order, else a copy, with `offset`
// added; `missing` throughout where there is none.
template <class T, class P>
class Parameter {
 public:
  Parameter(const View& v, int64_t n, float missing, float offset = 0.0f) {
    if (v.defined() && offset == 0.0f && std::is_same_v<T, P>) {
      data_ = v.as<P>();
      return;
    }
    memory_.reset(new P[size_t(n)]);
    data_ = memory_.get();
    if (!v.defined()) {
      for (int64_t i = 0; i < n; ++i) memory_[i] = from_float<P>(missing);
    } else if constexpr (std::is_same_v<P, float>) {
      with_float_type(v.dtype, [&](auto* t) {
        in_pair_order<T>(v.as<std::remove_pointer_t<decltype(t)>>(), n, memory_.get());
      });
      for_lanes(n, [&](int64_t i, auto k) { store(memory_.get() + i, load(memory_.get() + i, k) + offset, k); });
    }
  }
  const P* data() const { return data_; }

 private:
  std::unique_ptr<P[]> memory_;
  const P* data_;
};

// Calls f with a null pointer of the type in which weights are read: float where one of them is, or asked for, else T.
template <class T, class F>
void with_parameter_type(bool wide, const View& weight, const View& bias, F&& f) {
  auto is_float = [](const View& v) { return v.defined() && v.dtype == DType::f32; };
  if (wide || is_float(weight) || is_float(bias)) {
    f(static_cast<float*>(nullptr));
  } else {
    f(static_cast<T*>(nullptr));
  }
}

// As a tree: short chains, so that one block overlaps the next.
template <int k>
inline Vec add_up(const Vec* v) {
  if constexpr (k == 1) {
    return v[0];
  } else {
    return add_up<k / 2>(v) + add_up<k / 2>(v + k / 2);
  }
}

// Rows begin on lines of the cache, so that pairs may be stored past it.
template <class T>
inline bool can_stream_rows(const View& v) {
  return can_stream_both(v.as<T>()) && v.strides[0] * int64_t(sizeof(T)) % 64 == 0;
}

// How far ahead of a row of `v` to fetch, in elements: whole rows, unless these stand one behind the other.
template <class T>
inline int64_t fetch_distance(const View& v) {
  const int64_t n = v.sizes[1], far = norm_ahead / int64_t(sizeof(T));
  return v.strides[0] == n ? far : std::max<int64_t>(1, far / n) * v.strides[0];
}

// All lines of the pair at p.
template <class T>
inline void fetch_pair(const T* p) {
  for (int j = 0; j < 2 * W; j += 64 / int(sizeof(T))) prefetch_far(p + j);
}

// A row of x as it enters the statistics.
template <class T>
struct Row {
  const T* x;
  int64_t ahead;

  template <class Lanes>
  auto operator()(int64_t i, Lanes k) const {
    if constexpr (std::is_same_v<Lanes, Both>) fetch_pair(x + ahead + i);
    return load(x + i, k);
  }
};

// A row of x + residual, rounded as it is stored: in `summed`, and in `kept`, where the second look finds it. What is not
// written past the cache is read before it is written, and so asked for as early as what is read.
template <class T, bool streaming>
struct SumRow {
  const T *x, *residual;
  int64_t ahead, residual_ahead, summed_ahead;
  T *summed, *kept;

  template <class Lanes>
  auto operator()(int64_t i, Lanes k) const {
    if constexpr (std::is_same_v<Lanes, Both>) {
      fetch_pair(x + ahead + i);
      fetch_pair(residual + residual_ahead + i);
      if constexpr (!streaming) fetch_pair(summed + summed_ahead + i);
    }
    const auto sum = load(x + i, k) + load(residual + i, k);
    put(kept + i, sum, k, false);
    put(summed + i, sum, k, streaming);
    return round_to<T>(sum);
  }
};

// One walk along a row: `value(i, k)` enters the statistics, `write(i, k)` does what it does; either may be nullptr.
template <class Stats, class Value, class Write>
inline __attribute__((always_inline)) void walk(int64_t n, Stats& stats, const Value& value, const Write& write) {
  constexpr bool reads = !std::is_null_pointer_v<Value>, writes = !std::is_null_pointer_v<Write>;
  const int64_t pairs = paired(n);
  int64_t i = 0;
  for (; i < pairs; i += 8 * W) {
    if constexpr (reads) {
      Vec v[8];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const Pair pair = value(i + 2 * j * W, Both{});
        v[2 * j] = pair.a;
        v[2 * j + 1] = pair.b;
      }
      stats.template merge<8>(v);
    }
    if constexpr (writes) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) write(i + 2 * j * W, Both{});
    }
  }
  for (; i + W <= n; i += W) {
    if constexpr (reads) {
      Vec v[1] = {value(i, Full{})};
      stats.template merge<1>(v);
    }
    if constexpr (writes) write(i, Full{});
  }
  if (i < n) {
    const Part k{int(n - i)};
    if constexpr (reads) stats.merge_rest(value(i, k), k);
    if constexpr (writes) write(i, k);
  }
}

// The forward pass of a norm over rows begin..end. The statistics of each row are taken in the walk in which the row
// before is written, so that memory is read and written at all times and a row is still in cache when its turn to be
// written comes. `normalizer(r, stats)` gives the function (value, i, k) that makes a row's output of its input.
template <class T, class Stats, bool with_residual, bool streaming, class Normalizer>
void norm_rows(int64_t begin, int64_t end, const View& x, const View& residual, const View& y, const View& summed,
               const Normalizer& normalizer) {
  const int64_t n = x.sizes[1], ahead = fetch_distance<T>(x);
  const int64_t residual_ahead = with_residual ? fetch_distance<T>(residual) : 0, room = round_up(n, 64);
  const int64_t y_ahead = fetch_distance<T>(y), summed_ahead = with_residual ? fetch_distance<T>(summed) : 0;
  T* const kept = with_residual ? reinterpret_cast<T*>(scratch(2 * room)) : nullptr;
  auto row = [](const View& v, int64_t r) { return v.as<T>() + r * v.strides[0]; };
  auto value_of = [=](int64_t r) {
    if constexpr (with_residual) {
      return SumRow<T, streaming>{row(x, r),    row(residual, r), ahead, residual_ahead,
                                  summed_ahead, row(summed, r),   kept + (r & 1) * room};
    } else {
      return Row<T>{row(x, r), ahead};
    }
  };
  auto writer_of = [=](int64_t r, const Stats& stats) {
    const T* const from = with_residual ? kept + (r & 1) * room : row(x, r);
    return [yr = row(y, r), from, y_ahead, normalized = normalizer(r, stats)](int64_t i, auto k) {
      if constexpr (!streaming && std::is_same_v<decltype(k), Both>) fetch_pair(yr + y_ahead + i);
      put(yr + i, normalized(load(from + i, k), i, k), k, streaming);
    };
  };
  Stats stats;
  walk(n, stats, value_of(begin), nullptr);
  for (int64_t r = begin; r + 1 < end; ++r) {
    const auto write = writer_of(r, stats);
    Stats next;
    walk(n, next, value_of(r + 1), write);
    stats = next;
  }
  walk(n, stats, nullptr, writer_of(end - 1, stats));
  if (streaming) stream_fence();
}

template <class T, class Stats, class Normalizer>
void norm_forward(const View& x, const View& residual, const View& y, const View& summed,
                  const Normalizer& normalizer) {
  const int64_t rows = x.sizes[0], n = x.sizes[1];
  const bool streaming = outlives_cache(rows * n * int64_t(sizeof(T))) && can_stream_rows<T>(y) &&
                         (!summed.defined() || can_stream_rows<T>(summed));
  auto run = [&](auto with_residual, auto past_cache) {
    parallel_for(rows, row_grain(n, norm_task), [&](int64_t begin, int64_t end) {
      norm_rows<T, Stats, with_residual.value, past_cache.value>(begin, end, x, residual, y, summed, normalizer);
    });
  };
  auto with = [&](auto with_residual) {
    streaming ? run(with_residual, std::true_type{}) : run(with_residual, std::false_type{});
  };
  residual.defined() ? with(std::true_type{}) : with(std::false_type{});
}

}  // namespace opsmith
