// Attention in the latent space. A cached row is key and value of all heads, so this is two matrix products: the scores of
// a block of keys with the queries of all heads, and the weighted sum of the same rows. Each block is gathered from its
// pages once, packed twice, and meets as many queries as its packed forms stay in cache for.
//
// Few queries see many keys while decoding: then who has nothing else to do takes blocks of the same keys, one by one so that all
// threads end together, and what each found is put together at the end, where the up-projection of values follows.
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/attention_scores.h"
#include "dots.h"
#include "latent_rows.h"

namespace opsmith::mla {
namespace {

constexpr int64_t kKeys = 128;  // of a block: its packed forms and its queries' sums fill the second-level cache
// Fewer are met in blocks of half the size, which threads share out more evenly.
constexpr int64_t kManyKeys = 1024;
constexpr int64_t kQueries = 128;  // rows, a token and head each, that a block meets
constexpr int64_t kLeastPart = 128;  // keys that are worth a thread's packing its queries
constexpr int64_t kParts = 64;  // of the same keys, at most
constexpr int64_t kTokens = 32;  // that an up-projection takes at once
constexpr float kNone = -std::numeric_limits<float>::infinity();

template <class T>
class Attention {
  using Units = UnitsOf<T>;
  using E = typename Units::Element;
  using X = typename Dots<T, T>::X;
  static constexpr int pair = Units::per_unit;

  // Rows, a token and head each, that meet all their keys together.
  struct Group {
    int64_t sequence, row, rows, keys, blocks;
    int64_t most_parts;  // threads that it has memory for
    int64_t found;  // where each part leaves each row's weighted sum, greatest score and sum of weights
    std::atomic<int64_t> next{0}, parts{0};
    bool done = false;  // by a single part, so that there is nothing to put together
  };

 public:
  explicit Attention(const AttentionCall& c)
      : c_(c), tokens_(c.q_nope.sizes[0]), heads_(c.q_nope.sizes[1]), latent_(c.q_nope.sizes[2]),
        rope_(c.q_rope.sizes[2]), each_(tokens_ / std::max<int64_t>(1, c.lens.sizes[0])),
        width_(round_up(latent_, W)), keys_(longest() < kManyKeys ? kKeys / 2 : kKeys),
        groups_of_sequence_(ceil_div(each_ * heads_, kQueries)),
        groups_(size_t(c.lens.sizes[0] * groups_of_sequence_)) {
    const int64_t wanted = ceil_div(4 * num_threads(), std::max<int64_t>(1, int64_t(groups_.size())));
    int64_t held = 0;
    for (int64_t i = 0; i < int64_t(groups_.size()); ++i) {
      Group& g = groups_[size_t(i)];
      g.sequence = i / groups_of_sequence_;
      g.row = i % groups_of_sequence_ * kQueries;
      g.rows = std::min(kQueries, each_ * heads_ - g.row);
      g.keys = std::max<int64_t>(0, sees(g, g.rows - 1) + 1);
      g.blocks = std::max<int64_t>(1, ceil_div(g.keys, keys_));
      g.most_parts = std::clamp<int64_t>(std::min(wanted, g.keys / kLeastPart), 1, kParts);
      g.found = held;
      if (g.most_parts > 1) held += g.most_parts * part_size(g);
    }
    found_.reset(new float[size_t(held)]);
  }

  void run() {
    std::atomic<int64_t> next{0};
    const int64_t count = int64_t(groups_.size()), threads = num_threads();
    parallel_for(found_any() ? threads : std::min(threads, count), 1, [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;)
          attend(groups_[size_t(i)]);
        for (Group& g : groups_) attend(g);  // what others have not come to
      }
    });
    if (!found_any() && !c_.wuv.defined()) return;
    parallel_for(heads_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t h = begin; h < end; ++h) finish(h);
    });
  }

 private:
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t s = 0; s < c_.lens.sizes[0]; ++s)
      most = std::max(most, integer_at(c_.lens, s * c_.lens.strides[0]));
    return most;
  }
  int64_t part_size(const Group& g) const { return g.rows * (width_ + 2); }
  float* found(const Group& g, int64_t part, int64_t row) const {
    return found_.get() + g.found + part * part_size(g) + row * (width_ + 2);
  }
  // The last key that a row sees; rows are tokens and, within them, heads.
  int64_t sees(const Group& g, int64_t r) const {
    return integer_at(c_.lens, g.sequence * c_.lens.strides[0]) - each_ + (g.row + r) / heads_;
  }
  // What a row's sums are multiplied by. NaN stays, and is there where all scores are -infinity.
  float share_of(const Group& g, int64_t r, float total) const {
    if (total > 0) return c_.ctkv_scale / total;
    return sees(g, r) < 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  bool found_any() const {
    return std::any_of(groups_.begin(), groups_.end(), [](const Group& g) { return g.most_parts > 1; });
  }

  static int64_t size_of(const View& keys) { return keys.dtype == DType::i8 ? 1 : int64_t(sizeof(T)); }

  // Calls f(from which number on, where) for what lies together of a key's n numbers; blocks are [bs, n / tile, tile].
  template <class F>
  void strips(const View& from, const Group& g, int64_t key, int64_t n, const F& f) const {
    const int64_t size = from.sizes[1], tile = from.sizes[3], bytes = size_of(from);
    const int64_t block = integer_at(c_.tables,
                                     g.sequence * c_.tables.strides[0] + key / size * c_.tables.strides[1]);
    const char* row = from.as<char>() + (block * from.strides[0] + key % size * from.strides[1]) * bytes;
    for (int64_t i = 0; i < n; i += tile, row += from.strides[2] * bytes) f(i, row);
  }

  // Rows of keys in T: n numbers of each.
  template <class S>
  void gather(const View& from, const Group& g, int64_t first, int64_t count, int64_t n, T* to) const {
    const int64_t tile = from.sizes[3];
    for (int64_t k = 0; k < count; ++k, to += n) {
      strips(from, g, first + k, n, [&](int64_t i, const char* at) {
        if constexpr (std::is_same_v<S, T>) {
          std::memcpy(to + i, at, size_t(tile) * sizeof(T));
        } else {
          for_lanes(tile, [&](int64_t j, auto l) {
            store(to + i + j, load(reinterpret_cast<const S*>(at) + j, l), l);
          });
        }
      });
    }
  }

  // Keys on their way to the second-level cache, while others are multiplied.
  void ask(const Group& g, int64_t first, int64_t last) const {
    for (int64_t k = first; k < last; ++k) {
      ask(c_.latent, g, k, latent_);
      if (rope_ > 0) ask(c_.rope, g, k, rope_);
    }
  }
  void ask(const View& from, const Group& g, int64_t key, int64_t n) const {
    const int64_t bytes = from.sizes[3] * size_of(from);
    strips(from, g, key, n, [&](int64_t, const char* at) {
      for (int64_t b = 0; b < bytes; b += 64) prefetch_far(at + b);
    });
  }

  struct Memory {
    E *nope, *rope, *weights;
    float *scores, *sums, *keys, *turned, *values, *most, *total, *factor;
    T* rows;
    int64_t floats;

    Memory(float* base, const Attention& a) {
      const int64_t padded = round_up(kQueries, ROWS);
      Carver carve{base};
      nope = reinterpret_cast<E*>(carve.take(padded * units(a.latent_)));
      rope = reinterpret_cast<E*>(carve.take(padded * units(a.rope_)));
      weights = reinterpret_cast<E*>(carve.take(padded * units(a.keys_)));
      scores = carve.take(padded * a.keys_);
      sums = carve.take(padded * a.width_);
      keys = carve.take(units(a.latent_) * a.keys_);
      turned = carve.take(units(a.rope_) * a.keys_);
      values = carve.take(units(a.keys_) * a.width_);
      for (float** each : {&most, &total, &factor}) *each = carve.take(padded);
      rows = reinterpret_cast<T*>(carve.take(a.keys_ * (a.latent_ + a.rope_) * int64_t(sizeof(T)) / 4));
      floats = carve.used;
    }
  };

  static int64_t units(int64_t n) { return ceil_div(n, pair); }

  template <class S>
  static void pack_query(const View& q, int64_t t, int64_t h, int64_t n, E* to) {
    pack_row<Units>(q.as<S>() + t * q.strides[0] + h * q.strides[1], n, to, units(n) * pair);
  }

  // c [rows, ...] (+)= a b, as many rows as there are.
  static void multiply(int64_t rows, int64_t vecs, int64_t depth, const E* a, int64_t row_units,
                       const float* b, int64_t ldb, int64_t panel_stride, float* c, int64_t ldc, bool add) {
    for (int64_t r = 0; r < rows; r += ROWS) {
      product<Units>(int(std::min<int64_t>(ROWS, rows - r)), vecs, depth,
                     {reinterpret_cast<const float*>(a) + r * row_units, row_units, 1}, b, ldb, panel_stride,
                     c + r * ldc, ldc, add);
    }
  }

  void attend(Group& g) const {
    if (g.next.load(std::memory_order_relaxed) >= g.blocks) return;
    const int64_t part = g.parts.fetch_add(1, std::memory_order_relaxed);
    if (part >= g.most_parts) return;
    const Memory m(scratch(Memory(nullptr, *this).floats), *this);
    for (int64_t r = 0; r < round_up(g.rows, ROWS); ++r) {
      const int64_t row = std::min(g.row + r, each_ * heads_ - 1), t = g.sequence * each_ + row / heads_,
                    h = row % heads_;
      m.factor[r] = 1;
      if (c_.q_nope_scale.defined()) {
        pack_query<int8_t>(c_.q_nope, t, h, latent_, m.nope + r * units(latent_) * pair);
        m.factor[r] = c_.ctkv_scale / c_.q_nope_scale.as<float>()[h];
      } else {
        pack_query<T>(c_.q_nope, t, h, latent_, m.nope + r * units(latent_) * pair);
      }
      pack_query<T>(c_.q_rope, t, h, rope_, m.rope + r * units(rope_) * pair);
      m.most[r] = kNone;
      m.total[r] = 0;
    }
    std::fill(m.sums, m.sums + round_up(g.rows, ROWS) * width_, 0.0f);
    const auto take_block = [&] { return g.next.fetch_add(1, std::memory_order_relaxed); };
    int64_t mine = 0;
    for (int64_t b = take_block(), after; b < g.blocks; b = after, ++mine) {
      after = take_block();
      block(g, m, b, after);
    }
    if (mine == g.blocks) g.done = true;
    for (int64_t r = 0; r < g.rows; ++r) {
      const float* sums = m.sums + r * width_;
      if (mine < g.blocks) {
        float* to = found(g, part, r);
        std::memcpy(to, sums, size_t(width_) * sizeof(float));
        to[width_] = m.most[r];
        to[width_ + 1] = m.total[r];
      } else {
        const int64_t row = g.row + r, t = g.sequence * each_ + row / heads_;
        T* to = c_.latent_out.as<T>() + (t * heads_ + row % heads_) * latent_;
        const float scale = share_of(g, r, m.total[r]);
        for_lanes(latent_, [&](int64_t i, auto l) { store(to + i, load(sums + i, l) * scale, l); });
      }
    }
  }

  // Block b of the keys; block `after` is the next one.
  void block(const Group& g, const Memory& m, int64_t b, int64_t after) const {
    const int64_t first = b * keys_, count = std::min(keys_, g.keys - first);
    if (count <= 0) return;
    T* const turned = m.rows + keys_ * latent_;
    if (c_.latent.dtype == DType::i8) {
      gather<int8_t>(c_.latent, g, first, count, latent_, m.rows);
    } else {
      gather<T>(c_.latent, g, first, count, latent_, m.rows);
    }
    if (rope_ > 0) gather<T>(c_.rope, g, first, count, rope_, turned);
    pack_transposed<Units>(m.rows, latent_, count, latent_, m.keys);
    pack_transposed<Units>(turned, rope_, count, rope_, m.turned);
    pack_rows<Units>(m.rows, latent_, count, latent_, m.values, width_);
    const int64_t vecs = ceil_div(count, W);
    multiply(g.rows, vecs, units(latent_), m.nope, units(latent_), m.keys, PANEL, units(latent_) * PANEL,
             m.scores, keys_, false);
    if (c_.q_nope_scale.defined()) {
      for (int64_t r = 0; r < g.rows; ++r) {
        for (int64_t i = 0; i < vecs * W; i += W) {
          float* p = m.scores + r * keys_ + i;
          store(p, load(p) * m.factor[r]);
        }
      }
    }
    if (rope_ > 0) {
      multiply(g.rows, vecs, units(rope_), m.rope, units(rope_), m.turned, PANEL, units(rope_) * PANEL,
               m.scores, keys_, true);
    }
    const int64_t ahead = std::min(after * keys_, g.keys), some = std::min(keys_, g.keys - ahead);
    for (int64_t r = 0; r < g.rows; ++r) {
      ask(g, ahead + r * some / g.rows, ahead + (r + 1) * some / g.rows);
      weigh(m, r, std::clamp<int64_t>(sees(g, r) + 1 - first, 0, count), count);
    }
    multiply(g.rows, width_ / W, units(count), m.weights, units(keys_), m.values, width_, PANEL, m.sums,
             width_, true);
  }

  // Scores become weights, of the first `seen` keys; what was summed before is scaled to the new greatest score.
  void weigh(const Memory& m, int64_t r, int64_t seen, int64_t count) const {
    float* const s = m.scores + r * keys_;
    E* const to = m.weights + r * units(keys_) * pair;
    const float scale = c_.scale * log2_e;
    Vec high = splat(kNone);
    for_lanes(seen, [&](int64_t i, auto l) {
      const Vec v = load(s + i, l) * scale;
      high = max(high, keep(v, l, kNone));
      store(s + i, v, l);
    });
    const float most = std::max(m.most[r], reduce_max(high));
    const float base = most == kNone ? 0.0f : most;
    const float before = exp2<true>(splat(m.most[r] - base))[0];
    if (m.most[r] != most) {
      float* sums = m.sums + r * width_;
      for (int64_t i = 0; i < width_; i += W) store(sums + i, load(sums + i) * before);
    }
    Vec total{};
    for_lanes(seen, [&](int64_t i, auto l) {
      const Vec w = round_to<T>(power(load(s + i, l) - base));
      total += keep(w, l, 0.0f);
      store(to + i, w, l);
    });
    for (int64_t i = seen; i < units(count) * pair; ++i) to[i] = {};
    m.total[r] = m.total[r] * before + reduce_add(total);
    m.most[r] = most;
  }

  // 2^x, as exactly as T can show.
  static Vec power(Vec x) {
    if constexpr (std::is_same_v<T, float>) {
      return exp2<true>(x);
    } else {
      return exp2_for<T, true>(x);
    }
  }

  // One head of all tokens: what the parts found is put together, then projected.
  void finish(int64_t h) const {
    const int64_t values = c_.wuv.defined() ? c_.wuv.sizes[1] : 0,
                  stride = round_up(std::max<int64_t>(1, latent_), 64);
    const int64_t floats = ceil_div(kTokens * stride * int64_t(sizeof(X)), 4);
    float* const memory = scratch(floats + kTokens * values + W);
    X* const x = reinterpret_cast<X*>(memory);
    float* const out = memory + floats;
    for (int64_t first = 0; first < tokens_; first += kTokens) {
      const int64_t some = std::min(kTokens, tokens_ - first);
      for (int64_t i = 0; i < some; ++i) {
        T* const row = c_.latent_out.as<T>() + ((first + i) * heads_ + h) * latent_;
        const Group& g = groups_[size_t((first + i) / each_ * groups_of_sequence_ +
                                        ((first + i) % each_ * heads_ + h) / kQueries)];
        if (!g.done) join(g, (first + i) % each_ * heads_ + h - g.row, row);
        for_lanes(latent_, [&](int64_t k, auto l) { store(x + i * stride + k, load(row + k, l), l); });
        std::fill(x + i * stride + latent_, x + (i + 1) * stride, X{});
        Dots<T, T>::arrange(x + i * stride, latent_);
      }
      if (values == 0) continue;
      if (latent_ == 0) std::fill_n(out, some * values, 0.0f);  // sums of nothing
      const T* const w = c_.wuv.as<T>() + h * values * latent_;
      const Ahead ahead{
          reinterpret_cast<const char*>(w), values * latent_ * int64_t(sizeof(T)),
          reinterpret_cast<const char*>(w) + num_threads() * values * latent_ * int64_t(sizeof(T))};
      constexpr int64_t step = Dots<T, T>::step * sizeof(T);
      const RowSize size{latent_, 64, latent_ * int64_t(sizeof(X))};
      dot_rows<step>(some, w, latent_, values, size, ahead, out, values,
                     [&](auto m, auto r, int64_t t, int64_t k, int64_t depth, const T* rows, auto fetch,
                         float* o, int64_t o_stride) {
                       const int32_t none[m()] = {};
                       dot_tile<Dots<T, T>, m(), r()>(x + t * stride + k, stride, none, rows, latent_, depth,
                                                      fetch, o, o_stride);
                     });
      for (int64_t i = 0; i < some; ++i) {
        T* const to = c_.out.as<T>() + ((first + i) * heads_ + h) * values;
        for_lanes(values, [&](int64_t v, auto l) { store(to + v, load(out + i * values + v, l), l); });
      }
    }
  }

  // A row of a group.
  void join(const Group& g, int64_t row, T* to) const {
    const int64_t count = std::min(g.parts.load(std::memory_order_relaxed), g.most_parts);
    float most = kNone, total = 0, share[kParts];
    for (int64_t i = 0; i < count; ++i) most = std::max(most, found(g, i, row)[width_]);
    for (int64_t i = 0; i < count; ++i) {
      share[i] = most == kNone ? 0.0f : std::exp2(found(g, i, row)[width_] - most);
      total += share[i] * found(g, i, row)[width_ + 1];
    }
    const float scale = share_of(g, row, total);
    for_lanes(latent_, [&](int64_t k, auto l) {
      Vec sum{};
      for (int64_t i = 0; i < count; ++i) sum = fma(load(found(g, i, row) + k, l), splat(share[i]), sum);
      store(to + k, sum * scale, l);
    });
  }

  const AttentionCall& c_;
  const int64_t tokens_, heads_, latent_, rope_, each_, width_;
  const int64_t keys_;  // of a block
  const int64_t groups_of_sequence_;
  std::vector<Group> groups_;
  std::unique_ptr<float[]> found_;
};

}  // namespace

void attention(const AttentionCall& call) {
  if (call.q_nope.sizes[0] == 0) return;
  with_float_type(call.q_rope.dtype, [&]<class T>(T*) { Attention<T>(call).run(); });
}

}  // namespace opsmith::mla
