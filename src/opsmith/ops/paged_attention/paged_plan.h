// Which keys of which sequence are whose: the keys of all sequences, cut into pieces, in the order of memory.
#pragma once

#include <algorithm>
#include <vector>

#include "paged_attention.h"
#include "gemm_tile.h"

namespace opsmith {

struct Whole {  // key heads of a sequence: pieces `piece` to `piece + count - 1`, which cover keys `from` to `until`
  int64_t sequence, head, heads, from, until, piece, count;
  int64_t left;  // pieces that nobody has finished: threads count down together
};

struct Piece {
  int64_t whole, from, until;
  bool begun = false;  // with it began a walk, whose sums stand in its place
};

// One that is kept allocates only what no call before needed.
struct PagedPlan {
  static constexpr int64_t kTileBytes = 256 << 10;  // of keys and values at a time, in the second-level cache
  static constexpr int64_t kTileScores = 16 << 10;  // of a tile, at most: they wait in the first-level cache
  static constexpr int64_t kPieceBytes = 64 << 10;  // worth a piece of its own
  static constexpr int64_t kPieces = 16;  // for each thread, so that one that was held up is helped
  static constexpr int64_t kFewKeys = 32;  // pieces of fewer keys are cut by heads instead
  static constexpr int64_t kSerialBytes = 192 << 10;

  int64_t heads_at_once = 1, tile = 1, threads = 1;
  std::vector<Piece> pieces;
  std::vector<Whole> wholes;

  // A token's head has `head_bytes` of keys and values, and `rows` rows of scores; tiles are multiples of `grain`.
  void make(const PagedCache& c, int64_t batch, int64_t queries, int64_t window, int64_t head_bytes,
            int64_t rows, int64_t grain, int64_t most, int64_t threads_there) {
    pieces.clear();
    wholes.clear();
    const int64_t kv_heads = c.keys.sizes[2];
    head_bytes = std::max<int64_t>(1, head_bytes);
    int64_t keys = 0;
    for (int64_t b = 0; b < batch; ++b) keys += c.length(b) - first_visible(c.length(b), queries, window);
    threads = keys * head_bytes * kv_heads < kSerialBytes ? 1 : threads_there;
    const int64_t wanted = threads == 1 ? 1 : kPieces * threads;
    // Heads that lie further apart than keys are read one after the other, as memory has them.
    const bool head_major = c.keys.strides[2] > c.keys.strides[1] && c.block_size() > 1;
    int64_t groups = head_major ? kv_heads
                                : std::min(ceil_div(kFewKeys * wanted, std::max<int64_t>(keys, 1)), kv_heads);
    heads_at_once = ceil_div(kv_heads, std::max<int64_t>(groups, 1));
    groups = ceil_div(kv_heads, heads_at_once);
    const int64_t bytes = head_bytes * heads_at_once, scores = std::max<int64_t>(1, rows * heads_at_once);
    tile = std::clamp(std::min(kTileBytes / bytes, kTileScores / scores) / grain * grain, grain, most);
    const int64_t share = round_up(std::max(ceil_div(keys * groups, wanted), kPieceBytes / bytes), tile);
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t until = c.length(b), from = first_visible(until, queries, window);
      const int64_t count = std::max<int64_t>(1, ceil_div(until - from, share)),
                    each = round_up(ceil_div(until - from, count), grain);
      for (int64_t head = 0; head < kv_heads; head += heads_at_once) {
        const int64_t whole = int64_t(wholes.size());
        wholes.push_back({b, head, std::min(heads_at_once, kv_heads - head), from, until,
                          int64_t(pieces.size()), count, count});
        for (int64_t i = 0; i < count; ++i) {
          const int64_t begin = std::min(until, from + i * each);
          pieces.push_back({whole, begin, std::min(until, begin + each)});
        }
      }
    }
  }
};

}  // namespace opsmith
