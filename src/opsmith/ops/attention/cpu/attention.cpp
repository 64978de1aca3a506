// Attention without the L x S matrix: an online softmax over tiles of keys.
//
// A block of query rows (of all query heads that share a key head) meets one tile of keys after another. The tile
// is packed once for the block, small enough for the first-level cache; ROWS query rows at a time take it through
// scores, weights and the weighted sum of values while all three are in that cache.
#include "attention/attention.h"

#include <cmath>

#include "attention/attention_sequences.h"
#include "paged_attention/paged_attention.h"
#include "pair.h"

namespace opsmith {
namespace {

constexpr int64_t kMaxTile = 256;
constexpr int64_t kScoreStride = kMaxTile + W;  // rows a power of two apart would share cache sets
constexpr int64_t kTileBytes = 64 << 10;  // of packed keys and values: halves take turns in the nearest cache
constexpr int64_t kBlockBytes = 400 << 10;  // of packed queries and sums, well inside a second-level cache
constexpr int64_t kMinBlock = 96;  // rows for which packing a tile is cheap beside using it
constexpr int64_t
    kManyKeys = 64 << 10;  // numbers of a sequence's keys from which one query alone reads them as they lie
constexpr int64_t kMinSplit = 512;  // keys worth a thread of their own

// Weights may exceed 1 by 2^8 before the running maximum is moved: sums stay exact, and moving it is work.
constexpr float kSlack = 8;

struct Item {
  int64_t batch, kv_head, row, rows, key, keys;
};

template <class T>
class Attention {
  using Units = UnitsOf<T>;
  using Element = typename Units::Element;
  static constexpr bool precise = std::is_same_v<T, float>;

 public:
  explicit Attention(const Problem& p)
      : p_(p), depth_(std::max<int64_t>(1, ceil_div(p.dim, Units::per_unit))),
        width_(round_up(p.value_dim, W)) {
    const int64_t key_bytes = 4 * (depth_ + width_ / Units::per_unit);
    tile_ = std::clamp<int64_t>(kTileBytes / key_bytes / PANEL * PANEL, PANEL, kMaxTile);
    tile_ = std::min(tile_, round_up(p.keys, PANEL));
  }

  double cycles() const { return double(heads()) * head_cycles(); }

  // Cuts the work into items: enough of them that `threads` threads share all of it, `total` cycles, evenly.
  void plan(int64_t threads, double total) {
    const int64_t rows = p_.rows();
    const int64_t like = int64_t(total / head_cycles() + 0.5);  // heads like these would be the same work
    const int64_t most = std::clamp<int64_t>(kBlockBytes / (4 * (depth_ + width_)), kMinBlock, 768);
    blocks_ = ceil_div(rows, most);
    if (const int64_t n = like * blocks_; n % threads && n < 4 * threads) {
      blocks_ = std::max(blocks_, std::min(ceil_div(4 * threads, like), rows / kMinBlock));
    }
    block_ = round_up(ceil_div(rows, blocks_), ROWS);
    blocks_ = ceil_div(rows, block_);
    splits_ = 1;
    if (like * blocks_ < threads) {
      splits_ = std::clamp<int64_t>(std::min(ceil_div(2 * threads, like * blocks_), p_.keys / kMinSplit), 1,
                                    64);
    }
    if (splits_ > 1) {
      partial_stride_ = width_ + 2;
      partial_.reset(new float[size_t(items() * block_ * partial_stride_)]);
    }
  }

  int64_t items() const { return heads() * blocks_ * splits_; }

  void run(int64_t i) const { block(i); }

  void finish() const {
    for (int64_t i = 0; splits_ > 1 && i < items(); i += splits_) combine(i);
  }

 private:
  int64_t heads() const { return p_.batch * p_.kv_heads; }

  double head_cycles() const {
    const double pairs = double(p_.rows()) * double(p_.keys) * (p_.options.causal ? 0.5 : 1.0);
    return pairs * double(p_.dim + p_.value_dim + 64) / 32 + double(p_.keys * (p_.dim + p_.value_dim)) / 2 +
           1;
  }

  Item item(int64_t i) const {
    const int64_t split = i % splits_, block = blocks_ - 1 - i / splits_ % blocks_;  // causal: longest first
    const int64_t head = i / splits_ / blocks_, row = block * block_;
    const int64_t share = round_up(ceil_div(p_.keys, splits_), W), key = std::min(split * share, p_.keys);
    return {head / p_.kv_heads,
            head % p_.kv_heads,
            row,
            std::min(block_, p_.rows() - row),
            key,
            std::min(share, p_.keys - key)};
  }

  // What a thread needs for one block.
  struct Buffers {
    float *q, *k, *v, *scores, *weights, *sums, *largest, *totals;
    int64_t floats;

    Buffers(float* base, int64_t block, int64_t tile, int64_t depth, int64_t width) {
      Carver carve{base};
      q = carve.take(block * depth);
      k = carve.take(tile * depth);
      v = carve.take(tile / Units::per_unit * width);
      scores = carve.take(ROWS * kScoreStride);
      weights = carve.take(ROWS * kScoreStride);
      sums = carve.take(block * width);
      largest = carve.take(block);
      totals = carve.take(block * W);
      floats = carve.used;
    }
  };

  void block(int64_t index) const {
    const Item at = item(index);
    const int64_t floats = Buffers(nullptr, block_, tile_, depth_, width_).floats;
    const Buffers to(scratch(floats), block_, tile_, depth_, width_);
    const int64_t padded = round_up(at.rows, ROWS);
    for (int64_t r = 0; r < at.rows; ++r) {
      pack_row<Units>(row_of<T>(p_.q, at.batch, p_.head(at.kv_head, at.row + r), p_.query(at.row + r)),
                      p_.dim, reinterpret_cast<Element*>(to.q + r * depth_), depth_ * Units::per_unit);
    }
    set_lanes(to.q + at.rows * depth_, 0, (padded - at.rows) * depth_);
    set_lanes(to.weights, 0, ROWS * kScoreStride);
    set_lanes(to.sums, 0, padded * width_);
    set_lanes(to.largest, -kInfinity, at.rows);
    set_lanes(to.totals, 0, at.rows * W);

    int64_t from = at.key + at.keys, until = at.key;
    for (int64_t r = at.row; r < at.row + at.rows; ++r) {
      const int64_t position = p_.position(p_.query(r));
      from = std::min(from, p_.first(position));
      until = std::max(until, p_.last(position) + 1);
    }
    from = std::max(from, at.key) / W * W;
    until = std::min(until, at.key + at.keys);
    for (int64_t key = from; key < until; key += tile_) tile(at, to, key, std::min(tile_, until - key));
    splits_ > 1 ? keep_partial(index, at, to) : write(at, to);
  }

  void tile(const Item& at, const Buffers& to, int64_t key, int64_t keys) const {
    bool masked = p_.mask.defined();
    if (p_.one_mask(at.row, at.rows)) {  // padding costs nothing, and what is no padding needs no mask
      const MaskRow mask = p_.mask_row(at.batch, at.kv_head, at.row);
      while (keys > 0 && !mask.visible(key + keys - 1)) --keys;
      if (keys == 0) return;
      masked = false;
      for (int64_t j = 0; j < keys && !masked; ++j) masked = !mask.visible(key + j);
    }
    const T* k = row_of<T>(p_.k, at.batch, at.kv_head, key);
    const T* v = row_of<T>(p_.v, at.batch, at.kv_head, key);
    if (p_.rows() > 1) pack_transposed<Units>(k, p_.k.strides[2], keys, p_.dim, to.k);
    const float* values = to.v;
    int64_t values_stride = width_;
    if constexpr (precise) {  // one strip uses each row once: as it lies
      if (at.rows <= ROWS && p_.value_dim == width_) values = v, values_stride = p_.v.strides[2];
    }
    if (values == to.v) pack_rows<Units>(v, p_.v.strides[2], keys, p_.value_dim, to.v, width_);
    for (int64_t r = 0; r < at.rows; r += ROWS) strip(at, to, r, key, keys, masked, values, values_stride);
  }

  // ROWS query rows against one tile.
  void strip(const Item& at, const Buffers& to, int64_t r, int64_t key, int64_t keys, bool masked,
             const float* values, int64_t values_stride) const {
    const Strip s(p_, at.row + r, int(std::min<int64_t>(ROWS, at.rows - r)), key, keys);
    if (s.keys == 0) return;
    const int64_t vecs = ceil_div(s.keys, W);
    if (p_.rows() > 1) {
      product<Units>(s.rows, vecs, depth_, {to.q + r * depth_, depth_, 1}, to.k, PANEL, depth_ * PANEL,
                     to.scores, kScoreStride, false);
    } else {
      const T* q = row_of<T>(p_.q, at.batch, p_.head(at.kv_head, at.row), p_.query(at.row));
      score_alone<Units>(q, row_of<T>(p_.k, at.batch, at.kv_head, key), p_.k.strides[2], s.keys, p_.dim,
                         to.scores);
    }
    for (int i = 0; i < s.rows; ++i) {
      float* scores = to.scores + i * kScoreStride;
      if (!p_.plain) transform_scores(scores, s.keys, p_.options);
      if (p_.options.alibi.defined()) p_.add_alibi(scores, s.keys, at.kv_head, at.row + r + i, key);
      if (masked) mask_scores(scores, s.keys, key, p_.mask_row(at.batch, at.kv_head, at.row + r + i));
      if (s.first[i] > 0 || s.last[i] < vecs * W - 1) hide(scores, vecs, s.first[i], s.last[i]);
      weigh(scores, reinterpret_cast<Element*>(to.weights + i * kScoreStride), vecs, to, r + i);
    }
    product<Units>(s.rows, width_ / W, ceil_div(s.keys, Units::per_unit), {to.weights, kScoreStride, 1},
                   values, values_stride, PANEL, to.sums + r * width_, width_, true);
  }

  // Scores of one row to weights; when its maximum grows, what was summed so far is scaled down.
  void weigh(const float* s, Element* weights, int64_t vecs, const Buffers& to, int64_t row) const {
    Vec most = load(s);
    for (int64_t v = 1; v < vecs; ++v) most = max(load(s + v * W), most);
    float& largest = to.largest[row];
    float* totals = to.totals + row * W;
    const float exponent = p_.exponent;
    if (any(most > splat(largest + kSlack / exponent))) {
      const float grown = std::max(largest, reduce_max(most));
      if (largest > -kInfinity) {
        const float shrink = std::exp2((largest - grown) * exponent);
        store(totals, load(totals) * shrink);
        float* sums = to.sums + row * width_;
        for (int64_t c = 0; c < width_; c += W) store(sums + c, load(sums + c) * shrink);
      }
      largest = grown;
    }
    const float base = largest == -kInfinity ? 0.0f : largest;
    Vec total = load(totals);
    const float shift = -base * exponent;
    if (p_.plain && !precise && std::abs(shift) < kFarScore) {
      const auto weight = [=](int64_t v) { return exp2_for<T, true>(fma(load(s + v * W), exponent, shift)); };
      int64_t v = 0;
      for (; v + 2 <= vecs; v += 2) {
        const Vec w = weight(v), next = weight(v + 1);
        total += w + next;
        put_in_order(weights + v * W, {w, next}, false);
      }
      if (v < vecs) {
        const Vec w = weight(v);
        total += w;
        store(weights + v * W, w);
      }
    } else {  // exact at the maximum, and safe where a mask holds the lowest float
      for (int64_t v = 0; v < vecs; ++v) {
        const Vec w = exp2<precise>((load(s + v * W) - base) * exponent);
        total += w;
        store(weights + v * W, w);
      }
    }
    store(totals, total);
  }

  // The sink as the last key of a row, without a value. Returns what the row's sums are to be divided by.
  float add_sink(int64_t head, float& total, float& largest) const {
    const Start sink(p_.options, head, p_.exponent);
    if (sink.largest == -kInfinity) return total;
    if (!(sink.largest > largest)) {
      total += float(Start::weight(p_.options.sink(head), largest, p_.exponent));
      return total;
    }
    const float shrink = std::exp2((largest - sink.largest) * p_.exponent);
    total = total * shrink + sink.total;
    largest = sink.largest;
    return total / shrink;
  }

  void write_row(int64_t b, int64_t kv_head, int64_t row, const float* sums, float total,
                 float largest) const {
    const int64_t head = p_.head(kv_head, row), query = p_.query(row);
    T* out = row_of<T>(p_.out, b, head, query);
    const float divisor = p_.options.sinks.defined() ? add_sink(head, total, largest) : total;
    if (divisor == 0) {
      std::fill(out, out + p_.value_dim, T{});
    } else {
      for_lanes(p_.value_dim,
                [&](int64_t c, auto lanes) { store(out + c, load(sums + c) / divisor, lanes); });
    }
    if (p_.row_sums.defined()) {
      float* kept = row_of<float>(p_.row_sums, b, head, query);
      kept[0] = largest;
      kept[1] = total;
    }
  }

  void write(const Item& at, const Buffers& to) const {
    for (int64_t r = 0; r < at.rows; ++r) {
      write_row(at.batch, at.kv_head, at.row + r, to.sums + r * width_, reduce_add(load(to.totals + r * W)),
                to.largest[r]);
    }
  }

  void keep_partial(int64_t index, const Item& at, const Buffers& to) const {
    for (int64_t r = 0; r < at.rows; ++r) {
      float* kept = partial_.get() + (index * block_ + r) * partial_stride_;
      std::copy_n(to.sums + r * width_, width_, kept);
      kept[width_] = to.largest[r];
      kept[width_ + 1] = reduce_add(load(to.totals + r * W));
    }
  }

  // The splits of one block, the first of which is item `index`, into its first one, and out.
  void combine(int64_t index) const {
    const Item at = item(index);
    for (int64_t r = 0; r < at.rows; ++r) {
      float* sums = partial_.get() + (index * block_ + r) * partial_stride_;
      const int64_t next = block_ * partial_stride_;
      float largest = -kInfinity, total = 0;
      for (int64_t s = 0; s < splits_; ++s) largest = std::max(largest, sums[s * next + width_]);
      for (int64_t s = 0; s < splits_; ++s) {
        const float* part = sums + s * next;
        const float factor = part[width_] == largest ? 1.0f
                                                     : std::exp2((part[width_] - largest) * p_.exponent);
        total += part[width_ + 1] * factor;
        for (int64_t c = 0; c < width_; c += W) {
          const Vec x = load(part + c) * factor;
          store(sums + c, s ? load(sums + c) + x : x);
        }
      }
      write_row(at.batch, at.kv_head, at.row + r, sums, total, largest);
    }
  }

  Problem p_;
  int64_t depth_, width_, tile_, blocks_ = 1, block_ = ROWS, splits_ = 1, partial_stride_ = 0;
  std::unique_ptr<float[]> partial_;
};

template <class T>
void run(const AttentionCall& x) {
  std::vector<Attention<T>> parts;
  for_problems<T>(x, [&](const Problem& p, int64_t, int64_t) {
    if (p.queries > 0) parts.emplace_back(p);
  });
  run_all(parts);
}

// One query a sequence, at the last key: each sequence is one block of a cache. Packing tiles would take longer than
// reading the keys once.
void decode(const AttentionCall& x) {
  struct TokensFirst {  // [B, heads, tokens, D] as [B, tokens, heads, D]
    int64_t sizes[4], strides[4];
    View view;
    explicit TokensFirst(const View& x)
        : sizes{x.sizes[0], x.sizes[2], x.sizes[1], x.sizes[3]},
          strides{x.strides[0], x.strides[2], x.strides[1], x.strides[3]},
          view{x.data, x.dtype, 4, sizes, strides} {}
  };
  const TokensFirst queries(x.q), keys(x.k), values(x.v), outs(x.out);
  const PagedCache cache{keys.view, values.view, View{}, View{}, View{}, View{}};
  paged_attention(queries.view, cache, x.options, outs.view);
}

}  // namespace

void attention(const AttentionCall& x) {
  if (x.q.sizes[0] * x.q.sizes[1] * x.q.sizes[2] == 0) return;
  if (x.q.sizes[2] == 1 && !x.sequences.defined() && !x.mask.defined() && !x.row_sums.defined() &&
      x.k.sizes[1] * x.k.sizes[2] * x.k.sizes[3] >= kManyKeys) {
    return decode(x);
  }
  with_float_type(x.q.dtype, [&]<class T>(T*) { run<T>(x); });
}

}  // namespace opsmith
