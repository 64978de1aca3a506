// Attention in the latent space. A cached row is key and value of all heads, so this is two matrix products: the scores of
// a block of keys with the queries of all heads, and the weighted sum of the same rows. Each block is gathered from its
// pages once, packed twice, and meets as many queries as its packed forms stay in cache for.
//
// Few queries see many keys while decoding: then the keys of a sequence are shared out too, and what the parts found is
// put together at the end, where the up-projection of values follows.
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_scores.h"
#include "mla_dots.h"
#include "mla_rows.h"

namespace opsmith {
namespace {

constexpr int64_t kKeys = 64;         // of a block
constexpr int64_t kQueries = 128;     // rows, a token and head each, that a block meets
constexpr int64_t kLeastPart = 256;   // keys
constexpr int64_t kTokens = 32;       // that an up-projection takes at once
constexpr float kNone = -std::numeric_limits<float>::infinity();

inline int64_t index(const View& v, int64_t at) {
  return v.dtype == DType::i32 ? v.as<int32_t>()[at] : v.as<int64_t>()[at];
}

template <class T>
class Attention {
  using Units = UnitsOf<T>;
  using E = typename Units::Element;
  using X = typename Dots<T, T>::X;
  static constexpr int pair = Units::per_unit;

  struct Item {
    int64_t sequence, row, rows, first, last;  // rows of its tokens and heads; keys
    float* found;  // each row's weighted sum, greatest score and sum of weights; null: this is all there is
  };

 public:
  explicit Attention(const MlaAttentionCall& c)
      : c_(c), tokens_(c.q_nope.sizes[0]), heads_(c.q_nope.sizes[1]), latent_(c.q_nope.sizes[2]), rope_(c.q_rope.sizes[2]),
        each_(tokens_ / std::max<int64_t>(1, c.lens.sizes[0])), width_(round_up(latent_, W)), parts_(size_t(tokens_)) {
    const int64_t sequences = c.lens.sizes[0], rows = each_ * heads_;
    const int64_t items = sequences * ceil_div(rows, kQueries), wanted = ceil_div(4 * num_threads(), std::max<int64_t>(1, items));
    int64_t held = 0;
    for (int pass = 0; pass < 2; ++pass) {  // how much memory, then where
      for (int64_t s = 0; s < sequences; ++s) {
        const int64_t length = index(c.lens, s * c.lens.strides[0]);
        const int64_t count = std::clamp<int64_t>(std::min(wanted, length / kLeastPart), 1, 64);
        for (int64_t r = 0; r < rows; r += kQueries) {
          const int64_t some = std::min(kQueries, rows - r);
          for (int64_t i = 0; i < count; ++i) {
            float* found = count > 1 && pass ? found_.get() + held : nullptr;
            if (count > 1) held += some * (width_ + 2);
            if (pass) {
              items_.push_back({s, r, some, i * length / count, (i + 1) * length / count, found});
            }
          }
        }
        if (pass) {
          for (int64_t e = 0; e < each_; ++e) parts_[size_t(s * each_ + e)] = count;
        }
      }
      if (!pass) found_.reset(new float[size_t(held)]);
      held = 0;
    }
    for (const Item& item : items_) {
      if (item.first == 0) starts_.push_back(&item - items_.data());
    }
  }

  void run() {
    for_each(int64_t(items_.size()), [&](int64_t i) { attend(items_[size_t(i)]); });
    if (found_any() || c_.wuv.defined()) for_each(heads_, [&](int64_t h) { finish(h); });
  }

 private:
  bool found_any() const {
    return std::any_of(parts_.begin(), parts_.end(), [](int64_t n) { return n > 1; });
  }

  template <class F>
  void for_each(int64_t n, const F& f) {
    std::atomic<int64_t> next{0};
    parallel_for(std::min(num_threads(), n), 1, [&](int64_t begin, int64_t end) {
      for (; begin < end; ++begin) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
      }
    });
  }

  // Rows of keys in T: n numbers of each, from `from`, whose blocks are [bs, n / tile, tile].
  template <class S>
  void gather(const View& from, const Item& item, int64_t first, int64_t count, int64_t n, T* to) const {
    const int64_t size = from.sizes[1], tile = from.sizes[3];
    for (int64_t k = 0; k < count; ++k, to += n) {
      const int64_t block = index(c_.tables, item.sequence * c_.tables.strides[0] + (first + k) / size * c_.tables.strides[1]);
      const S* row = from.as<S>() + block * from.strides[0] + (first + k) % size * from.strides[1];
      for (int64_t i = 0; i < n; i += tile, row += from.strides[2]) {
        if constexpr (std::is_same_v<S, T>) {
          std::memcpy(to + i, row, size_t(tile) * sizeof(T));
        } else {
          for_lanes(tile, [&](int64_t j, auto l) { store(to + i + j, load(row + j, l), l); });
        }
      }
    }
  }

  struct Memory {
    E *nope, *rope, *weights;
    float *scores, *sums, *keys, *turned, *values, *most, *total, *factor;
    T* rows;
  };

  Memory take() const {
    const int64_t rows = round_up(kQueries, ROWS), panel = kKeys * sizeof(float);
    const int64_t unit = int64_t(sizeof(E)) * pair;
    const int64_t sizes[] = {rows * units(latent_) * unit, rows * units(rope_) * unit, rows * units(kKeys) * unit,
                             rows * panel, rows * width_ * 4, units(latent_) * panel, units(rope_) * panel,
                             units(kKeys) * width_ * 4, rows * 4, rows * 4, rows * 4, kKeys * (latent_ + rope_) * int64_t(sizeof(T))};
    int64_t all = 0;
    for (int64_t s : sizes) all += round_up(s, 64);
    char* p = reinterpret_cast<char*>(scratch(all / 4));
    char* at[12];
    for (int i = 0; i < 12; p += round_up(sizes[i], 64), ++i) at[i] = p;
    auto floats = [&](int i) { return reinterpret_cast<float*>(at[i]); };
    return {reinterpret_cast<E*>(at[0]), reinterpret_cast<E*>(at[1]), reinterpret_cast<E*>(at[2]), floats(3), floats(4),
            floats(5), floats(6), floats(7), floats(8), floats(9), floats(10), reinterpret_cast<T*>(at[11])};
  }

  static int64_t units(int64_t n) { return ceil_div(n, pair); }

  template <class S>
  static void pack_query(const View& q, int64_t t, int64_t h, int64_t n, E* to) {
    pack_row<Units>(q.as<S>() + t * q.strides[0] + h * q.strides[1], n, to, units(n) * pair);
  }

  // c [rows, ...] (+)= a b, as many rows as there are.
  static void multiply(int64_t rows, int64_t vecs, int64_t depth, const E* a, int64_t row_units, const float* b, int64_t ldb,
                       int64_t panel_stride, float* c, int64_t ldc, bool add) {
    for (int64_t r = 0; r < rows; r += ROWS) {
      product<Units>(int(std::min<int64_t>(ROWS, rows - r)), vecs, depth,
                     {reinterpret_cast<const float*>(a) + r * row_units, row_units, 1}, b, ldb, panel_stride, c + r * ldc, ldc,
                     add);
    }
  }

  void attend(const Item& item) const {
    const Memory m = take();
    const int64_t length = index(c_.lens, item.sequence * c_.lens.strides[0]);
    // The last key that a row sees; rows are tokens and, within them, heads.
    auto sees = [&](int64_t r) { return length - each_ + (item.row + r) / heads_; };
    for (int64_t r = 0; r < round_up(item.rows, ROWS); ++r) {
      const int64_t row = std::min(item.row + r, each_ * heads_ - 1), t = item.sequence * each_ + row / heads_, h = row % heads_;
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
    std::fill(m.sums, m.sums + round_up(item.rows, ROWS) * width_, 0.0f);
    const int64_t last = std::min(item.last, sees(item.rows - 1) + 1);
    for (int64_t k = item.first; k < last; k += kKeys) block(item, m, k, std::min(kKeys, last - k), sees);
    for (int64_t r = 0; r < item.rows; ++r) {
      const float* sums = m.sums + r * width_;
      if (item.found) {
        float* to = item.found + r * (width_ + 2);
        std::memcpy(to, sums, size_t(width_) * sizeof(float));
        to[width_] = m.most[r];
        to[width_ + 1] = m.total[r];
      } else {
        const int64_t row = item.row + r, t = item.sequence * each_ + row / heads_;
        T* to = c_.latent_out.as<T>() + (t * heads_ + row % heads_) * latent_;
        const float scale = m.total[r] > 0 ? c_.ctkv_scale / m.total[r] : m.total[r];  // NaN stays
        for_lanes(latent_, [&](int64_t i, auto l) { store(to + i, load(sums + i, l) * scale, l); });
      }
    }
  }

  template <class F>
  void block(const Item& item, const Memory& m, int64_t first, int64_t count, const F& sees) const {
    T* const turned = m.rows + kKeys * latent_;
    if (c_.latent.dtype == DType::i8) {
      gather<int8_t>(c_.latent, item, first, count, latent_, m.rows);
    } else {
      gather<T>(c_.latent, item, first, count, latent_, m.rows);
    }
    if (rope_ > 0) gather<T>(c_.rope, item, first, count, rope_, turned);
    pack_transposed<Units>(m.rows, latent_, count, latent_, m.keys);
    pack_transposed<Units>(turned, rope_, count, rope_, m.turned);
    pack_rows<Units>(m.rows, latent_, count, latent_, m.values, width_);
    const int64_t vecs = ceil_div(count, W);
    multiply(item.rows, vecs, units(latent_), m.nope, units(latent_), m.keys, PANEL, units(latent_) * PANEL, m.scores, kKeys,
             false);
    if (c_.q_nope_scale.defined()) {
      for (int64_t r = 0; r < item.rows; ++r) {
        for (int64_t i = 0; i < vecs * W; i += W) {
          float* p = m.scores + r * kKeys + i;
          store(p, load(p) * m.factor[r]);
        }
      }
    }
    if (rope_ > 0) {
      multiply(item.rows, vecs, units(rope_), m.rope, units(rope_), m.turned, PANEL, units(rope_) * PANEL, m.scores, kKeys, true);
    }
    for (int64_t r = 0; r < item.rows; ++r) weigh(m, r, std::clamp<int64_t>(sees(r) + 1 - first, 0, count), count);
    multiply(item.rows, width_ / W, units(count), m.weights, units(kKeys), m.values, width_, PANEL, m.sums, width_, true);
  }

  // Scores become weights, of the first `seen` keys; what was summed before is scaled to the new greatest score.
  void weigh(const Memory& m, int64_t r, int64_t seen, int64_t count) const {
    float* const s = m.scores + r * kKeys;
    E* const to = m.weights + r * units(kKeys) * pair;
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
      return exp2_for<T>(x);
    }
  }

  // One head of all tokens: what the parts found is put together, then projected.
  void finish(int64_t h) const {
    const int64_t values = c_.wuv.defined() ? c_.wuv.sizes[1] : 0, stride = round_up(std::max<int64_t>(1, latent_), 64);
    const int64_t floats = ceil_div(kTokens * stride * int64_t(sizeof(X)), 4);
    float* const memory = scratch(floats + kTokens * values + W);
    X* const x = reinterpret_cast<X*>(memory);
    float* const out = memory + floats;
    for (int64_t first = 0; first < tokens_; first += kTokens) {
      const int64_t some = std::min(kTokens, tokens_ - first);
      for (int64_t i = 0; i < some; ++i) {
        T* const row = c_.latent_out.as<T>() + ((first + i) * heads_ + h) * latent_;
        if (parts_[size_t(first + i)] > 1) join(first + i, h, row);
        for_lanes(latent_, [&](int64_t k, auto l) { store(x + i * stride + k, load(row + k, l), l); });
        std::fill(x + i * stride + latent_, x + (i + 1) * stride, X{});
      }
      if (values == 0) continue;
      const T* const w = c_.wuv.as<T>() + h * values * latent_;
      const Ahead ahead{reinterpret_cast<const char*>(w), values * latent_ * int64_t(sizeof(T)),
                        reinterpret_cast<const char*>(w) + num_threads() * values * latent_ * int64_t(sizeof(T))};
      constexpr int64_t step = Dots<T, T>::step * sizeof(T);
      const RowSize size{latent_, 64, latent_ * int64_t(sizeof(X))};
      dot_rows<step>(some, w, latent_, values, size, ahead, out, values,
                     [&](auto m, auto r, int64_t t, int64_t k, int64_t depth, const T* rows, auto fetch, float* o, int64_t o_stride) {
                       dot_tile<T, T, m(), r()>(x + t * stride + k, stride, rows, latent_, depth, fetch, o, o_stride);
                     });
      for (int64_t i = 0; i < some; ++i) {
        T* const to = c_.out.as<T>() + ((first + i) * heads_ + h) * values;
        for_lanes(values, [&](int64_t v, auto l) { store(to + v, load(out + i * values + v, l), l); });
      }
    }
  }

  void join(int64_t t, int64_t h, T* to) const {
    const int64_t row = t % each_ * heads_ + h, blocks = ceil_div(each_ * heads_, kQueries);
    const int64_t start = starts_[size_t(t / each_ * blocks + row / kQueries)], count = parts_[size_t(t)];
    auto found = [&](int64_t i) { return items_[size_t(start + i)].found + row % kQueries * (width_ + 2); };
    float most = kNone, total = 0, share[64];
    for (int64_t i = 0; i < count; ++i) most = std::max(most, found(i)[width_]);
    for (int64_t i = 0; i < count; ++i) {
      share[i] = most == kNone ? 0.0f : std::exp2(found(i)[width_] - most);
      total += share[i] * found(i)[width_ + 1];
    }
    const float scale = total > 0 ? c_.ctkv_scale / total : total;
    for_lanes(latent_, [&](int64_t k, auto l) {
      Vec sum{};
      for (int64_t i = 0; i < count; ++i) sum = fma(load(found(i) + k, l), splat(share[i]), sum);
      store(to + k, sum * scale, l);
    });
  }

  const MlaAttentionCall& c_;
  const int64_t tokens_, heads_, latent_, rope_, each_, width_;
  std::vector<int64_t> parts_;  // that a token's keys were shared out to
  std::vector<Item> items_;
  std::vector<int64_t> starts_;  // the first item of each block of rows
  std::unique_ptr<float[]> found_;
};

}  // namespace

void mla_attention(const MlaAttentionCall& call) {
  if (call.q_nope.sizes[0] == 0) return;
  with_float_type(call.q_rope.dtype, [&](auto* t) {
    Attention<std::remove_pointer_t<decltype(t)>> attention(call);
    attention.run();
  });
}

}  // namespace opsmith
