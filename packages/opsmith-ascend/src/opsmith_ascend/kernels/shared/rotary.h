// The rotary embedding of tiles of rows, in float32: x cos + partner sin, where the partner of an element is the other
// one of its pair, with a minus for the first of them.
#pragma once

#include "formula_functions.h"
#include "rows.h"

namespace opsmith {

// What does not change from tile to tile: where each element's partner stands, and the signs.
class Rotary {
 public:
  // Bytes of local memory for tiles of so many rows.
  static __aicore__ inline uint32_t Bytes(uint32_t rows, uint32_t pitch) {
    return (2 * rows + 1) * pitch * 4;
  }

  __aicore__ inline void Init(const Floats& memory, uint32_t rows, uint32_t width, uint32_t pitch, bool turn,
                              bool neighbors) {
    turns = turn;
    interleaved = neighbors;
    signs = memory;
    partners = memory[pitch].ReinterpretCast<int32_t>();
    places = memory[pitch + rows * pitch].ReinterpretCast<int32_t>();
    if (!turn) {
      AscendC::Duplicate(signs, 1.0f, pitch);
      return;
    }
    if (interleaved) FindColumns(places, signs, width, width / 2, pitch);
    FindPartners(partners, signs, width, !interleaved, pitch);
    for (uint32_t r = 1; r < rows; ++r) {
      AscendC::Adds(partners[r * pitch], partners, int32_t(r * pitch * sizeof(float)), pitch);
      if (interleaved) AscendC::Adds(places[r * pitch], places, int32_t(r * pitch * sizeof(float)), pitch);
    }
  }

  // y = x, turned where there is a table. `cos` and `sin` have a row each, or, with `shared`, one for all rows;
  // `swapped`, `c` and `s` have room for a tile each.
  __aicore__ inline void Turn(const Floats& y, const Floats& x, const Floats& cos, const Floats& sin,
                              bool shared, const Floats& swapped, const Floats& c, const Floats& s,
                              const Tile& t) const {
    if (!turns) {  // the signs are ones then
      Apply<Times>(y, Whole(x, t), Columns(signs), t);
      return;
    }
    const LocalTensor<uint32_t> from = partners.ReinterpretCast<uint32_t>();
    AscendC::Gather(swapped, x, from, 0, t.rows * t.width);
    Apply<Times>(swapped, Whole(swapped, t), Columns(signs), t);
    Floats cosines = cos, sines = sin;
    if (interleaved) {
      const LocalTensor<uint32_t> place = places.ReinterpretCast<uint32_t>();
      AscendC::Gather(c, cos, place, 0, shared ? t.width : t.rows * t.width);
      AscendC::Gather(s, sin, place, 0, shared ? t.width : t.rows * t.width);
      cosines = c, sines = s;
    }
    Apply<Times>(swapped, Whole(swapped, t), shared ? Columns(sines) : Whole(sines, t), t);
    Apply<Times>(y, Whole(x, t), shared ? Columns(cosines) : Whole(cosines, t), t);
    Apply<Plus>(y, Whole(y, t), Whole(swapped, t), t);
  }

 private:
  bool turns = false, interleaved = false;
  Floats signs;
  LocalTensor<int32_t> partners, places;  // byte offsets into a tile
};

}  // namespace opsmith
