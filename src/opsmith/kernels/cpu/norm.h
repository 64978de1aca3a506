// What the norms share: weights in either type, and the walk over rows in which reading and writing overlap.
#pragma once

#include <memory>
#include <type_traits>

#include "rows.h"

namespace opsmith {

constexpr int norm_block = 8;           // vectors that enter the statistics together
constexpr int64_t norm_task = 16384;    // elements worth a thread
constexpr int64_t norm_ahead = 1024;    // bytes by which the walk asks for memory ahead of its reading

// A weight as P, [n]: as it is, converted where it came in another type, shifted by `offset`, or `missing` throughout.
template <class P>
class Parameter {
 public:
  Parameter(const View& v, int64_t n, float missing, float offset = 0.0f) {
    if (v.defined() && offset == 0.0f && is<P>(v.dtype)) {
      data_ = v.as<P>();
      return;
    }
    memory_.reset(new P[size_t(n)]);
    if (!v.defined()) {
      for (int64_t i = 0; i < n; ++i) memory_[i] = from_float<P>(missing);
    } else {
      with_float_type(v.dtype, [&](auto* t) {
        const auto* from = v.as<std::remove_pointer_t<decltype(t)>>();
        for_lanes(n, [&](int64_t i, auto k) { store(memory_.get() + i, load(from + i, k) + offset, k); });
      });
    }
    data_ = memory_.get();
  }
  const P* data() const { return data_; }

 private:
  template <class Q>
  static bool is(DType dtype) {
    return dtype == (std::is_same_v<Q, float> ? DType::f32 : std::is_same_v<Q, bfloat16> ? DType::bf16 : DType::f16);
  }
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

// One walk along a row: `value(i, k)` enters the statistics, `write(i, k)` does what it does; either may be nullptr.
template <class Stats, class Value, class Write>
inline __attribute__((always_inline)) void walk(int64_t n, Stats& stats, const Value& value, const Write& write) {
  constexpr bool reads = !std::is_null_pointer_v<Value>, writes = !std::is_null_pointer_v<Write>;
  auto step = [&](int64_t first, auto size) __attribute__((always_inline)) {
    constexpr int count = decltype(size)::value;
    if constexpr (reads) {
      Vec v[count];
#pragma GCC unroll 8
      for (int j = 0; j < count; ++j) v[j] = value(first + j * W, Full{});
      stats.template merge<count>(v);
    }
    if constexpr (writes) {
#pragma GCC unroll 8
      for (int j = 0; j < count; ++j) write(first + j * W, Full{});
    }
  };
  int64_t i = 0;
  for (; i + norm_block * W <= n; i += norm_block * W) step(i, std::integral_constant<int, norm_block>{});
  for (; i + W <= n; i += W) step(i, std::integral_constant<int, 1>{});
  if (i < n) {
    const Part k{int(n - i)};
    if constexpr (reads) stats.merge_rest(value(i, k), k);
    if constexpr (writes) write(i, k);
  }
}

// The forward pass of a norm. The statistics of each row are taken in the walk in which the row before is written, so
// that memory is read and written at all times and a row is still in cache when its turn to be written comes.
// `normalizer(r, stats)` gives the function (value, i, k) that makes a row's output of its input; with a residual the
// input is the sum, rounded as it is stored.
template <class T, class Stats, class Normalizer>
void norm_forward(const View& x, const View& residual, const View& y, const View& summed,
                  const Normalizer& normalizer) {
  const int64_t rows = x.sizes[0], n = x.sizes[1];
  const bool past_cache = outlives_cache(rows * n * int64_t(sizeof(T)));
  auto row = [](const View& v, int64_t r) { return v.defined() ? v.as<T>() + r * v.strides[0] : nullptr; };
  auto with_values = [&](const auto& value_of) {
    auto writer_of = [&](int64_t r, const Stats& stats) {
      T *const yr = row(y, r), *const sr = row(summed, r);
      const bool stream_y = past_cache && can_stream(yr), stream_s = past_cache && can_stream(sr);
      const auto value = value_of(r);
      const auto normalized = normalizer(r, stats);
      return [=](int64_t i, auto k) {
        const Vec v = value(i, k);
        if (sr) put(sr + i, v, k, stream_s);
        put(yr + i, normalized(v, i, k), k, stream_y);
      };
    };
    parallel_for(rows, row_grain(n, norm_task), [&](int64_t begin, int64_t end) {
      Stats stats;
      walk(n, stats, value_of(begin), nullptr);
      for (int64_t r = begin; r + 1 < end; ++r) {
        const auto write = writer_of(r, stats);
        Stats next;
        walk(n, next, value_of(r + 1), write);
        stats = next;
      }
      walk(n, stats, nullptr, writer_of(end - 1, stats));
      if (past_cache) stream_fence();
    });
  };
  if (!residual.defined()) {
    with_values([&](int64_t r) {
      const T* const xr = row(x, r);
      return [=](int64_t i, auto k) {
        prefetch(reinterpret_cast<const char*>(xr + i) + norm_ahead);
        return load(xr + i, k);
      };
    });
  } else {
    with_values([&](int64_t r) {
      const T *const xr = row(x, r), *const ar = row(residual, r);
      return [=](int64_t i, auto k) {
        prefetch(reinterpret_cast<const char*>(xr + i) + norm_ahead);
        prefetch(reinterpret_cast<const char*>(ar + i) + norm_ahead);
        return round_to<T>(load(xr + i, k) + load(ar + i, k));
      };
    });
  }
}

}  // namespace opsmith
