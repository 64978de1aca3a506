// Gradients of attention: the weights are computed again tile by tile, from the scores and what the
// forward pass kept of each row.
//
// A block of query rows meets one tile of keys after another. ROWS rows at a time give their weights P and the
// scores' gradient dS = P * (dout . v - delta), which at once adds to dq; both are kept for the block, and then
//   dv^T += dout^T P      dk^T += q^T dS
// add to the tile's sums, which stay transposed so that P and dS serve as they are. All blocks of a key head are
// one thread's, in order; where there are more threads than heads, parts of them add to sums of their own.
#include "attention/attention.h"
#include "attention/attention_sequences.h"

namespace opsmith {
namespace {

constexpr int64_t kMaxTile = 128;
constexpr int64_t kStride = kMaxTile + W;  // rows a power of two apart would share cache sets
constexpr int64_t kTileBytes = 32 << 10;  // of a packed tile, two thirds of a usual first-level cache
constexpr int64_t kBlock = 42 * ROWS;  // query rows: amortizes packing a tile and touching its sums

template <class T>
class AttentionBackward {
  using Units = UnitsOf<T>;
  using Element = typename Units::Element;
  static constexpr bool precise = std::is_same_v<T, float>;
  static constexpr int64_t pack = Units::per_unit;

 public:
  AttentionBackward(const Problem& p, const AttentionGradients& to)
      : p_(p), to_(to), depth_(ceil_div(p.dim, pack)), value_depth_(ceil_div(p.value_dim, pack)),
        width_(round_up(p.dim, W)), value_width_(round_up(p.value_dim, W)) {
    const int64_t key_bytes = 4 * std::max<int64_t>(1, depth_ + width_ / pack + value_depth_);
    // In float32 a strip's tile comes from the second-level cache in any case, and a row that is one tile needs no delta.
    tile_ = precise ? kMaxTile : std::clamp<int64_t>(kTileBytes / key_bytes / PANEL * PANEL, PANEL, kMaxTile);
    tile_ = std::min(tile_, std::max<int64_t>(round_up(p.keys, PANEL), PANEL));
    tiles_ = ceil_div(p.keys, tile_);
    block_ = std::min(kBlock, round_up(p.rows(), ROWS));
    sums_ = (round_up(p.dim, ROWS) + round_up(p.value_dim, ROWS)) * tile_;
  }

  double cycles() const { return double(heads()) * head_cycles(); }

  // Cuts the work into items: enough of them that `threads` threads share all of it, `total` cycles, evenly.
  void plan(int64_t threads, double total) {
    const int64_t like = int64_t(total / head_cycles() + 0.5);  // heads like these would be the same work
    if (like % threads && like < 4 * threads) {
      parts_ = std::clamp<int64_t>(std::min(ceil_div(2 * threads, like), ceil_div(p_.rows(), kBlock)), 1, 16);
    }
    if (parts_ > 1) shared_.reset(new float[size_t(items() * tiles_ * sums_)]);
    if (to_.dsinks.defined()) of_sinks_.assign(size_t(items() * p_.group), 0.0);
  }

  int64_t items() const { return heads() * parts_; }

  void run(int64_t i) { item(i); }

  void finish() const {
    if (parts_ == 1) return;
    const int64_t n = heads() * tiles_;
    parallel_for(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) gather(i / tiles_, i % tiles_);
    });
  }

  // The gradients of the sinks, added to those of each query head.
  void add_sinks(std::vector<double>& sums) const {
    for (size_t i = 0; i < of_sinks_.size(); ++i) {
      const int64_t kv_head = int64_t(i) / p_.group / parts_ % p_.kv_heads;
      sums[size_t(kv_head * p_.group + int64_t(i) % p_.group)] += of_sinks_[i];
    }
  }

 private:
  int64_t heads() const { return p_.batch * p_.kv_heads; }

  bool whole_rows() const { return precise && tiles_ == 1; }  // all keys of a row are in one tile

  double head_cycles() const {
    const double pairs = double(p_.rows()) * double(p_.keys) * (p_.options.causal ? 0.5 : 1.0);
    return pairs * double(3 * p_.dim + 2 * p_.value_dim + 96) / 32 + 1;
  }

  // What a thread needs. Rows are padded by ROWS: a product reads and writes whole groups of them.
  struct Buffers {
    float *q, *dout, *q_rows, *dout_rows, *dq, *largest, *inverse, *delta, *k, *k_rows, *v, *outs, *scores,
        *gradients, *slope, *p, *ds, *p_rows, *ds_rows, *sums;
    float* weighted;  // sums of the weights times dout . v, which sinks take for delta where out is rounded
    int64_t floats;

    Buffers(float* base, const AttentionBackward& a) {
      Carver carve{base};
      q = carve.take(a.block_ * a.depth_);
      dout = carve.take(a.block_ * a.value_depth_);
      q_rows = carve.take(a.block_ / pack * a.width_ + ROWS);
      dout_rows = carve.take(a.block_ / pack * a.value_width_ + ROWS);
      dq = carve.take(a.block_ * a.width_);
      largest = carve.take(a.block_);
      inverse = carve.take(a.block_);
      delta = carve.take(a.block_);
      k = carve.take(a.tile_ * a.depth_);
      k_rows = carve.take(a.tile_ / pack * a.width_);
      v = carve.take(a.tile_ * a.value_depth_);
      outs = carve.take(ROWS * a.value_depth_);
      scores = carve.take(ROWS * kStride);
      gradients = carve.take(ROWS * kStride);
      slope = carve.take(kStride);
      p = carve.take(ROWS * kStride);
      ds = carve.take(ROWS * kStride);
      p_rows = carve.take(a.block_ / pack * a.tile_);
      ds_rows = carve.take(a.block_ / pack * a.tile_);
      sums = a.shared_ ? nullptr : carve.take(a.tiles_ * a.sums_);
      weighted = !precise && a.to_.dsinks.defined() ? carve.take(a.block_) : nullptr;
      floats = carve.used;
    }
  };

  struct Block {
    int64_t batch, kv_head, row, rows;
  };

  void item(int64_t i) {
    Buffers to(scratch(Buffers(nullptr, *this).floats), *this);
    if (shared_) to.sums = shared_.get() + i * tiles_ * sums_;
    set_lanes(to.sums, 0, tiles_ * sums_);
    set_lanes(to.q_rows, 0, block_ / pack * width_ + ROWS);
    set_lanes(to.dout_rows, 0, block_ / pack * value_width_ + ROWS);
    set_lanes(to.p, 0, ROWS * kStride);
    set_lanes(to.ds, 0, ROWS * kStride);
    const int64_t head = i / parts_, part = i % parts_, blocks = ceil_div(p_.rows(), kBlock);
    for (int64_t n = blocks * part / parts_; n < blocks * (part + 1) / parts_; ++n) {
      const int64_t row = n * kBlock;
      const Block at{head / p_.kv_heads, head % p_.kv_heads, row, std::min(kBlock, p_.rows() - row)};
      block(at, to);
      if (to_.dsinks.defined()) sum_sinks(at, to, of_sinks_.data() + i * p_.group);
    }
    if (shared_) return;
    for (int64_t t = 0; t < tiles_; ++t) write_tile(head, t, to.sums + t * sums_);
  }

  void block(const Block& at, const Buffers& to) const {
    pack_queries(at, to);
    for (int64_t t = 0; t < tiles_; ++t) tile(at, to, t);
    for (int64_t r = 0; r < at.rows; ++r) {
      T* dq = row_of<T>(to_.dq, at.batch, p_.head(at.kv_head, at.row + r), p_.query(at.row + r));
      const float* sum = to.dq + r * width_;
      for_lanes(p_.dim,
                [&](int64_t c, auto lanes) { store(dq + c, load(sum + c) * p_.options.scale, lanes); });
    }
  }

  // Each row's sink loses what its weight takes from the others: it has no value of its own.
  void sum_sinks(const Block& at, const Buffers& to, double* sums) const {
    for (int64_t r = 0; r < at.rows; ++r) {
      if (to.inverse[r] == kInfinity) continue;  // the row has neither key nor sink
      const int64_t member = (at.row + r) / p_.queries, head = at.kv_head * p_.group + member;
      const double share = Start::weight(p_.options.sink(head), to.largest[r], p_.exponent) * to.inverse[r];
      sums[member] -= share * (precise ? exact_delta(at.batch, head, p_.query(at.row + r)) : to.weighted[r]);
    }
  }

  double exact_delta(int64_t batch, int64_t head, int64_t query) const {
    const T* out = row_of<T>(p_.out, batch, head, query);
    const T* dout = row_of<T>(to_.dout, batch, head, query);
    double sum = 0;
    for (int64_t c = 0; c < p_.value_dim; ++c) sum += double(to_float(out[c])) * double(to_float(dout[c]));
    return sum;
  }

  void pack_queries(const Block& at, const Buffers& to) const {
    const int64_t padded = round_up(at.rows, ROWS), length = depth_ * pack,
                  value_length = value_depth_ * pack;
    Element* q = reinterpret_cast<Element*>(to.q);
    Element* dout = reinterpret_cast<Element*>(to.dout);
    for (int64_t r = 0; r < at.rows; ++r) {
      const int64_t head = p_.head(at.kv_head, at.row + r), query = p_.query(at.row + r);
      pack_row<Units>(row_of<T>(p_.q, at.batch, head, query), p_.dim, q + r * length, length);
      pack_row<Units>(row_of<T>(to_.dout, at.batch, head, query), p_.value_dim, dout + r * value_length,
                      value_length);
      const float* sums = row_of<float>(p_.row_sums, at.batch, head, query);
      to.largest[r] = sums[0];
      to.inverse[r] = 1 / sums[1];
    }
    std::fill(q + at.rows * length, q + padded * length, Element{});
    std::fill(dout + at.rows * value_length, dout + padded * value_length, Element{});
    set_lanes(to.dq, 0, padded * width_);
    if (to.weighted) set_lanes(to.weighted, 0, at.rows);
    pack_rows<Units>(q, length, at.rows, p_.dim, to.q_rows, width_);
    pack_rows<Units>(dout, value_length, at.rows, p_.value_dim, to.dout_rows, value_width_);
    if (whole_rows()) return;
    for (int64_t r = 0; r < at.rows; r += ROWS)
      sum_deltas(at, to, r, int(std::min<int64_t>(ROWS, at.rows - r)));
  }

  // delta = dout . out, added up in the order in which dout . v is: where a row sees one key, and out is v, the
  // difference is exactly zero.
  void sum_deltas(const Block& at, const Buffers& to, int64_t r, int rows) const {
    for (int i = 0; i < rows; ++i) {
      const int64_t row = at.row + r + i;
      pack_row<Units>(row_of<T>(p_.out, at.batch, p_.head(at.kv_head, row), p_.query(row)), p_.value_dim,
                      reinterpret_cast<Element*>(to.outs) + i * p_.value_dim, p_.value_dim);
    }
    const int64_t vecs = ceil_div(rows, W);
    pack_transposed<Units>(reinterpret_cast<const Element*>(to.outs), p_.value_dim, rows, p_.value_dim, to.v);
    product<Units>(rows, vecs, value_depth_, {to.dout + r * value_depth_, value_depth_, 1}, to.v, PANEL,
                   value_depth_ * PANEL, to.scores, kStride, false);
    for (int i = 0; i < rows; ++i) to.delta[r + i] = to.scores[i * kStride + i];
  }

  void tile(const Block& at, const Buffers& to, int64_t t) const {
    const int64_t key = t * tile_, keys = std::min(tile_, p_.keys - key), vecs = ceil_div(keys, W);
    int64_t begin = at.rows, end = 0;  // the strips that see the tile
    bool packed = false;
    for (int64_t r = 0; r < at.rows; r += ROWS) {
      const Strip s(p_, at.row + r, int(std::min<int64_t>(ROWS, at.rows - r)), key, keys);
      const int64_t unit = r / pack * tile_;
      if (s.keys == 0) {
        set_lanes(to.p_rows + unit, 0, ROWS / pack * tile_);
        set_lanes(to.ds_rows + unit, 0, ROWS / pack * tile_);
        continue;
      }
      if (!packed) pack_keys(at, to, key, keys);
      packed = true;
      strip(at, to, r, s, key);
      pack_rows<Units>(reinterpret_cast<Element*>(to.p), kStride * pack, s.rows, s.keys, to.p_rows + unit,
                       tile_);
      pack_rows<Units>(reinterpret_cast<Element*>(to.ds), kStride * pack, s.rows, s.keys, to.ds_rows + unit,
                       tile_);
      begin = std::min(begin, r);
      end = r + s.rows;
    }
    if (end == 0) return;
    const int64_t skip = begin / pack, depth = ceil_div(end, pack) - skip;
    float* sums = to.sums + t * sums_;
    add_transposed(to.q_rows + skip * width_, width_, p_.dim, to.ds_rows + skip * tile_, vecs, depth, sums);
    add_transposed(to.dout_rows + skip * value_width_, value_width_, p_.value_dim, to.p_rows + skip * tile_,
                   vecs, depth, sums + round_up(p_.dim, ROWS) * tile_);
  }

  void pack_keys(const Block& at, const Buffers& to, int64_t key, int64_t keys) const {
    const T* k = row_of<T>(p_.k, at.batch, at.kv_head, key);
    const T* v = row_of<T>(p_.v, at.batch, at.kv_head, key);
    pack_transposed<Units>(k, p_.k.strides[2], keys, p_.dim, to.k);
    pack_transposed<Units>(v, p_.v.strides[2], keys, p_.value_dim, to.v);
    pack_rows<Units>(k, p_.k.strides[2], keys, p_.dim, to.k_rows, width_);
  }

  // sums[n, keys] += rows^T weights
  void add_transposed(const float* rows, int64_t width, int64_t n, const float* weights, int64_t vecs,
                      int64_t depth, float* sums) const {
    for (int64_t v = 0; v < vecs; v += VECS) {  // a panel of weights stays in the cache for all n
      for (int64_t r = 0; r < n; r += ROWS) {
        product<Units>(int(std::min<int64_t>(ROWS, n - r)), std::min<int64_t>(VECS, vecs - v), depth,
                       {rows + r, 1, width}, weights + v * W, tile_, PANEL, sums + r * tile_ + v * W, tile_,
                       true);
      }
    }
  }

  // The weights and the scores' gradients of ROWS rows; adds to their dq.
  void strip(const Block& at, const Buffers& to, int64_t r, const Strip& s, int64_t key) const {
    const int64_t vecs = ceil_div(s.keys, W);
    if (p_.rows() > 1) {
      product<Units>(s.rows, vecs, depth_, {to.q + r * depth_, depth_, 1}, to.k, PANEL, depth_ * PANEL,
                     to.scores, kStride, false);
    } else {  // as in the forward pass
      const T* q = row_of<T>(p_.q, at.batch, p_.head(at.kv_head, at.row), p_.query(at.row));
      score_alone<Units>(q, row_of<T>(p_.k, at.batch, at.kv_head, key), p_.k.strides[2], s.keys, p_.dim,
                         to.scores);
    }
    product<Units>(s.rows, vecs, value_depth_, {to.dout + r * value_depth_, value_depth_, 1}, to.v, PANEL,
                   value_depth_ * PANEL, to.gradients, kStride, false);
    for (int i = 0; i < s.rows; ++i) {
      float* scores = to.scores + i * kStride;
      if (!p_.plain) transform_scores(scores, s.keys, p_.options, to.slope);
      if (p_.options.alibi.defined()) p_.add_alibi(scores, s.keys, at.kv_head, at.row + r + i, key);
      if (p_.mask.defined())
        mask_scores(scores, s.keys, key, p_.mask_row(at.batch, at.kv_head, at.row + r + i));
      if (s.first[i] > 0 || s.last[i] < vecs * W - 1) hide(scores, vecs, s.first[i], s.last[i]);
      differentiate(scores, to.gradients + i * kStride, vecs, to, r + i, i);
    }
    product<Units>(s.rows, width_ / W, ceil_div(s.keys, pack), {to.ds, kStride, 1}, to.k_rows, width_, PANEL,
                   to.dq + r * width_, width_, true);
  }

  void differentiate(float* scores, const float* gradients, int64_t vecs, const Buffers& to, int64_t row,
                     int i) const {
    Element* p = reinterpret_cast<Element*>(to.p + i * kStride);
    Element* ds = reinterpret_cast<Element*>(to.ds + i * kStride);
    const float largest = to.largest[row], inverse = to.inverse[row], exponent = p_.exponent;
    float delta = to.delta[row];
    if (inverse == kInfinity) {  // the row sees nothing
      std::fill(p, p + vecs * W, Element{});
      std::fill(ds, ds + vecs * W, Element{});
      return;
    }
    const bool capped = p_.options.softcap > 0;
    // As the forward pass weighs, exact where a mask holds the lowest float.
    const auto weigh = [&](int64_t j) {
      return exp2<precise>((load(scores + j) - largest) * exponent) * inverse;
    };
    if (whole_rows()) {  // this delta has the rounding errors of what it is taken from
      Vec sum{};
      for (int64_t j = 0; j < vecs * W; j += W) {
        const Vec weight = weigh(j);
        store(scores + j, weight);
        sum = fma(weight, load(gradients + j), sum);
      }
      delta = reduce_add(sum);
    }
    if (to.weighted) {
      Vec sum{};
      for (int64_t j = 0; j < vecs * W; j += W) sum = fma(weigh(j), load(gradients + j), sum);
      to.weighted[row] += reduce_add(sum);
    }
    for (int64_t j = 0; j < vecs * W; j += W) {
      const Vec weight = whole_rows() ? load(scores + j) : weigh(j);
      Vec gradient = weight * (load(gradients + j) - delta);
      if (capped) gradient *= load(to.slope + j);
      store(p + j, weight);
      store(ds + j, gradient);
    }
  }

  // The parts' sums of one tile, in order, into the first, and out.
  void gather(int64_t head, int64_t t) const {
    float* sums = shared_.get() + (head * parts_ * tiles_ + t) * sums_;
    for (int64_t part = 1; part < parts_; ++part) {
      const float* more = sums + part * tiles_ * sums_;
      for (int64_t j = 0; j < sums_; j += W) store(sums + j, load(sums + j) + load(more + j));
    }
    write_tile(head, t, sums);
  }

  void write_tile(int64_t head, int64_t t, const float* sums) const {
    write_transposed(sums, p_.dim, p_.options.scale, to_.dk, head, t);
    write_transposed(sums + round_up(p_.dim, ROWS) * tile_, p_.value_dim, 1, to_.dv, head, t);
  }

  void write_transposed(const float* sums, int64_t n, float scale, const View& to, int64_t head,
                        int64_t t) const {
    const int64_t keys = std::min(tile_, p_.keys - t * tile_);
    for (int64_t j = 0; j < keys; j += W) {
      for (int64_t c = 0; c < n; c += W) {
        Vec block[W];
        for (int i = 0; i < W; ++i) block[i] = c + i < n ? load(sums + (c + i) * tile_ + j) * scale : Vec{};
        transpose(block);
        for (int i = 0; i < std::min<int64_t>(W, keys - j); ++i) {
          T* row = row_of<T>(to, head / p_.kv_heads, head % p_.kv_heads, t * tile_ + j + i) + c;
          n - c >= W ? store(row, block[i]) : store(row, block[i], Part{int(n - c)});
        }
      }
    }
  }

  Problem p_;
  AttentionGradients to_;
  int64_t depth_, value_depth_, width_, value_width_, tile_, tiles_, block_, sums_, parts_ = 1;
  std::unique_ptr<float[]> shared_;
  std::vector<double> of_sinks_;  // [items, group]: what the rows of an item add to the gradients of their sinks
};

template <class T>
void run(const AttentionCall& x, const AttentionGradients& to) {
  std::vector<AttentionBackward<T>> parts;
  for_problems<T>(x, [&](const Problem& p, int64_t query, int64_t key) {
    if (p.queries + p.keys == 0) return;
    const AttentionGradients mine{from<T>(to.dout, query), from<T>(to.dq, query), from<T>(to.dk, key),
                                  from<T>(to.dv, key), to.dsinks};
    parts.emplace_back(p, mine);
  });
  run_all(parts);
  if (!to.dsinks.defined()) return;
  std::vector<double> sums(size_t(x.q.sizes[1]));
  for (const AttentionBackward<T>& part : parts) part.add_sinks(sums);
  with_float_type(to.dsinks.dtype, [&]<class S>(S*) {
    for (size_t h = 0; h < sums.size(); ++h) {
      to.dsinks.as<S>()[int64_t(h) * to.dsinks.strides[0]] = from_float<S>(float(sums[h]));
    }
  });
}

}  // namespace

void attention_backward(const AttentionCall& x, const AttentionGradients& to) {
  if (x.k.sizes[1] == 0) return;
  with_float_type(x.q.dtype, [&]<class T>(T*) { run<T>(x, to); });
}

}  // namespace opsmith
