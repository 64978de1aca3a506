// Decoding: a few queries against many keys, bound by the keys' and values' way from memory.
//
// The keys of all sequences are cut into pieces, and whoever is free takes the next, so that one sequence uses every core;
// who finishes the last piece of a sequence merges its pieces. A piece takes its keys some dozens at a time through
// scores, weights and the weighted sum of values, for all query rows that share a key head, while the next ones are on
// their way to the second-level cache.
#include "paged_attention.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "attention_scores.h"
#include "paged_rows.h"
#include "parallel.h"

namespace opsmith {
namespace {

constexpr int64_t kTileBytes = 256 << 10;  // of keys and values at a time: they wait in the second-level cache
constexpr int64_t kAheadBytes = 32 << 10;  // asked for before they are used
constexpr int64_t kTogether = 16;          // keys of one head before the next head's: memory is read nearly as it lies
constexpr int64_t kPieceBytes = 32 << 10;  // worth a piece of its own
constexpr int64_t kPieces = 4;             // for each thread, so that one that was held up is helped
constexpr int64_t kFewKeys = 64;           // pieces of fewer keys are cut by heads instead
constexpr int64_t kSerialBytes = 192 << 10;

struct Piece {
  int64_t sequence, head, heads, from, until;
  int64_t whole;    // which of the wholes it is a part of
  int64_t partial;  // where its sums go
};

struct Whole {  // heads of a sequence, in `count` pieces whose sums lie one after the other
  int64_t sequence, head, heads, partial, count;
};

// What was summed, where its exponents count from. A row is `width` floats, the sum of the weights in W parts, and the
// largest score.
struct Sums {
  float* data;
  int64_t width;

  static int64_t stride(int64_t width) { return width + 2 * W; }
  float* row(int64_t r) const { return data + r * stride(width); }
  float* total(int64_t r) const { return row(r) + width; }
  float& largest(int64_t r) const { return row(r)[width + W]; }
};

template <class T>
class Paged {
  using Units = UnitsOf<T>;
  using Element = typename Units::Element;
  static constexpr bool quantized = std::is_same_v<T, int8_t>;
  static constexpr int64_t group = W * Units::per_unit;

 public:
  Paged(const View& q, const PagedCache& cache, const PagedOptions& options, const View& out)
      : q_(q), c_(cache), options_{options.scale, true, options.window, options.softcap}, out_(out),
        queries_(q.sizes[1]), kv_heads_(cache.keys.sizes[2]), dim_(q.sizes[3]), value_dim_(out.sizes[3]),
        rows_(kv_heads_ ? q.sizes[2] / kv_heads_ * queries_ : 0), depth_(round_up(ceil_div(dim_, Units::per_unit), W)),
        width_(round_up(value_dim_, group)), plain_(!(options.softcap > 0) && options.scale > 0),
        exponent_(plain_ ? options.scale * log2_e : log2_e), precise_(q.dtype == DType::f32) {
    plan();
  }

  void run() {
    const int64_t threads = bytes_ < kSerialBytes ? 1 : num_threads(), stride = heads_at_once_ * rows_ * Sums::stride(width_);
    static thread_local std::vector<float> kept;  // by the thread that calls: fresh pages at every call would cost more
    if (int64_t(kept.size()) < partials_ * stride) kept.resize(size_t(partials_ * stride));
    partial_ = kept.data();
    partial_stride_ = stride;
    const std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[wholes_.size()]);
    for (size_t i = 0; i < wholes_.size(); ++i) left[i].store(wholes_[i].count, std::memory_order_relaxed);
    std::atomic<int64_t> next{0};
    const int64_t pieces = int64_t(pieces_.size());
    const auto work = [&](int64_t, int64_t) {
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
        const Piece& piece = pieces_[size_t(i)];
        const Whole& whole = wholes_[size_t(piece.whole)];
        attend(piece, whole.count == 1);
        if (whole.count > 1 && left[size_t(piece.whole)].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(whole);
      }
    };
    threads > 1 ? parallel_for(std::min(threads, pieces), 1, work) : work(0, 1);
  }

 private:
  int64_t first_key(int64_t length) const { return first_visible(length, queries_, options_.window); }

  void plan() {
    const int64_t batch = q_.sizes[0], element = sizeof(T);
    int64_t keys = 0;
    for (int64_t b = 0; b < batch; ++b) keys += c_.length(b) - first_key(c_.length(b));
    const int64_t head_bytes = std::max<int64_t>(1, (dim_ + value_dim_) * element);
    bytes_ = keys * head_bytes * kv_heads_;
    const int64_t pieces = bytes_ < kSerialBytes ? 1 : kPieces * num_threads();
    // Heads that lie further apart than keys are read one after the other, as memory has them.
    const bool head_major = c_.keys.strides[2] > c_.keys.strides[1] && c_.block_size() > 1;
    int64_t groups = head_major ? kv_heads_ : std::min(ceil_div(kFewKeys * pieces, std::max<int64_t>(keys, 1)), kv_heads_);
    groups = std::max<int64_t>(groups, 1);
    heads_at_once_ = ceil_div(kv_heads_, groups);
    groups = ceil_div(kv_heads_, heads_at_once_);
    const int64_t least = std::max<int64_t>(W, kPieceBytes / (head_bytes * heads_at_once_));
    const int64_t share = round_up(std::max(ceil_div(keys * groups, pieces), least), W);
    tile_ = std::clamp<int64_t>(kTileBytes / (head_bytes * heads_at_once_) / W * W, W, kPagedTile);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t until = c_.length(b), from = first_key(until);
      const int64_t count = std::max<int64_t>(1, ceil_div(until - from, share)), each = round_up(ceil_div(until - from, count), W);
      for (int64_t head = 0; head < kv_heads_; head += heads_at_once_) {
        const int64_t heads = std::min(heads_at_once_, kv_heads_ - head), whole = int64_t(wholes_.size());
        wholes_.push_back({b, head, heads, partials_, count});
        for (int64_t i = 0; i < count; ++i) {
          const int64_t begin = std::min(until, from + i * each);
          pieces_.push_back({b, head, heads, begin, std::min(until, begin + each), whole, partials_ + i});
        }
        if (count > 1) partials_ += count;
      }
    }
  }

  // A thread's memory for one piece.
  struct Buffers {
    float *q, *scores, *weights, *key_scale, *value_scale, *sums;
    int64_t floats;

    Buffers(float* base, int64_t rows, int64_t depth, int64_t width) {
      Carver carve{base};
      q = carve.take(rows * depth);
      scores = carve.take(rows * kPagedTile);
      weights = carve.take(rows * kPagedTile);
      key_scale = carve.take(kPagedTile);
      value_scale = carve.take(kPagedTile);
      sums = carve.take(rows * Sums::stride(width));
      floats = carve.used;
    }
  };

  // Where keys lie, those of a tile and of the next one. The last pointer is repeated, for who reads several at a time.
  struct Tiles {
    static constexpr int64_t most = 2 * kPagedTile;
    const T *keys[most + W], *values[most + W];
    const float *key_scale[most], *value_scale[most];
    int64_t count = 0;

    void drop(int64_t n) {
      count -= n;
      for (const T** p : {keys, values}) std::copy_n(p + n, count, p);
      for (const float** p : {key_scale, value_scale}) std::copy_n(p + n, quantized ? count : 0, p);
    }
  };

  void find(Tiles& to, int64_t sequence, int64_t from, int64_t until) const {
    if (from == until) return;
    const int64_t size = c_.block_size(), end = to.count + until - from;
    int64_t block = from / size, slot = from % size;
    for (int64_t j = to.count; j < end; ++block, slot = 0) {
      const int64_t at = c_.block(sequence, block), stop = std::min(end, j + size - slot);
      for (; j < stop; ++j, ++slot) {
        to.keys[j] = place<T>(c_.keys, at, slot);
        to.values[j] = place<T>(c_.values, at, slot);
        if constexpr (quantized) {
          to.key_scale[j] = place<float>(c_.key_scale, at, slot);
          to.value_scale[j] = place<float>(c_.value_scale, at, slot);
        }
      }
    }
    to.count = end;
    for (int64_t j = end; end > 0 && j < end + W; ++j) to.keys[j] = to.keys[end - 1], to.values[j] = to.values[end - 1];
  }

  template <class E>
  static const E* place(const View& x, int64_t block, int64_t slot) {
    return x.as<E>() + block * x.strides[0] + slot * x.strides[1];
  }

  // Row r of a key head: query r % L of its query head r / L.
  int64_t head(int64_t kv_head, int64_t row) const { return kv_head * (rows_ / queries_) + row / queries_; }

  void attend(const Piece& piece, bool alone) const {
    const int64_t rows = piece.heads * rows_;
    const Buffers to(Workspace::get(Buffers(nullptr, rows, depth_, width_).floats), rows, depth_, width_);
    const Sums sums{alone ? to.sums : partial_ + piece.partial * partial_stride_, width_};
    std::fill(sums.data, sums.row(rows), 0.0f);
    with_float_type(q_.dtype, [&](auto* t) {
      using Q = std::remove_pointer_t<decltype(t)>;
      for (int64_t r = 0; r < rows; ++r) {
        sums.largest(r) = -kInfinity;
        const int64_t of = r % rows_, h = head(piece.head + r / rows_, of);
        const Q* from = q_.as<Q>() + piece.sequence * q_.strides[0] + of % queries_ * q_.strides[1] + h * q_.strides[2];
        pack_row<Units>(from, dim_, reinterpret_cast<Element*>(to.q + r * depth_), depth_ * Units::per_unit);
      }
    });
    Tiles tiles;
    int64_t found = std::min(piece.from + tile_, piece.until);
    find(tiles, piece.sequence, piece.from, found);
    for (int64_t at = piece.from; at < piece.until;) {
      const int64_t keys = std::min(tile_, piece.until - at), next = std::min(found + tile_, piece.until);
      find(tiles, piece.sequence, found, next);
      found = next;
      meet(piece, at, keys, tiles, to, sums);
      tiles.drop(keys);
      at += keys;
    }
    if (alone) {
      for (int64_t r = 0; r < rows; ++r) write(piece.sequence, piece.head + r / rows_, r % rows_, sums, r);
    }
  }

  static void gather(const float* const* from, int64_t at, int64_t count, float* to) {
    for (int64_t j = 0; j < count; ++j) to[j] = from[j][at];
    set_lanes(to + count, 0, round_up(count, W) - count);  // weights of no key are multiplied too
  }

  // A tile: scores of all heads, some keys at a time, so that memory is read as it lies; then weights; then sums.
  void meet(const Piece& piece, int64_t at, int64_t keys, const Tiles& tile, const Buffers& to, const Sums& sums) const {
    Ahead ahead = asking(tile.keys, tile.count, piece, c_.keys.strides[2], dim_);
    for (int64_t j = 0; j < keys; j += kTogether) {
      for (int64_t h = 0; h < piece.heads; ++h) {
        const int64_t offset = (piece.head + h) * c_.keys.strides[2], count = std::min(kTogether, keys - j);
        in_rows(h, [&](auto n, int64_t r) {
          score_keys<Units, decltype(n)::value, T>(to.q + r * depth_, depth_, tile.keys + j, ahead, offset, count, dim_,
                                                   to.scores + r * kPagedTile + j);
        });
      }
    }
    weigh_all(piece, at, keys, tile, to, sums);
    ahead = asking(tile.values, tile.count, piece, c_.values.strides[2], value_dim_);
    for (int64_t j = 0; j < keys; j += kTogether) {
      for (int64_t h = 0; h < piece.heads; ++h) {
        const int64_t offset = (piece.head + h) * c_.values.strides[2], count = std::min(kTogether, keys - j);
        in_rows(h, [&](auto n, int64_t r) {
          const Element* weights = reinterpret_cast<const Element*>(to.weights) + r * kPagedTile + j;
          add_all_values<Units, decltype(n)::value, T>(weights, tile.values + j, ahead, offset, count, value_dim_,
                                                       sums.row(r), Sums::stride(width_));
        });
      }
    }
  }

  // Rows of a tile some way ahead, for what a piece reads of each.
  static Ahead asking(const T* const* rows, int64_t count, const Piece& piece, int64_t head_stride, int64_t dim) {
    const int64_t element = sizeof(T), run = ((piece.heads - 1) * head_stride + dim) * element;
    const int64_t bytes = head_stride == dim ? run : dim * element;  // of heads that lie apart, one is all that is asked for
    const int64_t skip = std::min(count, ceil_div(kAheadBytes, std::max<int64_t>(bytes, 1)));
    return {reinterpret_cast<const char* const*>(rows) + skip, count - skip, piece.head * head_stride * element, bytes};
  }

  void weigh_all(const Piece& piece, int64_t at, int64_t keys, const Tiles& tile, const Buffers& to, const Sums& sums) const {
    const int64_t vecs = ceil_div(keys, W), length = c_.length(piece.sequence);
    for (int64_t h = 0; h < piece.heads; ++h) {
      if constexpr (quantized) {
        gather(tile.key_scale, (piece.head + h) * c_.key_scale.strides[2], keys, to.key_scale);
        gather(tile.value_scale, (piece.head + h) * c_.value_scale.strides[2], keys, to.value_scale);
      }
      for (int64_t i = 0; i < rows_; ++i) {
        float* s = to.scores + (h * rows_ + i) * kPagedTile;
        if constexpr (quantized) {
          for (int64_t j = 0; j < vecs * W; j += W) store(s + j, load(s + j) * load(to.key_scale + j));
        }
        if (!plain_) transform_scores(s, keys, options_);
        const int64_t position = length - queries_ + i % queries_;
        const int64_t first = options_.window > 0 ? position - options_.window + 1 - at : 0;
        const int64_t last = std::min(position - at, keys - 1);
        if (first > 0 || last < vecs * W - 1) hide(s, vecs, first, last);
        precise_ ? weigh<true>(s, vecs, h * rows_ + i, to, sums) : weigh<false>(s, vecs, h * rows_ + i, to, sums);
      }
    }
  }

  // The rows of head h of a piece, as many at a time as registers hold: f(how many, which).
  template <class F>
  void in_rows(int64_t h, const F& f) const {
    int64_t r = h * rows_;
    const int64_t end = r + rows_;
    for (; r + 4 <= end; r += 4) f(std::integral_constant<int, 4>{}, r);
    for (; r + 2 <= end; r += 2) f(std::integral_constant<int, 2>{}, r);
    if (r < end) f(std::integral_constant<int, 1>{}, r);
  }

  // Scores of a row to weights; when its maximum grows, what was summed so far is scaled down.
  template <bool precise>
  void weigh(const float* s, int64_t vecs, int64_t row, const Buffers& to, const Sums& sums) const {
    Vec most = load(s);
    for (int64_t v = 1; v < vecs; ++v) most = max(load(s + v * W), most);
    const float here = reduce_max(most);
    float& largest = sums.largest(row);
    if (here > largest) {
      if (largest > -kInfinity) {
        const float shrink = std::exp2((largest - here) * exponent_);
        float* p = sums.row(row);
        for (int64_t c = 0; c < width_; c += W) store(p + c, load(p + c) * shrink);
        store(sums.total(row), load(sums.total(row)) * shrink);
      }
      largest = here;
    }
    const float base = largest == -kInfinity ? 0.0f : largest;
    Element* weights = reinterpret_cast<Element*>(to.weights) + row * kPagedTile;
    Vec total = load(sums.total(row));
    for (int64_t v = 0; v < vecs; ++v) {
      Vec w = exp2<precise>((load(s + v * W) - base) * exponent_);
      total += w;
      if constexpr (quantized) w *= load(to.value_scale + v * W);
      store(weights + v * W, w);
    }
    store(sums.total(row), total);
  }

  void merge(const Whole& whole) const {
    const auto part = [&](int64_t i) { return Sums{partial_ + (whole.partial + i) * partial_stride_, width_}; };
    const Sums into = part(0);
    for (int64_t r = 0; r < whole.heads * rows_; ++r) {
      float largest = -kInfinity;
      for (int64_t i = 0; i < whole.count; ++i) largest = std::max(largest, part(i).largest(r));
      float* p = into.row(r);
      for (int64_t i = 0; i < whole.count; ++i) {
        const Sums from = part(i);
        const float factor = from.largest(r) == largest ? 1.0f : std::exp2((from.largest(r) - largest) * exponent_);
        for (int64_t c = 0; c < width_ + W; c += W) {  // the parts of the weights' sum too
          const Vec x = load(from.row(r) + c) * factor;
          store(p + c, i ? load(p + c) + x : x);
        }
      }
      write(whole.sequence, whole.head + r / rows_, r % rows_, into, r);
    }
  }

  void write(int64_t sequence, int64_t kv_head, int64_t row, const Sums& sums, int64_t r) const {
    float* from = sums.row(r);
    const float total = reduce_add(load(sums.total(r)));
    in_order<Units>(from, width_);
    with_float_type(out_.dtype, [&](auto* t) {
      using Q = std::remove_pointer_t<decltype(t)>;
      Q* to = out_.as<Q>() + sequence * out_.strides[0] + row % queries_ * out_.strides[1] +
              head(kv_head, row) * out_.strides[2];
      // What no key was seen by is zeros; NaN stays NaN.
      for_lanes(value_dim_, [&](int64_t c, auto lanes) {
        store(to + c, total == 0 ? Vec{} : load(from + c, lanes) / total, lanes);
      });
    });
  }

  View q_;
  PagedCache c_;
  AttentionOptions options_;
  View out_;
  int64_t queries_, kv_heads_, dim_, value_dim_, rows_, depth_, width_;
  bool plain_;
  float exponent_;
  bool precise_;
  int64_t bytes_ = 0, heads_at_once_ = 1, tile_ = W, partials_ = 0, partial_stride_ = 0;
  float* partial_ = nullptr;
  std::vector<Piece> pieces_;
  std::vector<Whole> wholes_;
};

}  // namespace

void paged_attention(const View& q, const PagedCache& cache, const PagedOptions& options, const View& out) {
  if (q.sizes[0] * q.sizes[1] * q.sizes[2] == 0) return;
  switch (cache.keys.dtype) {
    case DType::f32: return Paged<float>(q, cache, options, out).run();
    case DType::bf16: return Paged<bfloat16>(q, cache, options, out).run();
    case DType::i8: return Paged<int8_t>(q, cache, options, out).run();
    default: return Paged<float16>(q, cache, options, out).run();
  }
}

}  // namespace opsmith
