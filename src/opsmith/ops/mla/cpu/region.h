// MLA pre-processing as one parallel region: its stages are tasks in one list, handed out in order, and a task waits only
// for those that it reads.
//
//   tokens: norm | rows of wdqkv: queries, then keys | tokens: norm of the latent queries | heads | keys into the cache
//
// The rows of the queries come first, so that they are done while the rows of the keys still stream: no thread waits for
// the latent queries. A task of a head takes its rows of wuq, rotates, and multiplies with its wuk while all of that is in
// cache. The keys, done long before, are normalized, rotated and written between two heads.
#pragma once

#include <atomic>
#include <thread>

#include "absorb.h"
#include "projections.h"

namespace opsmith::mla {

constexpr int64_t kTaskBytes = 256 << 10;  // of a weight

inline void pause_briefly(int spins) {
#if defined(__x86_64__)
  if (spins < 4096) return _mm_pause();
#endif
  std::this_thread::yield();
}

class Count {
 public:
  void add() { done_.fetch_add(1, std::memory_order_release); }
  void wait(int64_t all) const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < all; ++spins) pause_briefly(spins);
  }

 private:
  std::atomic<int64_t> done_{0};
};

template <class Mode>
class Region {
  using T = typename Mode::T;
  using X = typename Mode::X;
  using Product = WordProduct<X, typename Mode::S>;

 public:
  explicit Region(const PreprocessCall& call)
      : c_(call), gamma0_(call.gamma0), beta0_(call.beta0), gamma1_(call.gamma1), beta1_(call.beta1),
        keys_(call.keys), queries_(call.queries), tokens_(call.tokens), hidden_(call.x.sizes[1]),
        heads_(queries_.wuk.sizes[0]), head_(call.up.weight.sizes[0] / heads_),
        kv_lora_(queries_.wuk.sizes[2]), key_rows_(kv_lora_ + call.keys.rope_size),
        columns_(call.down.weight.sizes[0]), inner_(call.gamma1.defined() ? columns_ - key_rows_ : hidden_),
        y_(tokens_, hidden_), z_(tokens_, inner_) {
    const bool low_rank = call.gamma1.defined();
    vectors_ = Product::exists ? lane_vectors(tokens_) : 0;
    const int64_t tile = vectors_ > 0 ? std::min<int64_t>(kLaneRows, kLaneSums / vectors_) : kDotRows;
    block_ = std::max(tile, kTaskBytes / std::max<int64_t>(1, down_bytes()) / tile * tile);
    key_blocks_ = ceil_div(key_rows_, block_);
    query_blocks_ = low_rank ? ceil_div(columns_ - key_rows_, block_) : 0;
    latents_ = low_rank ? tokens_ : 0;
    first_heads_ = std::min(heads_, 2 * num_threads());
    a_.reset(new T[size_t(tokens_ * columns_)]);
    const int64_t absorbed = heads_ * queries_.wuk.sizes[1] * kv_lora_ * int64_t(sizeof(T));
    queries_.streaming = streams<T>(call.queries.q_out, tokens_,
                                    columns_ * down_bytes() + heads_ * head_ * up_bytes() + absorbed);
  }

  void run() {
    const int64_t threads = num_threads();
    parallel_for(threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) work();
    });
  }

 private:
  void work() {
    const int64_t block = std::max(block_, head_), out = tokens_ * std::max(block, kv_lora_);
    const int64_t norm = std::max({hidden_, inner_, keys_.memory()}) + W;
    const int64_t lanes = vectors_ * std::max(y_.stride, z_.stride) / (4 / int64_t(sizeof(X))) * W;
    float* const memory = scratch(lanes + norm + out + tokens_ * head_ + tokens_ * block +
                                  2 * (key_rows_ - kv_lora_) + 4 * W);
    Memory m;
    m.lanes = reinterpret_cast<IVec*>(memory);
    m.norm = memory + lanes;
    m.out = m.norm + norm;
    m.q = m.out + out;
    m.sums = reinterpret_cast<int32_t*>(m.q + tokens_ * head_);
    m.table = m.q + tokens_ * head_ + tokens_ * block;
    // The task after this one is taken with it, so that its weights can be asked for. Every thread does its tasks in
    // order and waits for earlier ones alone, so there is always one that can go on.
    for (int64_t task = next_.fetch_add(1, std::memory_order_relaxed); task < end_of_all();) {
      const int64_t upcoming = next_.fetch_add(1, std::memory_order_relaxed);
      if (task < tokens_) {
        normalize(task, m);
        normed_.add();
      } else if (const int64_t first = down_row(task); first >= 0) {
        const bool query = first >= key_rows_;
        down(first, std::min(block_, (query ? columns_ : key_rows_) - first), upcoming, m);
        (query ? query_rows_done_ : key_rows_done_).add();
      } else if (task < first_head()) {
        query_rows_done_.wait(query_blocks_);
        latent(task - first_head() + latents_, m);
        ready_.add();
      } else if (const int64_t h = head_of(task); h >= 0) {
        normed_.wait(tokens_);
        ready_.wait(latents_);
        head(h, upcoming, m);
      } else {
        const int64_t t = task - first_head() - first_heads_;
        key_rows_done_.wait(key_blocks_);
        keys_.write(a_.get() + t * columns_, c_.first + t, m.norm);
      }
      task = upcoming;
    }
    if (queries_.streaming) stream_fence();
  }

  // The list of tasks: tokens, rows of wdqkv, latent queries, some heads, keys, the other heads.
  int64_t first_head() const { return tokens_ + query_blocks_ + key_blocks_ + latents_; }
  int64_t end_of_all() const { return first_head() + heads_ + tokens_; }

  int64_t down_row(int64_t task) const {
    const int64_t block = task - tokens_;
    if (block < 0 || block >= query_blocks_ + key_blocks_) return -1;
    return block < query_blocks_ ? key_rows_ + block * block_ : (block - query_blocks_) * block_;
  }

  int64_t head_of(int64_t task) const {
    const int64_t at = task - first_head();
    if (at < first_heads_) return at;
    return at < first_heads_ + tokens_ || at >= heads_ + tokens_ ? -1 : at - tokens_;
  }

  // The first bytes of the weight that a task reads; null for a task without one.
  const char* weight_of(int64_t task) const {
    const int64_t row = down_row(task), h = head_of(task);
    if (row >= 0) return static_cast<const char*>(c_.down.weight.data) + row * down_bytes();
    return h < 0 ? nullptr : static_cast<const char*>(c_.up.weight.data) + h * head_ * up_bytes();
  }
  int64_t down_bytes() const { return c_.down.weight.strides[0] * int64_t(sizeof(typename Mode::S)); }
  int64_t up_bytes() const { return c_.up.weight.strides[0] * int64_t(sizeof(typename Mode::S)); }

  struct Memory {
    IVec* lanes;
    const Activations<X>* in_lanes = nullptr;  // those which lie there
    float *norm, *out, *q, *table;
    int32_t* sums;
  };

  // A thread's own copy of all tokens, made at its first task that reads them; null where few tokens are read as rows.
  const IVec* lanes_of(const Activations<X>& x, Memory& m) const {
    if constexpr (Product::exists) {
      if (vectors_ > 0) {
        if (m.in_lanes != &x) {
          to_lanes<Product>(tokens_, vectors_, x.stride, W * 4 / int64_t(sizeof(X)), m.lanes,
                            [&](int64_t t, int64_t at) { return (Vec)load_words(x.row(t) + at); });
        }
        m.in_lanes = &x;
        return m.lanes;
      }
    }
    return nullptr;
  }

  void normalize(int64_t t, const Memory& m) {
    norm_row(c_.x.as<T>() + (c_.first + t) * c_.x.strides[0], hidden_, gamma0_.data(), beta0_.data(), c_.eps,
             m.norm);
    Mode::prepare(m.norm, hidden_, c_.down, y_, t);
    if (latents_ == 0) Mode::prepare(m.norm, hidden_, c_.up, z_, t);
  }

  void down(int64_t first, int64_t rows, int64_t upcoming, Memory& m) {
    const char* const base = static_cast<const char*>(c_.down.weight.data) + first * down_bytes();
    const char* const then = weight_of(upcoming);
    normed_.wait(tokens_);
    const Ahead ahead{base, rows * down_bytes(), then ? then : base};
    Mode::rows({y_, lanes_of(y_, m), c_.down, tokens_, first, rows, ahead, m.out, m.sums});
    for (int64_t t = 0; t < tokens_; ++t) {
      T* const to = a_.get() + t * columns_ + first;
      for_lanes(rows, [&](int64_t i, auto k) { store(to + i, load(m.out + t * rows + i, k), k); });
    }
  }

  void latent(int64_t t, const Memory& m) {
    norm_row(a_.get() + t * columns_ + key_rows_, inner_, gamma1_.data(), beta1_.data(), c_.eps, m.norm);
    Mode::prepare(m.norm, inner_, c_.up, z_, t);
    if (!c_.latent_q.defined()) return;
    T* const to = c_.latent_q.as<T>() + (c_.first + t) * c_.latent_q.strides[0];
    for_lanes(inner_, [&](int64_t i, auto k) { store(to + i, load(m.norm + i, k), k); });
  }

  void head(int64_t h, int64_t upcoming, Memory& m) {
    const char* const base = static_cast<const char*>(c_.up.weight.data) + h * head_ * up_bytes();
    const char* const absorbed = reinterpret_cast<const char*>(queries_.wuk.as<T>() +
                                                               h * queries_.wuk.strides[0]);
    const char* const then = weight_of(upcoming);
    const Ahead ahead{base, head_ * up_bytes(), absorbed};
    Mode::rows({z_, lanes_of(z_, m), c_.up, tokens_, h * head_, head_, ahead, m.q, m.sums});
    for_lanes(tokens_ * head_, [&](int64_t i, auto k) { store(m.q + i, round_to<T>(load(m.q + i, k)), k); });
    finish_head<T>(queries_, h, c_.first, tokens_, m.q, then, m.table, m.out);
  }

  const PreprocessCall& c_;
  const FloatVector gamma0_, beta0_, gamma1_, beta1_;
  const KeyWriter keys_;
  Queries queries_;
  const int64_t tokens_, hidden_, heads_, head_, kv_lora_, key_rows_, columns_, inner_;
  int64_t vectors_, block_, key_blocks_, query_blocks_, latents_, first_heads_;
  const Activations<X> y_, z_;
  std::unique_ptr<T[]> a_;
  std::atomic<int64_t> next_{0};
  Count normed_, query_rows_done_, key_rows_done_, ready_;
};

// Each in a unit of its own, as they take as long to compile as all else that a model of this kind needs.
void in_floats(const PreprocessCall& call);
void in_integers(const PreprocessCall& call);
void with_small_weights(const PreprocessCall& call);

}  // namespace opsmith::mla
