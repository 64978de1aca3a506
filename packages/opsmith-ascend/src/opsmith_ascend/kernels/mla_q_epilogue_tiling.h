// How the work of mla_q_epilogue is divided.
#pragma once

#include "tiling.h"

struct MlaQEpilogueTilingData {
  uint64_t tokens;
  uint32_t heads, nope, rope, kvLora;
  uint32_t joint, turn, interleaved, quantize;
  uint32_t outRow;   // elements of a head's result: kv_lora, or kv_lora + rope where both are one tensor
  uint32_t ropeRow;  // and of its rope part
  uint32_t blocks;
  uint32_t columnsPerTile;  // of kv_lora
  uint32_t columnPitch, nopePitch, ropePitch;
  uint32_t tokensPerTile;
  uint32_t headsPerTile;
};

// The product: a unit is a head and some columns of its weight, which stay in local memory while all tokens pass, a few
// at a time. The rotation: a unit is a token and some of its heads. Each core takes a range of both. Local memory holds
//     rotation   h heads x r x (4 x elementBytes + 16), their signs, offsets and table 13 x r x 4
//     q          t tokens x n x (2 x elementBytes + 4), one of them spread: n x 32
//     products   n x 64 x 4
//     weight     c columns x n x (2 x elementBytes + 4, which float32 does without)
//     results    c x t x (4 + 2 x elementBytes + 2)
// for n = nope and r = rope, both rounded up. With 8 tokens, 16 heads, n = 128 and r = 64 in bfloat16, 192 KiB leave
//     c = (196608 - 2048 - 27904 - 8192 - 4096 - 32768) / (128 x 8 + 8 x 10) = 109 columns -> 64.
inline MlaQEpilogueTilingData MlaQEpilogueTiling(uint64_t tokens, uint32_t heads, uint32_t nope,
                                                 uint32_t rope, uint32_t kvLora, uint32_t joint,
                                                 uint32_t elementBytes, uint32_t turn, uint32_t interleaved,
                                                 uint32_t quantize, opsmith::Platform platform) {
  using namespace opsmith;
  MlaQEpilogueTilingData t{tokens, heads, nope, rope, kvLora, joint, turn, interleaved, quantize};
  t.outRow = joint ? kvLora + rope : kvLora;
  t.ropeRow = joint ? kvLora + rope : rope;
  t.nopePitch = uint32_t(AlignUp(nope, kDataBlockBytes / elementBytes));
  t.ropePitch = uint32_t(AlignUp(rope, 32));
  t.tokensPerTile = uint32_t(Min(tokens, 8));
  t.headsPerTile = uint32_t(Min(Min(heads, 16), Max(1, CeilDiv(tokens * heads, platform.cores))));
  const uint64_t rotation = t.headsPerTile * t.ropePitch * (4 * elementBytes + 16) + 13 * t.ropePitch * 4;
  const uint64_t queries = t.tokensPerTile * t.nopePitch * (2 * elementBytes + 4) + AlignUp(nope, 8) * 32;
  const uint64_t column = nope * (elementBytes == 4 ? 8 : 2 * elementBytes + 4) +
                          t.tokensPerTile * (2 * elementBytes + 6);
  const uint64_t taken = 2048 + rotation + queries + nope * 256;
  // A repeat for every row of the weight: 255 at most.
  if (nope > 255 || taken + 64 * column > platform.localBytes) return t;  // no blocks: nope is too long
  t.columnsPerTile = uint32_t(Min(kvLora, AlignDown((platform.localBytes - taken) / column, 64)));
  t.columnPitch = uint32_t(AlignUp(t.columnsPerTile, 32));
  const uint64_t units = Max(heads * CeilDiv(kvLora, t.columnsPerTile),
                             tokens * CeilDiv(heads, t.headsPerTile));
  t.blocks = uint32_t(Min(platform.cores, units));
  return t;
}
