// What a thread needs on its way along the keys of a sequence: where they lie, and memory for a tile of them.
#pragma once

#include <algorithm>

#include "attention/attention_scores.h"
#include "paged_attention.h"
#include "paged_rows.h"

namespace opsmith {

// Where keys lie, those of a tile and of the next one. The last pointer is repeated, for who reads or asks beyond.
template <class T>
struct Tiles {
  static constexpr bool quantized = std::is_same_v<T, int8_t>;
  static constexpr int64_t most = 2 * kPagedTile,
                           beyond = kPagedTile + 2 * W;  // and what tiles are filled up with
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
inline void scale_heads(float* x, const float* const* factors, int64_t first, int64_t stride, int64_t heads,
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
  int64_t floats = 0;

  Buffers() = default;
  Buffers(float* base, int64_t rows, int64_t depth, int64_t scores_of_tile, bool quantized) {
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
    floats = carve.used;
  }
};

}  // namespace opsmith
