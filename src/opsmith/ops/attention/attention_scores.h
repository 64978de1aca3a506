// From q.k to the exponent of the softmax: scale, softcap, masks and which keys a query sees. Shared by attention
// and its backward pass.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "attention.h"
#include "gemm_tile.h"

namespace opsmith {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// 2^x, or 0 below normal numbers; `precise` to 2e-9 before rounding, otherwise to 4e-6: 16-bit weights are rounded to far more.
template <bool precise>
inline Vec exp2(Vec x) {
  const auto [n, r] = whole_and_rest<true>(x);
  Vec p;
  if constexpr (precise) {
    p = fma(r, 2.1714995e-4f, 1.2440884e-3f);
    p = fma(p, r, 9.6780630e-3f);
    p = fma(p, r, 5.5484153e-2f);
    p = fma(p, r, 2.4022952e-1f);
    p = fma(p, r, 6.9314700e-1f);
  } else {
    p = fma(r, 1.3555718e-2f, 5.2032415e-2f);
    p = fma(p, r, 2.4137974e-1f);
    p = fma(p, r, 6.9303215e-1f);
  }
  return scale_exponent<true>(fma(p, r, 1.0f), n);
}

// The mask of one query row; `data` points at its first key.
struct MaskRow {
  const char* data = nullptr;
  DType dtype = DType::boolean;
  int64_t stride = 0;

  bool visible(int64_t key) const { return data[key * stride] != 0; }  // of a boolean mask

  // Whether it is boolean and shows all these keys: applying a mask takes half as long as all the rest.
  bool shows(int64_t key, int64_t n) const {
    return dtype == DType::boolean && stride == 1 && n > 0 && !std::memchr(data + key, 0, size_t(n));
  }
};

// Its stride is 1, or 0 where it is broadcast.
template <class M, class Lanes>
inline Vec load_mask(const M* p, int64_t stride, Lanes lanes) {
  return stride ? load(p, lanes) : splat(to_float(*p));
}

template <class Lanes>
inline IVec load_mask(const bool* p, int64_t stride, Lanes lanes) {
  typedef uint8_t Bytes __attribute__((vector_size(W)));
  if (!stride) return IVec{} - int32_t(*p);
  Bytes bytes{};
  std::memcpy(&bytes, p, size_t(lanes.count));
  return __builtin_convertvector(bytes, IVec) != 0;
}

// Where the softmax of a row with a sink begins, before any key: at a key without a value.
struct Start {
  float largest = -kInfinity, total = 0;

  // `exponent` is what turns scores into powers of 2, which the sink, as a scaled score, becomes by log2(e).
  Start(const AttentionOptions& options, int64_t head, float exponent) {
    const float sink = options.sink(head), score = sink * (log2_e / exponent);
    if (score == -kInfinity) return;
    largest = score;
    total = float(weight(sink, score, exponent));
  }

  // What a sink weighs where the largest score weighs 1: in float64, since either may be far from 0.
  static double weight(float sink, float largest, float exponent) {
    constexpr double log2_e = 1.4426950408889634;
    return std::exp2(double(sink) * log2_e - double(largest) * double(exponent));
  }
};

// Where the largest score is a power of 2 beyond this, its product with the exponent is rounded by more than 1: then
// scores are subtracted first.
constexpr float kFarScore = 0x1p24f;

// Sizes, and everything that depends on where a query row stands. The rows of a key head are those of its
// `group` query heads, one head after the other, so that they share its packed keys and values.
struct Problem : AttentionCall {
  int64_t batch, heads, kv_heads, group, queries, keys, dim, value_dim;
  bool plain;  // scores are used as they come: a positive scale goes into the exponent
  float exponent;  // scores times this are powers of 2

  explicit Problem(const AttentionCall& x)
      : AttentionCall(x), batch(q.sizes[0]), heads(q.sizes[1]), kv_heads(k.sizes[1]),
        group(kv_heads ? heads / kv_heads : 0), queries(q.sizes[2]), keys(k.sizes[2]), dim(q.sizes[3]),
        value_dim(v.sizes[3]), plain(!(mask.defined() && mask.dtype != DType::boolean) &&
                                     !(options.softcap > 0) && !options.alibi.defined() && options.scale > 0),
        exponent(plain ? options.scale * log2_e : log2_e) {}

  int64_t rows() const { return group * queries; }
  int64_t head(int64_t kv_head, int64_t row) const { return kv_head * group + row / queries; }
  int64_t query(int64_t row) const { return row % queries; }

  // A query at key position `at` sees the keys from first(at) to last(at), both included; last < first: none.
  int64_t position(int64_t query) const { return query + keys - queries; }
  int64_t first(int64_t at) const {
    return options.window > 0 ? std::max<int64_t>(0, at - options.window + 1) : 0;
  }
  int64_t last(int64_t at) const {
    if (options.causal) return std::min(at, keys - 1);
    return options.window > 0 ? std::min(at + options.window - 1, keys - 1) : keys - 1;
  }

  MaskRow mask_row(int64_t b, int64_t kv_head, int64_t row) const {
    if (!mask.defined()) return {};
    const int64_t at = b * mask.strides[0] + head(kv_head, row) * mask.strides[1] +
                       query(row) * mask.strides[2];
    const int64_t bytes = mask.dtype == DType::f32 ? 4 : mask.dtype == DType::boolean ? 1 : 2;
    return {static_cast<const char*>(mask.data) + at * bytes, mask.dtype, mask.strides[3]};
  }

  // ALiBi's bias on the scores of keys key..key+n-1, in place.
  void add_alibi(float* s, int64_t n, int64_t kv_head, int64_t row, int64_t key) const {
    const float slope = options.alibi_slope(head(kv_head, row));
    const int64_t distance = key - position(query(row));  // by which the first key stands behind the query
    for (int64_t j = 0; j < n; j += W) {
      const Vec behind = __builtin_convertvector(lane_index() + int32_t(distance + j), Vec);
      store(s + j, fma(behind, slope, load(s + j)));
    }
  }

  // Whether rows `row` to `row + n - 1` have the same boolean mask: that of padding, in most models.
  bool one_mask(int64_t row, int64_t n) const {
    return mask.defined() && mask.dtype == DType::boolean && (mask.strides[2] == 0 || queries == 1) &&
           (mask.strides[1] == 0 || row / queries == (row + n - 1) / queries);
  }
};

// Which of the keys `key` to `key + n - 1` each of up to ROWS rows sees, counted from `key`.
struct Strip {
  int rows;
  int64_t keys;  // those up to the last that a row may see; 0: none
  int64_t first[ROWS], last[ROWS];

  Strip(const Problem& p, int64_t row, int rows, int64_t key, int64_t n) : rows(rows) {
    int64_t from = n, until = 0, query = p.query(row);  // one division for all rows
    for (int i = 0; i < rows; ++i, query = query + 1 == p.queries ? 0 : query + 1) {
      first[i] = p.first(p.position(query)) - key;
      last[i] = std::min(p.last(p.position(query)) - key, n - 1);
      from = std::min(from, first[i]);
      until = std::max(until, last[i] + 1);
    }
    keys = std::min(n, until);
    if (keys <= std::max<int64_t>(from, 0)) keys = 0;
  }
};

template <class T>
inline T* row_of(const View& x, int64_t b, int64_t head, int64_t i) {
  return x.as<T>() + b * x.strides[0] + head * x.strides[1] + i * x.strides[2];
}

// The scores of a query row that is alone, from the keys as they lie: no other row would use them packed.
template <class Units, class T>
void score_alone(const T* q, const T* k, int64_t stride, int64_t keys, int64_t dim, float* scores) {
  for (int64_t j = 0; j < keys; j += W, k += W * stride) {
    const int count = int(std::min<int64_t>(W, keys - j));
    Vec sum[W] = {};
    for (int64_t c = 0; c < dim; c += W * Units::per_unit) {
      const Vec x = load_units<Units>(q, c, dim);
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        if (i < count) sum[i] = Units::mac(x, load_units<Units>(k + i * stride, c, dim), sum[i]);
      }
    }
    store(scores + j, fold<Units>(sum));
  }
}

template <class M>
inline void add_mask(float* s, int64_t n, const M* mask, int64_t stride) {
  for_lanes(n, [&](int64_t j, auto lanes) {
    if constexpr (std::is_same_v<M, bool>) {
      store(s + j, select(load_mask(mask + j * stride, stride, lanes), load(s + j), splat(-kInfinity)));
    } else {
      store(s + j, load(s + j) + load_mask(mask + j * stride, stride, lanes));
    }
  });
}

// tanh within an ulp or so where it bends, as `tanh` is not: a softcap multiplies its error.
inline Vec saturate(Vec x) {
  const Vec far = 1.0f - 2.0f / (exp(abs(x) * 2.0f) + 1.0f);
  const Vec with_sign = as_float(as_int(far) | (as_int(x) & int32_t(0x80000000)));
  return select(abs(x) < 0.6f, tanh(x), with_sign);
}

// Scale and softcap, in place. `slope`, if wanted, gets the softcap's derivative.
inline void transform_scores(float* s, int64_t n, const AttentionOptions& options, float* slope = nullptr) {
  const float scale = options.scale, cap = options.softcap;
  for (int64_t j = 0; j < n; j += W) {
    Vec x = load(s + j) * scale;
    if (cap > 0) {
      const Vec t = saturate(x / cap);
      if (slope) store(slope + j, 1.0f - t * t);
      x = t * cap;
    }
    store(s + j, x);
  }
}

// The mask on the scores of keys key..key+n-1.
inline void mask_scores(float* s, int64_t n, int64_t key, const MaskRow& mask) {
  if (mask.shows(key, n)) return;
  const auto add = [&](const auto* t) {
    add_mask(s, n, reinterpret_cast<decltype(t)>(mask.data) + key * mask.stride, mask.stride);
  };
  mask.dtype == DType::boolean ? add(static_cast<bool*>(nullptr)) : with_float_type(mask.dtype, add);
}

// -inf outside first..last, counted from s; s holds `vecs` vectors.
inline void hide(float* s, int64_t vecs, int64_t first, int64_t last) {
  first = std::max<int64_t>(first, 0);
  last = std::min(std::max<int64_t>(last, -1), vecs * W);
  for (int64_t j = 0; j < vecs * W; j += W) {
    if (j >= first && j + W - 1 <= last) continue;
    const IVec lane = lane_index() + int32_t(j);
    const IVec visible = (lane >= int32_t(first)) & (lane <= int32_t(last));
    store(s + j, select(visible, load(s + j), splat(-kInfinity)));
  }
}

// Hands out pieces of a thread's scratch memory; counts them first when there is none.
struct Carver {
  float* base;
  int64_t used = 0;

  float* take(int64_t floats) {
    float* piece = base ? base + used : nullptr;
    used += round_up(floats, 16);
    return piece;
  }
};

}  // namespace opsmith
