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
#include "paged_sums.h"
#include "paged_walk.h"
#include "pair.h"
#include "parallel.h"

namespace opsmith {
namespace {

constexpr int64_t kAheadBytes = 32 << 10;  // asked for before they are used
constexpr int64_t kTogether = 16;  // values of one head before the next head's: memory is read nearly as it lies

// What a call needs beside its arguments, kept by the thread that calls: fresh pages at every call would cost more.
struct PagedMemory {
  PagedPlan plan;
  std::vector<float> sums;
};

template <class T>
class Paged {
  using Units = UnitsOf<T>;
  using Element = typename Units::Element;
  static constexpr bool quantized = std::is_same_v<T, int8_t>;
  static constexpr int64_t group = W * Units::per_unit;

 public:
  Paged(const View& q, const PagedCache& cache, const PagedOptions& options, const View& out,
        PagedMemory& memory)
      : q_(q), c_(cache), options_{options.scale, true, options.window, options.softcap}, out_(out),
        queries_(q.sizes[1]), dim_(q.sizes[3]), value_dim_(out.sizes[3]),
        rows_(cache.keys.sizes[2] ? q.sizes[2] / cache.keys.sizes[2] * queries_ : 0),
        slots_(rows_ < 3 ? rows_ : round_up(rows_, 4)), depth_(round_up(ceil_div(dim_, Units::per_unit), W)),
        width_(round_up(value_dim_, group)), plain_(!(options.softcap > 0) && options.scale > 0),
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
    walk.to = Buffers(Workspace::get(Buffers(nullptr, rows, depth_, scores, quantized).floats), rows, depth_,
                      scores, quantized);
    walk.sums = sums_of(piece);
    std::fill(walk.sums.data, walk.sums.largest(), 0.0f);
    std::fill_n(walk.sums.largest(), walk.sums.lanes, -kInfinity);
    for (int64_t r = 0; r < whole.heads * slots_ / unit(); ++r) {
      walk.to.offset[r] = (whole.head + r * unit() / slots_) * c_.keys.strides[2];
    }
    with_float_type(q_.dtype, [&](auto* t) {
      using Q = std::remove_pointer_t<decltype(t)>;
      for (int64_t r = 0; r < whole.heads * slots_; ++r) {
        const int64_t of = r % slots_, h = query_head(whole.head + r / slots_, of);
        const Q* from = q_.as<Q>() + whole.sequence * q_.strides[0] + of % queries_ * q_.strides[1] +
                        h * q_.strides[2];
        Element* to = reinterpret_cast<Element*>(walk.to.q + r * depth_);
        pack_row<Units>(from, of < rows_ ? dim_ : 0, to, depth_ * Units::per_unit);
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

  void finish(Walk& walk) {
    if (!walk.whole) return;
    const int64_t count = walk.next - walk.first;
    plan_.pieces[size_t(walk.first)].begun = true;
    if (walk.whole->left.fetch_sub(count, std::memory_order_acq_rel) == count) merge(*walk.whole);
    walk.whole = nullptr;
  }

  // A tile: scores of all heads, token by token, so that memory is read as it lies; then weights; then sums.
  void meet(const Walk& walk, int64_t at, int64_t keys) const {
    const Whole& whole = *walk.whole;
    const Tiles<T>& tile = walk.tiles;
    const int64_t tokens = round_up(
        keys, std::max<int64_t>(2 * apart_, W == 16 ? 16 : 8));  // as many as are summed at once
    score(walk, keys, tokens);
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

  void score(const Walk& walk, int64_t keys, int64_t tokens) const {
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
    constexpr int64_t step = W * Units::per_unit;
    if (unit() == 1) return score(std::integral_constant<int, 1>{}, Any{});
    if (unit() == 2) return score(std::integral_constant<int, 2>{}, Any{});
#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bfloat16>) {
      if (rows.lanes == rows.count && (dim_ == 4 * step || dim_ == 2 * step)) {
        return (dim_ == 4 * step ? score_fours<4> : score_fours<2>)(rows, from, skip, tokens, walk.to.scores);
      }
    }
#endif
    if constexpr (step == 32) {  // a vector of bfloat16
      if (dim_ == 4 * step) return score(Most{}, std::integral_constant<int, 4>{});
      if (dim_ == 2 * step) return score(Most{}, std::integral_constant<int, 2>{});
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
      const auto weight = [&](int64_t i) {
        const Vec w = exp2<precise>(precise ? (load(s + i) - base) * exponent_
                                            : fma(load(s + i), splat(exponent_), from));
        total += w;
        return w;
      };
      float* const to = walk.to.weights + v;
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
    with_float_type(out_.dtype, [&](auto* t) {
      using Q = std::remove_pointer_t<decltype(t)>;
      for (int64_t h = 0; h < whole.heads; ++h) {
        for (int64_t i = 0; i < rows_; ++i) {
          const int64_t r = h * slots_ + i;
          float* const row = into.row(r);
          for (int64_t c = 0; c < width_; c += W) {
            Vec x = load(row + c) * into.largest()[r];
            for (int64_t p = 1; p < count; ++p)
              x = fma(load(part(p).row(r) + c), splat(part(p).largest()[r]), x);
            store(row + c, into.totals()[r] == 0 ? Vec{} : x);
          }
          in_order<Units>(row, width_);
#if defined(OPSMITH_PAGED_BYTES)
          if (bytes_) by_fours(row, width_);
#endif
          Q* const to = out_.as<Q>() + whole.sequence * out_.strides[0] + i % queries_ * out_.strides[1] +
                        query_head(whole.head + h, i) * out_.strides[2];
          for_lanes(value_dim_, [&](int64_t c, auto lanes) { store(to + c, load(row + c, lanes), lanes); });
        }
      }
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

void paged_attention(const View& q, const PagedCache& cache, const PagedOptions& options, const View& out) {
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
