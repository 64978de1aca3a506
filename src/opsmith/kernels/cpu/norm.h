// What the norms share: weights in either type, and the walk over rows in which reading and writing overlap.
#pragma once

#include <array>
#include <memory>
#include <type_traits>
#include <utility>

#include "schedules/row_statistics.h"

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
      with_float_type(v.dtype, [&]<class U>(U*) { in_pair_order<T>(v.as<U>(), n, memory_.get()); });
      for_lanes(n,
                [&](int64_t i, auto k) { store(memory_.get() + i, load(memory_.get() + i, k) + offset, k); });
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

// How far from an element of a row lies what is fetched when it is read: `far`, and from `turn` on `next`, where that is in
// another row than the one behind it.
struct Ahead {
  int64_t far, turn, next;

  int64_t operator()(int64_t i) const { return i < turn ? far : next; }
};

// For rows of `v` that are walked `rows` at a time.
template <class T, int rows>
inline Ahead fetch_ahead(const View& v) {
  const int64_t n = v.sizes[1];
  if constexpr (rows == 1) return {fetch_distance<T>(v), n, 0};
  const int64_t far = std::min(n, norm_ahead / (2 * int64_t(sizeof(T))));
  return {far, n - far, far - n + rows * v.strides[0]};
}

// A row of x as it enters the statistics.
template <class T>
struct Row {
  const T* x;
  Ahead ahead;

  template <class Lanes>
  auto operator()(int64_t i, Lanes k) const {
    if constexpr (std::is_same_v<Lanes, Both>) fetch_pair(x + ahead(i) + i);
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

// One walk along `rows` rows: where it `reads`, `value(g, i, k)` of row g enters its statistics; where it `writes`,
// `write(i, k)` does what it does. Asked once for a block of vectors, this costs nothing, and a walk for each of the three
// cases would take three times as long to compile.
template <int rows, class Stats, class Value, class Write>
inline __attribute__((always_inline)) void walk(int64_t n, bool reads, Stats* stats, const Value& value,
                                                bool writes, const Write& write) {
  const int64_t pairs = paired(n);
  int64_t i = 0;
  for (; i < pairs; i += 8 * W) {
    if (reads) {
#pragma GCC unroll 4
      for (int g = 0; g < rows; ++g) {
        Vec v[8];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const Pair pair = value(g, i + 2 * j * W, Both{});
          v[2 * j] = pair.a;
          v[2 * j + 1] = pair.b;
        }
        stats[g].template merge<8>(v);
      }
    }
    if (writes) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) write(i + 2 * j * W, Both{});
    }
  }
  for (; i + W <= n; i += W) {
    if (reads) {
      for (int g = 0; g < rows; ++g) {
        Vec v[1] = {value(g, i, Full{})};
        stats[g].template merge<1>(v);
      }
    }
    if (writes) write(i, Full{});
  }
  if (i < n) {
    const Part k{int(n - i)};
    if (reads) {
      for (int g = 0; g < rows; ++g) stats[g].add(value(g, i, k), k);
    }
    if (writes) write(i, k);
  }
}

// The forward pass of a norm over rows begin..end, `rows` at a time, which share the loads of the weights. The statistics of
// rows are taken in the walk in which those before them are written, so that memory is read and written at all times and a
// row is still in cache when its turn to be written comes. `parameters(i, k)` are the weights, `norm.of(r, stats)` is what
// a row's statistics come to, and `norm.apply(that, value, weights)` its output. With a residual, `rows` is 1.
template <class T, int rows, bool with_residual, bool streaming, class Parameters, class Norm>
void norm_rows(int64_t begin, int64_t end, const View& x, const View& residual, const View& y,
               const View& summed, const Parameters& parameters, const Norm& norm) {
  static_assert(rows == 1 || !with_residual);
  const int64_t n = x.sizes[1], room = round_up(n, 64), x_step = x.strides[0], y_step = y.strides[0];
  const Ahead ahead = fetch_ahead<T, rows>(x), y_ahead = fetch_ahead<T, rows>(y);
  const int64_t residual_ahead = with_residual ? fetch_distance<T>(residual) : 0;
  const int64_t summed_ahead = with_residual ? fetch_distance<T>(summed) : 0;
  T* const kept = with_residual ? reinterpret_cast<T*>(scratch(2 * room)) : nullptr;
  auto row = [](const View& v, int64_t r) { return v.as<T>() + r * v.strides[0]; };
  auto value_of = [=](int64_t r) {
    if constexpr (with_residual) {
      const SumRow<T, streaming> sum{
          row(x, r),      row(residual, r),     ahead.far, residual_ahead, summed_ahead,
          row(summed, r), kept + (r & 1) * room};
      return [=](int, int64_t i, auto k) { return sum(i, k); };
    } else {
      const Row<T> first{row(x, r), ahead};
      return [=](int g, int64_t i, auto k) { return Row<T>{first.x + g * x_step, first.ahead}(i, k); };
    }
  };
  std::array<typename Norm::Of, rows> of{};
  auto writer_of = [=, &parameters, &norm](int64_t r, const auto& of) {
    const T* const from = with_residual ? kept + (r & 1) * room : row(x, r);
    return [=, &norm, to = row(y, r)](int64_t i, auto k) {
      const auto weights = parameters(i, k);
#pragma GCC unroll 4
      for (int g = 0; g < rows; ++g) {
        T* const out = to + g * y_step + i;
        if constexpr (!streaming && std::is_same_v<decltype(k), Both>) fetch_pair(out + y_ahead(i));
        put(out, norm.apply(of[g], load(from + g * x_step + i, k), weights), k, streaming);
      }
    };
  };
  for (int64_t r = begin - rows; r < end; r += rows) {  // rows from r on are written, those after them read
    const bool reads = r + rows < end, writes = r >= begin;
    typename Norm::Stats stats[rows];
    walk<rows>(n, reads, stats, value_of(r + rows), writes, writer_of(r, of));
    if (!reads) break;
    for (int g = 0; g < rows; ++g) of[size_t(g)] = norm.of(r + rows + g, stats[g]);
  }
  if (streaming) stream_fence();
}

template <class T, class Parameters, class Norm>
void norm_forward(const View& x, const View& residual, const View& y, const View& summed,
                  const Parameters& parameters, const Norm& norm) {
  const int64_t rows = x.sizes[0], n = x.sizes[1];
  const int64_t written = (summed.defined() ? 2 : 1) * rows * n * int64_t(sizeof(T));
  const bool streaming = outlives_cache(written) && can_stream_rows<T>(y) &&
                         (!summed.defined() || can_stream_rows<T>(summed));
  // Two rows of float32 and their weights are larger than the nearest cache; those of 16 bits would fill the registers.
  constexpr int group = W == 16 && sizeof(T) == 4 ? 4 : 1;
  auto run = [&](auto with_residual, auto past_cache) {
    parallel_rows(rows, row_grain(n, norm_task), [&](int64_t begin, int64_t end) {
      auto some = [&](auto together, int64_t first, int64_t last) {
        if (first == last) return;
        norm_rows<T, together.value, with_residual.value, past_cache.value>(first, last, x, residual, y,
                                                                            summed, parameters, norm);
      };
      constexpr int most = with_residual.value ? 1 : group;
      const int64_t grouped = begin + (end - begin) / most * most;
      some(std::integral_constant<int, most>{}, begin, grouped);
      if constexpr (most > 1) some(std::integral_constant<int, 1>{}, grouped, end);
    });
  };
  auto with = [&](auto with_residual) {
    streaming ? run(with_residual, std::true_type{}) : run(with_residual, std::false_type{});
  };
  residual.defined() ? with(std::true_type{}) : with(std::false_type{});
}

}  // namespace opsmith
