// The forms of a projection in MLA pre-processing: what its activations become, and what its sums become again.
#pragma once

#include "lanes.h"
#include "latent_rows.h"

namespace opsmith::mla {

// A form's activations: rows of X with zeros up to whole steps, and what some forms keep of each row.
template <class X>
struct Activations {
  Activations(int64_t tokens, int64_t depth)
      : depth(depth), stride(round_up(std::max<int64_t>(1, depth), 64)),
        rows_(new Line[size_t(tokens * stride) / (64 / sizeof(X))]()), scales(new float[size_t(tokens)]()),
        sums(new int32_t[size_t(tokens)]()) {}
  X* row(int64_t t) const { return rows_[0].x + t * stride; }

  const int64_t depth, stride;

 private:
  struct alignas(64) Line {  // a vector that lies in two of them is loaded twice
    X x[64 / sizeof(X)];
  };
  const std::unique_ptr<Line[]> rows_;

 public:
  const std::unique_ptr<float[]> scales;
  const std::unique_ptr<int32_t[]> sums;  // of integers
};

// Rows of a projection of all tokens, from `first` on: out [tokens, rows]. `lanes` holds x by token, or is null; `sums` is memory
// for as many integers as come out.
template <class X>
struct Strip {
  const Activations<X>& x;
  const IVec* lanes;
  const Projection& p;
  int64_t tokens, first, rows;
  Ahead ahead;
  float* out;
  int32_t* sums;

  template <class S>
  const S* weight() const {
    return p.weight.as<S>() + first * stride();
  }
  int64_t stride() const { return p.weight.strides[0]; }

  // What lanes cannot hold is left, from the returned row on.
  template <class S, class O>
  int64_t in_lanes(O* to) const {
    return lane_rows<WordProduct<X, S>>(lanes, tokens, weight<S>(), stride(), rows, x.depth, ahead, to, rows);
  }
  // The rows from the first that is not `done`, by D.
  template <class D, class S, class O>
  void dots(int64_t done, const RowSize& size, O* to) const {
    dot_rows<D::step * sizeof(S)>(
        tokens, weight<S>() + done * stride(), stride(), rows - done, size,
        ahead.after(done * stride() * int64_t(sizeof(S))), to + done, rows,
        [&](auto m, auto r, int64_t t, int64_t k, int64_t some, const S* w, auto next, O* o,
            int64_t o_stride) {
          const int32_t none[kDotTokens] = {};  // a row's first piece has the sum of the whole
          dot_tile<D, m(), r()>(x.row(t) + k, x.stride, k > 0 ? none : x.sums.get() + t, w, stride(), some,
                                next, o, o_stride);
        });
  }

  // f(the row of `out`, a row of the projection, lanes) for all of them.
  template <class F>
  void for_results(const F& f) const {
    for (int64_t t = 0; t < tokens; ++t) {
      for_lanes(rows, [&](int64_t r, auto k) { f(out + t * rows + r, first + r, k); });
    }
  }
  template <class T>
  void add_bias() const {
    if (!p.bias.defined()) return;
    for_results(
        [&](float* o, int64_t row, auto k) { store(o, load(o, k) + load(p.bias.as<T>() + row, k), k); });
  }
};

// Activations in floating point beside a weight of S.
template <class T_, class S_>
struct FloatProducts {
  using T = T_;
  using S = S_;
  using X = typename Dots<T, S>::X;

  static void prepare(const float* y, int64_t n, const Projection&, const Activations<X>& to, int64_t t) {
    X* const row = to.row(t);
    for_lanes(n, [&](int64_t i, auto k) { store(row + i, round_to<T>(load(y + i, k)), k); });
    Dots<T, S>::arrange(row, n);
  }
};

// x and weight of one type: products in float, what goes in is rounded to T.
template <class T>
struct FloatWeight : FloatProducts<T, T> {
  using typename FloatProducts<T, T>::X;
  static void rows(const Strip<X>& s) {
    const RowSize size{s.x.depth, 64, s.x.depth * int64_t(sizeof(X))};
    s.template dots<Dots<T, T>, T>(s.template in_lanes<T>(s.out), size, s.out);
    s.template add_bias<T>();
  }
};

// An int8 weight with a scale for each of its rows.
template <class T>
struct Int8Weight : FloatProducts<T, int8_t> {
  using typename FloatProducts<T, int8_t>::X;
  static void rows(const Strip<X>& s) {
    const int64_t depth = s.x.depth;
    const RowSize size{depth, depth, depth * int64_t(sizeof(X)), kDotRows};
    s.template dots<Dots<T, int8_t>, int8_t>(0, size, s.out);
    const float* const descale = s.p.descale.template as<float>();
    s.for_results([&](float* o, int64_t row, auto k) { store(o, load(o, k) * load(descale + row, k), k); });
    s.template add_bias<T>();
  }
};

// An int4 weight with a scale for each group of a row; activations in floating point.
template <class T_>
struct Int4Weight {
  using T = T_;
  using S = uint8_t;
  using X = typename Dots<T, int8_t>::X;

  static void prepare(const float* y, int64_t n, const Projection& p, const Activations<X>& to, int64_t t) {
    const int64_t half = p.weight.sizes[1];
    X* const row = to.row(t);
    for (int64_t i = 0; i < n; ++i) row[i % 2 * half + i / 2] = from_float<X>(to_float(from_float<T>(y[i])));
  }
  static void rows(const Strip<X>& s) {
    const int64_t w_stride = std::max<int64_t>(1, s.stride()), half = s.p.weight.sizes[1],
                  groups = s.p.descale.sizes[1];
    // A group has sums of its own beside those of the row: for more rows than two there are no registers.
    const RowSize size{half, half, 2 * half * int64_t(sizeof(X)), kFewRows,
                       sizeof(X) == 2 ? kFewRows : kDotRows};
    const uint8_t* const base = s.p.weight.template as<S>();
    dot_rows<W>(
        s.tokens, s.template weight<S>(), w_stride, s.rows, size, s.ahead, s.out, s.rows,
        [&](auto m, auto r, int64_t t, int64_t, int64_t, const S* w, auto next, float* o, int64_t o_stride) {
          const float* factor = s.p.descale.template as<float>() + (w - base) / w_stride * groups;
          nibble_tile<m(), r()>(s.x.row(t), s.x.stride, half, w, w_stride, factor, groups, half / groups,
                                next, o, o_stride);
        });
    s.template add_bias<T>();
  }
};

// int8 times int8: one scale and offset for all activations, or a scale for each token.
template <class T_, bool per_token>
struct IntegerProduct {
  using T = T_;
  using S = int8_t;
  using X = typename Dots<S, S>::X;

  static void prepare(const float* y, int64_t n, const Projection& p, const Activations<X>& to, int64_t t) {
    X* const row = to.row(t);
    int8_t* const bytes = reinterpret_cast<int8_t*>(row + n) - n;  // widened in place, from the front
    if constexpr (per_token) {
      to.scales[t] = quantize_row(y, n, largest(y, n), bytes);
    } else {
      quantize_row(y, n, p.scale, p.offset, bytes);
    }
    int32_t total = 0;
    for (int64_t i = 0; i < n; ++i) total += row[i] = bytes[i];
    to.sums[t] = total;
  }
  static void rows(const Strip<X>& s) {
    const int64_t rows = s.rows;
    const RowSize size{s.x.depth, 64, s.x.depth * int64_t(sizeof(X))};
    s.template dots<Dots<S, S>, S>(s.template in_lanes<S>(s.sums), size, s.sums);
    const float* descale = s.p.descale.template as<float>() + s.first;
    const int32_t* bias = s.p.bias.defined() ? s.p.bias.template as<int32_t>() + s.first : nullptr;
    for (int64_t t = 0; t < s.tokens; ++t) {
      const float scale = per_token ? s.x.scales[t] : 1.0f;
      const int32_t* const from = s.sums + t * rows;
      float* const to = s.out + t * rows;
      int64_t r = 0;
      for (; !bias && r + W <= rows; r += W)
        store(to + r, to_float((IVec)load_words(from + r)) * load(descale + r) * scale);
      for (; r < rows; ++r) to[r] = float(int64_t(from[r]) + (bias ? bias[r] : 0)) * descale[r] * scale;
    }
  }
};

}  // namespace opsmith::mla
