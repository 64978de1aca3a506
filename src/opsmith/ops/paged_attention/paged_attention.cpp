// Decoding: a few queries against many keys, bound by the keys' and values' way from memory.
//
// The keys of all sequences are cut into pieces, and each thread takes a run of them, then helps others, so that one
// sequence uses every core; who finishes the last piece of a sequence merges what the threads have summed. Keys are taken
// some dozens at a time through scores, weights and the weighted sum of values, for all query rows of all their heads,
// while the next ones are on their way to the second-level cache.
#include "paged_attention.h"

#include <cmath>

#include "attention/attention_scores.h"
#include "paged_bytes.h"
#include "paged_plan.h"
#include "paged_rows.h"
#include "pair.h"

namespace opsmith {
namespace {

constexpr int64_t kAheadBytes = 32 << 10;  // asked for before they are used
// Values of one head before the next head's: memory is read nearly as it lies.
constexpr int64_t kTogether = W == 8 ? 8 : 16;

// What a call needs beside its arguments, kept by the thread that calls: fresh pages at every call would cost more.
struct PagedMemory {
  PagedPlan plan;
  std::vector<float> sums;
};

// A row of `width` floats for each row of scores; then the sums of the weights and the largest scores, in the order of the
// lanes of a token's scores.
struct Sums {
  float* data = nullptr;
  int64_t rows = 0, width = 0, lanes = 0;

  int64_t size() const { return round_up(rows * width + 2 * lanes, 16); }
  float* row(int64_t r) const { return data + r * width; }
  float* totals() const { return data + rows * width; }
  float* largest() const { return totals() + lanes; }

  // Lanes v on have scores as large as `most`: what was summed of rows whose maximum grows is scaled down. `period` is how
  // many lanes a token has.
  Vec raise(int64_t v, Vec most, int64_t period, float exponent) const {
    const Vec old = load(largest() + v), now = select(most > old, most, old);
    const Vec shrink = select(most > old, exp2<true>((old - now) * exponent), splat(1.0f));
    store(largest() + v, now);
    store(totals() + v, load(totals() + v) * shrink);
    for (int64_t i = 0; i < W && v + i < std::min(rows, period); ++i) {
      if (!(most[i] > old[i]) || old[i] == -kInfinity) continue;
      float* p = row(v + i);
      for (int64_t c = 0; c < width; c += W) store(p + c, load(p + c) * shrink[i]);
    }
    return now;
  }
};

// Of a vector that holds several tokens of `lanes` rows each, what `op` makes of a row's lanes, in all of these.
template <class Op>
Vec over_rows(Vec x, int64_t lanes, const Op& op) {
  float lane[W];
  store(lane, x);
  for (int64_t h = W / 2; h >= lanes; h /= 2) {
    for (int64_t i = 0; i < h; ++i) lane[i] = op(lane[i], lane[i + h]);
  }
  for (int64_t i = lanes; i < W; ++i) lane[i] = lane[i - lanes];
  return load(lane);
}

// Of each row of all parts, f(i) being one of `count`, what its part of the result is multiplied by: it takes the place of the largest
// score. The first part keeps the sums of all weights, 0 where no key was seen.
template <class F>
void share_out(int64_t count, int64_t period, float exponent, const F& f) {
  const Sums first = f(0);
  for (int64_t v = 0; v < first.lanes; v += W) {
    Vec most = load(first.largest() + v), total = {};
    for (int64_t i = 1; i < count; ++i) most = max(load(f(i).largest() + v), most);
    for (int64_t i = 0; i < count; ++i) {
      const Sums part = f(i);
      const Vec largest = load(part.largest() + v);
      const Vec factor = select(largest == most, splat(1.0f), exp2<true>((largest - most) * exponent));
      store(part.largest() + v, factor);
      total += load(part.totals() + v) * factor;
    }
    if (period < W) total = over_rows(total, period, [](float a, float b) { return a + b; });
    store(first.totals() + v, total);
    for (int64_t i = 0; i < count; ++i) store(f(i).largest() + v, load(f(i).largest() + v) / total);
  }
}

// Where keys lie, those of a tile and of the next one. The last pointer is repeated, for who reads or asks beyond.
template <class T>
struct Tiles {
  static constexpr bool quantized = std::is_same_v<T, int8_t>;
  static constexpr int64_t most = 2 * kPagedTile, beyond = kPagedTile + 2 * W;  // and what fills up tiles
  const T *keys[most + beyond], *values[most + beyond];
  const float *key_scale[most], *value_scale[most];
  int64_t count = 0;
  int64_t found = 0;  // the first key whose place is not known yet

  void start(int64_t key) {
    found = key;
    count = 0;
  }

  void find(const PagedCache& c, int64_t sequence, int64_t until) {
    if (found == until) return;
    const int64_t size = c.block_size(), end = count + until - found;
    int64_t block = found / size, slot = found % size;
    for (int64_t j = count; j < end; ++block, slot = 0) {
      const int64_t at = c.block(sequence, block), stop = std::min(end, j + size - slot);
      for (; j < stop; ++j, ++slot) {
        keys[j] = place<T>(c.keys, at, slot);
        values[j] = place<T>(c.values, at, slot);
        if constexpr (quantized) {
          key_scale[j] = place<float>(c.key_scale, at, slot);
          value_scale[j] = place<float>(c.value_scale, at, slot);
        }
      }
    }
    count = end;
    found = until;
    for (const T** p : {keys, values}) std::fill_n(p + end, beyond, p[end - 1]);
  }

  void drop(int64_t n) {
    count -= n;
    for (const T** p : {keys, values}) std::copy_n(p + n, count + beyond, p);
    for (const float** p : {key_scale, value_scale}) std::copy_n(p + n, quantized ? count : 0, p);
  }

 private:
  template <class E>
  static const E* place(const View& x, int64_t block, int64_t slot) {
    return x.as<E>() + block * x.strides[0] + slot * x.strides[1];
  }
};

// Scores or weights, `lanes` of a token, times the factors of their tokens and heads. A token's factors are `stride` apart from `first`
// on; each is of `slots` rows.
void scale_heads(float* x, const float* const* factors, int64_t first, int64_t stride, int64_t heads,
                 int64_t slots, int64_t lanes, int64_t keys) {
#if defined(OPSMITH_AVX512)
  if (slots == 4 && stride == 1 && lanes == 4 * heads && lanes % W == 0) {  // a vector has four heads
    const __m512i four = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t v = 0; v < lanes; v += W, x += W) {
        const __m512 factor = _mm512_castps128_ps512(_mm_loadu_ps(factors[j] + first + v / 4));
        store(x, load(x) * (Vec)_mm512_permutexvar_ps(four, factor));
      }
    }
    return;
  }
#endif
  for (int64_t j = 0; j < keys; ++j, x += lanes) {
    for (int64_t h = 0; h < heads; ++h) {
      const float factor = factors[j][first + h * stride];
      for (int64_t r = h * slots; r < (h + 1) * slots; ++r) x[r] *= factor;
    }
  }
}

// A thread's memory.
struct Buffers {
  float *q = nullptr, *scores = nullptr, *weights = nullptr;
  int8_t* digits = nullptr;  // of q
  float* step = nullptr;  // of the digits of each row of q, then of each row of weights
  int32_t* start = nullptr;  // of sums of digits
  int64_t* offset = nullptr;  // of the head of each row, in a token's keys
  float *slope = nullptr, *position = nullptr;  // ALiBi's, of the lanes of a token
  int64_t floats = 0;

  Buffers() = default;
  Buffers(float* base, int64_t rows, int64_t depth, int64_t scores_of_tile, bool quantized, bool alibi) {
    Carver carve{base};
    q = carve.take(rows * depth);
    offset = reinterpret_cast<int64_t*>(carve.take(2 * rows));
    scores = carve.take(scores_of_tile);
    weights = carve.take(scores_of_tile);
    if (quantized) {
      digits = reinterpret_cast<int8_t*>(carve.take(ceil_div(rows * depth, 2)));
      step = carve.take(2 * round_up(rows, W));
      start = reinterpret_cast<int32_t*>(carve.take(round_up(rows, W)));
    }
    if (alibi) {
      slope = carve.take(round_up(rows, W));
      position = carve.take(round_up(rows, W));
    }
    floats = carve.used;
  }
};

template <class T>
class Paged {
  using Units = UnitsOf<T>;
  using Element = typename Units::Element;
  static constexpr bool quantized = std::is_same_v<T, int8_t>;
  static constexpr int64_t group = W * kVectors<T>;  // elements

 public:
  Paged(const View& q, const PagedCache& cache, const AttentionOptions& options, const View& out,
        PagedMemory& memory)
      : q_(q), c_(cache), options_(options), out_(out), queries_(q.sizes[1]), dim_(q.sizes[3]),
        value_dim_(out.sizes[3]),
        rows_(cache.keys.sizes[2] ? q.sizes[2] / cache.keys.sizes[2] * queries_ : 0),
        slots_(rows_ < 3 ? rows_ : round_up(rows_, 4)), depth_(round_up(dim_, group) / Units::per_unit),
        width_(round_up(value_dim_, group)),
        plain_(!(options.softcap > 0) && !options.alibi.defined() && options.scale > 0),
        exponent_(plain_ ? options.scale * log2_e : log2_e), precise_(q.dtype == DType::f32),
        plan_(memory.plan), kept_(memory.sums) {
    plan_.make(cache, q.sizes[0], queries_, options.window, (dim_ + value_dim_) * int64_t(sizeof(T)), slots_,
               2 * W, kPagedTile, num_threads());
    lanes_ = slots_ * plan_.heads_at_once;
    if (lanes_ < W) {
      while (lanes_ & (lanes_ - 1)) lanes_ += lanes_ & -lanes_;
    } else {
      lanes_ = round_up(lanes_, W);
    }
    apart_ = std::max<int64_t>(1, W / lanes_);
    fours_ = unit() == 4 && apart_ == 1 && (value_dim_ == 64 || value_dim_ == 128);
#if defined(OPSMITH_PAGED_BYTES)
    bytes_ = quantized && fours_ && !precise_ && (dim_ == 64 || dim_ == 128);
#endif
  }

  void run() {
    const int64_t pieces = int64_t(plan_.pieces.size()), threads = std::min(plan_.threads, pieces);
    const int64_t stride = sums(nullptr).size();
    constexpr int64_t line = 64 / sizeof(float);  // vectors of sums lie on lines of their own
    if (int64_t(kept_.size()) < pieces * stride + line) kept_.resize(size_t(pieces * stride + line));
    partial_ = kept_.data() + (-reinterpret_cast<uintptr_t>(kept_.data()) & 63) / sizeof(float);
    Shares shares(pieces, threads);
    const auto work = [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread) {
        Walk walk;
        shares.take(thread, [&](int64_t piece) { attend(walk, piece); });
        finish(walk);
      }
    };
    threads > 1 ? parallel_for(threads, 1, work) : work(0, 1);
  }

 private:
  // What a thread is at: pieces of a whole that follow each other, in one sum.
  struct Walk {
    Whole* whole = nullptr;
    int64_t first = 0, next = 0;  // pieces
    Tiles<T> tiles;
    Buffers to;
    Sums sums;
  };

  // Row r of a key head: query r % L of its query head r / L.
  int64_t query_head(int64_t kv_head, int64_t row) const {
    return kv_head * (rows_ / queries_) + row / queries_;
  }
  int64_t unit() const {
    return std::min<int64_t>(slots_, kUnit);
  }  // rows of a head that are multiplied at once
  Sums sums(float* at) const {
    return {at, slots_ * plan_.heads_at_once, width_, std::max<int64_t>(lanes_, W)};
  }
  Sums sums_of(int64_t piece) const { return sums(partial_ + piece * sums(nullptr).size()); }

  void attend(Walk& walk, int64_t at) {
    const Piece& piece = plan_.pieces[size_t(at)];
    Whole& whole = plan_.wholes[size_t(piece.whole)];
    if (walk.whole != &whole || walk.next != at) {
      finish(walk);
      begin(walk, whole, at);
      walk.tiles.start(piece.from);
      walk.tiles.find(c_, whole.sequence, std::min(piece.from + plan_.tile, whole.until));
    }
    walk.next = at + 1;
    for (int64_t from = piece.from, keys; from < piece.until; from += keys) {
      keys = std::min(plan_.tile, piece.until - from);
      walk.tiles.find(c_, whole.sequence, std::min(from + 2 * plan_.tile, whole.until));
      meet(walk, from, keys);
      walk.tiles.drop(keys);
    }
  }

  void begin(Walk& walk, Whole& whole, int64_t piece) const {
    walk.whole = &whole;
    walk.first = piece;
    const int64_t rows = std::max(lanes_, slots_ * plan_.heads_at_once);
    const int64_t scores = round_up(plan_.tile + 2 * apart_, 2 * W) * std::max<int64_t>(lanes_, 1);
    const bool alibi = options_.alibi.defined();
    walk.to = Buffers(scratch(Buffers(nullptr, rows, depth_, scores, quantized, alibi).floats), rows, depth_,
                      scores, quantized, alibi);
    walk.sums = sums_of(piece);
    std::fill(walk.sums.data, walk.sums.largest(), 0.0f);
    std::fill_n(walk.sums.largest(), walk.sums.lanes, -kInfinity);
    if (options_.sinks.defined() && piece == whole.piece) start_at_sinks(walk);
    if (alibi) place_rows(walk);
    for (int64_t r = 0; r < whole.heads * slots_ / unit(); ++r) {
      walk.to.offset[r] = (whole.head + r * unit() / slots_) * c_.keys.strides[2];
    }
    with_float_type(q_.dtype, [&]<class Q>(Q*) {
      for (int64_t r = 0; r < whole.heads * slots_; ++r) {
        const int64_t of = r % slots_, h = query_head(whole.head + r / slots_, of);
        const Q* from = row_of<Q>(q_, whole.sequence, of % queries_, h);
        Element* to = reinterpret_cast<Element*>(walk.to.q + r * depth_);
        pack_row<Units>(from, of < rows_ ? dim_ : 0, to, depth_ * Units::per_unit);
        if constexpr (in_pairs<T>) even_before_odd(walk.to.q + r * depth_, depth_);
      }
    });
#if defined(OPSMITH_PAGED_BYTES)
    if (bytes_) {  // rows that only fill up a vector have scores of 0
      std::fill_n(walk.to.step, lanes_, 0.0f);
      std::fill_n(walk.to.start, lanes_, 0);
    }
    for (int64_t r = 0; bytes_ && r < whole.heads * slots_; ++r) {
      digits_of(walk.to.q + r * depth_, dim_, walk.to.digits + r * 2 * dim_, walk.to.step + r,
                walk.to.start + r);
    }
#endif
  }

  // f(row of a token's scores, query head, query).
  template <class F>
  void for_rows(const Whole& whole, const F& f) const {
    for (int64_t h = 0; h < whole.heads; ++h) {
      for (int64_t i = 0; i < rows_; ++i) f(h * slots_ + i, query_head(whole.head + h, i), i % queries_);
    }
  }

  // Sinks come before the first key. Of lanes that have several tokens the first one's hold their weights.
  void start_at_sinks(const Walk& walk) const {
    for_rows(*walk.whole, [&](int64_t r, int64_t head, int64_t) {
      const Start start(options_, head, exponent_);
      walk.sums.totals()[r] = start.total;
      for (int64_t lane = r; lane < walk.sums.lanes; lane += lanes_)
        walk.sums.largest()[lane] = start.largest;
    });
  }

  void place_rows(const Walk& walk) const {
    const int64_t first_query = c_.length(walk.whole->sequence) - queries_;
    std::fill_n(walk.to.slope, walk.sums.lanes, 0.0f);
    std::fill_n(walk.to.position, walk.sums.lanes, 0.0f);
    for_rows(*walk.whole, [&](int64_t r, int64_t head, int64_t query) {
      for (int64_t token = 0, lane = r; lane < walk.sums.lanes; ++token, lane += lanes_) {
        walk.to.slope[lane] = options_.alibi_slope(head);
        walk.to.position[lane] = float(first_query + query - token);
      }
    });
  }

  void finish(Walk& walk) {
    if (!walk.whole) return;
    const int64_t count = walk.next - walk.first;
    plan_.pieces[size_t(walk.first)].begun = true;
    if (__atomic_sub_fetch(&walk.whole->left, count, __ATOMIC_ACQ_REL) == 0) merge(*walk.whole);
    walk.whole = nullptr;
  }

  // A tile: scores of all heads, token by token, so that memory is read as it lies; then weights; then sums.
  void meet(const Walk& walk, int64_t at, int64_t keys) const {
    const Whole& whole = *walk.whole;
    const Tiles<T>& tile = walk.tiles;
    const int64_t tokens = round_up(
        keys, std::max<int64_t>(2 * apart_, W == 16 ? 16 : 8));  // as many as are summed at once
    score(walk, tokens);
    settle(walk, at, keys, tokens);
    precise_ ? weigh<true>(walk, tokens) : weigh<false>(walk, tokens);
    const int64_t skip = ahead(whole, c_.values.strides[2], value_dim_);
    if constexpr (quantized) scale(walk.to.weights, tile.value_scale, c_.value_scale, whole, keys);
#if defined(OPSMITH_PAGED_BYTES)
    if constexpr (quantized) {
      if (bytes_) {
        float* const step = walk.to.step + lanes_;
        if (weights_to_digits(walk.to.weights, tokens, lanes_, step)) {
          const auto add = value_dim_ == 128 ? add_eight<128> : add_eight<64>;
          for (int64_t j = 0; j < tokens; j += 8) {
            add(reinterpret_cast<const int32_t*>(walk.to.weights) + j / 2 * lanes_, step, lanes_,
                tile.values + j, skip, whole.head * c_.values.strides[2], c_.values.strides[2], whole.heads,
                slots_ / 4, walk.sums.data);
          }
          return;
        }
        by_fours(walk.sums.data, walk.sums.rows * width_);
      }
    }
#endif
#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
    if constexpr (Units::per_unit == 2) {
      if (fours_) {
        const auto add = value_dim_ == 128 ? add_sixteen<128> : add_sixteen<64>;
        for (int64_t j = 0; j < tokens; j += kSixteen) {
          add(walk.to.weights + j / 2 * lanes_, lanes_, tile.values + j, skip,
              whole.head * c_.values.strides[2], c_.values.strides[2], whole.heads, slots_ / 4,
              walk.sums.data);
        }
        return;
      }
    }
#endif
    const int64_t together = std::max<int64_t>(kTogether, 2 * apart_);
    for (int64_t j = 0; j < tokens; j += together) {
      const Weights weights{walk.to.weights + j / Units::per_unit * lanes_, lanes_, apart_};
      for (int64_t h = 0; h < whole.heads; ++h) {
        const int64_t offset = (whole.head + h) * c_.values.strides[2],
                      count = std::min(together, tokens - j);
        in_rows(h * slots_, [&](auto n, int64_t r) {
          add_all_values<Units, decltype(n)::value, T>({weights.data + r, lanes_, apart_}, tile.values + j,
                                                       skip, offset, count, value_dim_, walk.sums.row(r),
                                                       width_);
        });
      }
    }
#if defined(OPSMITH_PAGED_BYTES)
    if (bytes_) by_fours(walk.sums.data, walk.sums.rows * width_);
#endif
  }

  void score(const Walk& walk, int64_t tokens) const {
    const Rows rows{walk.to.q, depth_, lanes_, walk.whole->heads * slots_, walk.to.offset};
    const T* const* const from = walk.tiles.keys;
    const int64_t skip = ahead(*walk.whole, c_.keys.strides[2], dim_);
#if defined(OPSMITH_PAGED_BYTES)
    if constexpr (quantized) {
      if (bytes_) {
        const ByteRows bytes{walk.to.digits, walk.to.step, walk.to.start};
        return (dim_ == 128 ? score_bytes<2> : score_bytes<1>)(rows, bytes, from, skip, tokens,
                                                               walk.to.scores);
      }
    }
#endif
    const auto score = [&](auto r, auto fixed) {
      score_keys<Units, decltype(r)::value, decltype(fixed)::value, T>(rows, from, skip, tokens, dim_,
                                                                       walk.to.scores);
    };
    using Any = std::integral_constant<int, 0>;
    using Most = std::integral_constant<int, kUnit>;
    if (unit() == 1) return score(std::integral_constant<int, 1>{}, Any{});
    if (unit() == 2) return score(std::integral_constant<int, 2>{}, Any{});
#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bfloat16>) {
      if (rows.lanes == rows.count && (dim_ == 4 * group || dim_ == 2 * group)) {
        return (dim_ == 4 * group ? score_fours<4> : score_fours<2>)(rows, from, skip, tokens,
                                                                     walk.to.scores);
      }
    }
#endif
    if constexpr (kVectors<T> == 2) {  // bfloat16
      if (dim_ == 128) return score(Most{}, std::integral_constant<int, 128 / group>{});
      if (dim_ == 64) return score(Most{}, std::integral_constant<int, 64 / group>{});
    }
    score(Most{}, Any{});
  }

  // How many tokens before it is read a token's row is asked for.
  int64_t ahead(const Whole& whole, int64_t head_stride, int64_t dim) const {
    const int64_t bytes = (head_stride == dim ? whole.heads : 1) * dim *
                          int64_t(sizeof(T));  // that lie together
    return std::min(plan_.tile, ceil_div(kAheadBytes, std::max<int64_t>(bytes, 1)));
  }

  // The rows from r on that one head has, as many at a time as registers hold: f(how many, which).
  template <class F>
  void in_rows(int64_t r, const F& f) const {
    const int64_t end = r + rows_;
    for (; r + 4 <= end; r += 4) f(std::integral_constant<int, 4>{}, r);
    for (; r + 2 <= end; r += 2) f(std::integral_constant<int, 2>{}, r);
    if (r < end) f(std::integral_constant<int, 1>{}, r);
  }

  // Scores as the softmax takes them: scaled, capped, -inf where a key is none or is not seen.
  void settle(const Walk& walk, int64_t at, int64_t keys, int64_t tokens) const {
    float* const scores = walk.to.scores;
    const Whole& whole = *walk.whole;
    if constexpr (quantized) {
      scale(scores, walk.tiles.key_scale, c_.key_scale, whole, keys);
    }
    if (!plain_) transform_scores(scores, tokens * lanes_, options_);
    if (options_.alibi.defined()) add_alibi(walk, at, tokens);
    std::fill(scores + keys * lanes_, scores + tokens * lanes_, -kInfinity);
    const int64_t length = c_.length(whole.sequence), first_query = length - queries_;
    if (at + keys - 1 <= first_query && !(options_.window > 0 && at <= length - 1 - options_.window)) return;
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t r = 0; r < whole.heads * slots_; ++r) {
        const int64_t position = first_query + r % slots_ % queries_, distance = position - (at + j);
        if (distance < 0 || (options_.window > 0 && distance >= options_.window))
          scores[j * lanes_ + r] = -kInfinity;
      }
    }
  }

  void add_alibi(const Walk& walk, int64_t at, int64_t tokens) const {
    for (int64_t v = 0; v < walk.sums.lanes; v += W) {
      const Vec slope = load(walk.to.slope + v), position = load(walk.to.position + v);
      float* s = walk.to.scores + v;
      for (int64_t j = 0; j < tokens; j += apart_, s += walk.sums.lanes)
        store(s, fma(splat(float(at + j)) - position, slope, load(s)));
    }
  }

  void scale(float* x, const float* const* from, const View& scale, const Whole& whole, int64_t keys) const {
    scale_heads(x, from, whole.head * scale.strides[2], scale.strides[2], whole.heads, slots_, lanes_, keys);
  }

  // Scores to weights; where a row's maximum grows, what was summed so far is scaled down.
  template <bool precise>
  void weigh(const Walk& walk, int64_t tokens) const {
    const int64_t stride = std::max<int64_t>(lanes_, W), vecs = tokens * lanes_;
    for (int64_t v = 0; v < lanes_; v += W) {
      const float* const s = walk.to.scores + v;
      Vec most = load(s);
      for (int64_t i = stride; i < vecs; i += stride) most = max(load(s + i), most);
      if (lanes_ < W) most = over_rows(most, lanes_, [](float a, float b) { return std::max(a, b); });
      Vec base = load(walk.sums.largest() + v);
      if (any(most > base)) base = walk.sums.raise(v, most, lanes_, exponent_);
      base = select(base == -kInfinity, Vec{}, base);
      const Vec from = base * -exponent_;
      Vec total = {};  // of the tile: one long chain of additions would lose accuracy
      float* const to = walk.to.weights + v;
      const auto all = [&](auto subtracted) __attribute__((always_inline)) {
        const auto weight = [&](int64_t i) {
          const Vec w = exp2<precise>(subtracted() ? (load(s + i) - base) * exponent_
                                                   : fma(load(s + i), splat(exponent_), from));
          total += w;
          return w;
        };
        if constexpr (Units::per_unit == 2) {
#if defined(OPSMITH_AVX512)
          for (int64_t i = 0; i < vecs; i += 2 * stride) {
            const Vec first = weight(i), second = weight(i + stride);
            store(to + i / 2, (Vec)pack({first, second}));
          }
#endif
        } else {
          for (int64_t i = 0; i < vecs; i += stride) store(to + i, weight(i));
        }
      };
      const bool far = any(max(from, -from) > splat(kFarScore));
      precise || far ? all(std::true_type{}) : all(std::false_type{});
      store(walk.sums.totals() + v, load(walk.sums.totals() + v) + total);
    }
  }

  // The sums of those who had a part of a whole, and what they make.
  void merge(const Whole& whole) const {
    Piece* const pieces = plan_.pieces.data() + whole.piece;  // nobody needs them any more
    int64_t count = 0;
    for (int64_t p = 0; p < whole.count; ++p) {
      if (pieces[p].begun) pieces[count++].whole = whole.piece + p;
    }
    const auto part = [&](int64_t i) { return sums_of(pieces[i].whole); };
    share_out(count, lanes_, exponent_, part);
    const Sums into = part(0);
    with_float_type(out_.dtype, [&]<class Q>(Q*) {
      for_rows(whole, [&](int64_t r, int64_t head, int64_t query) {
        float* const row = into.row(r);
        for (int64_t c = 0; c < width_; c += W) {
          Vec x = load(row + c) * into.largest()[r];
          for (int64_t p = 1; p < count; ++p)
            x = fma(load(part(p).row(r) + c), splat(part(p).largest()[r]), x);
          store(row + c, into.totals()[r] == 0 ? Vec{} : x);
        }
        in_order<Units, T>(row, width_);
#if defined(OPSMITH_PAGED_BYTES)
        if (bytes_) by_fours(row, width_);
#endif
        Q* const to = row_of<Q>(out_, whole.sequence, query, head);
        for_lanes(value_dim_, [&](int64_t c, auto lanes) { store(to + c, load(row + c, lanes), lanes); });
      });
    });
  }

  View q_;
  PagedCache c_;
  AttentionOptions options_;
  View out_;
  int64_t queries_, dim_, value_dim_;
  int64_t rows_;  // of a key head: the queries of its query heads
  int64_t slots_;  // the same, with rows of zeros up to a multiple of what is multiplied at once
  int64_t depth_, width_;
  bool plain_;
  float exponent_;
  bool precise_;
  bool fours_ = false,
       bytes_ = false;  // rows by fours of lines whose number is known; and multiplied as bytes
  PagedPlan& plan_;
  std::vector<float>& kept_;
  int64_t lanes_ = 0, apart_ = 1;
  float* partial_ = nullptr;  // sums of each piece, used where a walk began
};

}  // namespace

void paged_attention(const View& q, const PagedCache& cache, const AttentionOptions& options,
                     const View& out) {
  if (q.sizes[0] * q.sizes[1] * q.sizes[2] == 0) return;
  static thread_local PagedMemory memory;
  switch (cache.keys.dtype) {
    case DType::f32: return Paged<float>(q, cache, options, out, memory).run();
    case DType::bf16: return Paged<bfloat16>(q, cache, options, out, memory).run();
    case DType::i8: return Paged<int8_t>(q, cache, options, out, memory).run();
    default: return Paged<float16>(q, cache, options, out, memory).run();
  }
}

}  // namespace opsmith
