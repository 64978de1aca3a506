// How the work of mla_kv_epilogue is divided, and how its cache lies in memory.
#pragma once

#include "tiling.h"

struct MlaKvEpilogueTilingData {
  uint64_t tokens;
  uint64_t stride;        // elements from one token's row of `a` to the next
  uint64_t latentBlock;   // elements from one block of the cache to the next
  uint64_t ropeBlock;
  uint32_t kvLora, rope, blockSize;
  uint32_t latentTile;    // width of the tiles that a token's row is cut into; 0: it lies in one piece
  uint32_t ropeTile;
  uint32_t turn, interleaved, quantize;
  float eps;
  uint32_t latentRow;     // elements from one token to the next within a block
  uint32_t ropeRow;
  uint32_t ropeAt;        // where the rope part begins in the row of a joint cache, else 0
  uint32_t kvPitch, ropePitch;  // in local memory
  uint32_t blocks;
  uint32_t tokensPerTile;
};

// Tiles are tokens, and each core takes a range of them. For pitches p of kv_lora and r of rope (up to multiples of 32),
// a token takes
//     a            2 buffers x (p + r) x elementBytes
//     cos, sin     2 buffers x 2 x r x 4
//     results      2 buffers x (p + r) x elementBytes
//     float32      2 x p x 4 for the norm, 5 x r x 4 for the rotation, 2 x r x 4 for its offsets
//     lanes, number spread, numbers, slot: 64 x 4 + 32 + 4 + 8 = 300
// and gamma2, its numbers of 64 columns each and the signs (p + p / 64 + r) x 4 once, less than 2048 to round up. Of 192
// KiB, with 512 + 64 columns of bfloat16: (196608 - 2048 - 2336) / (576 x 8 + 512 x 8 + 64 x 44 + 300) = 16 tokens.
inline MlaKvEpilogueTilingData MlaKvEpilogueTiling(uint64_t tokens, uint64_t stride, uint32_t kvLora,
                                                   uint32_t rope, uint32_t blockSize, uint64_t latentBlock,
                                                   uint64_t ropeBlock, uint32_t latentTile, uint32_t ropeTile,
                                                   uint32_t joint, uint32_t elementBytes, uint32_t turn,
                                                   uint32_t interleaved, uint32_t quantize, float eps,
                                                   opsmith::Platform platform) {
  using namespace opsmith;
  MlaKvEpilogueTilingData t{tokens,     stride,   latentBlock, ropeBlock,   kvLora,   rope, blockSize,
                            latentTile, ropeTile, turn,        interleaved, quantize, eps};
  t.latentRow = joint ? kvLora + rope : latentTile ? latentTile : kvLora;
  t.ropeRow = joint ? kvLora + rope : ropeTile ? ropeTile : rope;
  t.ropeAt = joint ? kvLora : 0;
  t.kvPitch = uint32_t(AlignUp(kvLora, 32));
  t.ropePitch = uint32_t(AlignUp(rope, 32));
  const uint64_t kept = 2048 + (t.kvPitch + t.kvPitch / 64 + t.ropePitch) * 4;
  const uint64_t token = (t.kvPitch + t.ropePitch) * 4 * elementBytes + t.kvPitch * 8 + t.ropePitch * 44 +
                         300;
  if (kept + token > platform.localBytes) return t;  // no blocks: a token is too long for local memory
  t.tokensPerTile = uint32_t(
      Min(Min((platform.localBytes - kept) / token, 248), CeilDiv(tokens, platform.cores)));
  t.blocks = uint32_t(Min(platform.cores, CeilDiv(tokens, t.tokensPerTile)));
  return t;
}
