// RMSNorm and LayerNorm, alone or behind a residual addition: rows that fit local memory are read once.
#pragma once

#include "norm_tiling.h"
#include "rows.h"

namespace opsmith {

using AscendC::TBuf;
using AscendC::TPosition;
using AscendC::TQue;

struct NormTensors {
  GM_ADDR x, residual, weight, bias, y, summed;
};

// T: of x and the results, W: of weight and bias. kCenter: LayerNorm, which subtracts the mean.
template <typename T, typename W, bool kCenter>
class Norm {
 public:
  __aicore__ inline void Init(const NormTensors& g, const NormTilingData& tiling, AscendC::TPipe* pipe) {
    t = tiling;
    xGlobal.SetGlobalBuffer((__gm__ T*)g.x);
    residualGlobal.SetGlobalBuffer((__gm__ T*)g.residual);
    weightGlobal.SetGlobalBuffer((__gm__ W*)g.weight);
    biasGlobal.SetGlobalBuffer((__gm__ W*)g.bias);
    yGlobal.SetGlobalBuffer((__gm__ T*)g.y);
    summedGlobal.SetGlobalBuffer((__gm__ T*)g.summed);
    whole = t.columnsPerTile == t.columns;
    const uint32_t length = t.rowsPerTile * Padded<T>(t.columnsPerTile);
    pipe->InitBuffer(inQueue, t.buffers, length * sizeof(T));
    pipe->InitBuffer(outQueue, t.buffers, length * sizeof(T));
    if (t.weight + t.bias)
      pipe->InitBuffer(vectorQueue, whole ? t.weight + t.bias : kBufferNum,
                       Padded<W>(t.columnsPerTile) * sizeof(W));
    pipe->InitBuffer(inside, (kIsFloat<T> ? 1 : 2) * length * sizeof(float));
    pipe->InitBuffer(statistics, 8 * kStatBytes + 2 * kSpreadBytes + 1024);
    other = inside.template Get<float>();
    wide = other[kIsFloat<T> ? 0 : length];
    const LocalTensor<float> s = statistics.template Get<float>();
    mean = s, square = s[kMaxRows], tileMean = s[2 * kMaxRows], tileSquare = s[3 * kMaxRows];
    delta = s[4 * kMaxRows], merged = s[5 * kMaxRows], ones = s[6 * kMaxRows];
    spread = s[8 * kMaxRows], spreadMean = s[16 * kMaxRows], work = s[24 * kMaxRows];
    AscendC::Duplicate(s, 1.0f, 8 * kMaxRows);
  }

  __aicore__ inline void Process() {
    const uint64_t tiles = CeilDiv(t.rows, t.rowsPerTile);
    const uint64_t first = tiles * AscendC::GetBlockIdx() / t.blocks;
    const uint64_t last = tiles * (AscendC::GetBlockIdx() + 1) / t.blocks;
    if (whole) Fetch(0, t.columns);
    for (uint64_t i = first; i < last; ++i) {
      row = i * t.rowsPerTile;
      if (whole) {
        tile = {uint32_t(Min(t.rowsPerTile, t.rows - row)), t.columns, Padded<T>(t.columns)};
        WholeRows();
      } else {
        LongRow();
      }
    }
    if (whole) Release();
  }

 private:
  // Rows in local memory: the mean, the squares of what is left, the result.
  __aicore__ inline void WholeRows() {
    CopyIn(0);
    const LocalTensor<float> v = Load(0, true);
    if constexpr (kCenter) {
      FoldRows<Sum>(mean, v, spread, work, tile);
      AscendC::Muls(mean, mean, 1.0f / t.columns, Eights());
      SpreadRows(spreadMean, mean, tile.rows);
      WithRowNumber<Minus>(v, v, spreadMean, tile);
    }
    AscendC::Mul(other, v, v, tile.rows * tile.padded);
    FoldRows<Sum>(square, other, spread, work, tile);
    InverseRoot();
    Finish(v, 0);
  }

  // A row longer than local memory: each piece has its mean and squares, and Chan's formula merges them (Welford's
  // update, a piece at a time). The second pass reads the pieces again.
  __aicore__ inline void LongRow() {
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Piece(c);
      CopyIn(c);
      const LocalTensor<float> v = Load(c, true);
      const uint32_t n = tile.rows * tile.padded;
      if constexpr (kCenter) {
        FoldRows<Sum>(tileMean, v, spread, work, tile);
        AscendC::Muls(tileMean, tileMean, 1.0f / tile.columns, 8);
        SpreadRows(spreadMean, tileMean, 1);
        WithRowNumber<Minus>(v, v, spreadMean, tile);
      }
      AscendC::Mul(other, v, v, n);
      Drop();
      FoldRows<Sum>(c ? tileSquare : square, other, spread, work, tile);
      if (c) AscendC::Add(square, square, tileSquare, 8);
      if constexpr (kCenter) {
        const float before = c, now = tile.columns;
        if (c) {
          AscendC::Sub(delta, tileMean, mean, 8);
          AscendC::Mul(merged, delta, delta, 8);
          AscendC::Muls(merged, merged, before * now / (before + now), 8);
          AscendC::Add(square, square, merged, 8);
          AscendC::Muls(delta, delta, now / (before + now), 8);
          AscendC::Add(mean, mean, delta, 8);
        } else {
          AscendC::Muls(mean, tileMean, 1.0f, 8);
        }
      }
    }
    InverseRoot();
    if constexpr (kCenter) SpreadRows(spreadMean, mean, 1);
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Piece(c);
      CopyIn(c);
      Fetch(c, tile.columns);
      const LocalTensor<float> v = Load(c, false);
      if constexpr (kCenter) WithRowNumber<Minus>(v, v, spreadMean, tile);
      Finish(v, c);
      Release();
    }
  }

  __aicore__ inline void Piece(uint32_t column) {
    const uint32_t columns = Min(t.columnsPerTile, t.columns - column);
    tile = {1, columns, Padded<T>(columns)};
  }

  __aicore__ inline uint32_t Eights() const { return (tile.rows + 7) / 8 * 8; }

  __aicore__ inline void CopyIn(uint32_t column) {
    const uint64_t at = row * t.columns + column;
    LocalTensor<T> x = inQueue.template AllocTensor<T>();
    CopyRowsIn(x, xGlobal[at], tile.rows, tile.columns, t.columns);
    inQueue.EnQue(x);
    if (t.residual) {
      LocalTensor<T> r = inQueue.template AllocTensor<T>();
      CopyRowsIn(r, residualGlobal[at], tile.rows, tile.columns, t.columns);
      inQueue.EnQue(r);
    }
  }

  // x, or x + residual, in float32; `store` writes the sum out too. What float32 tensors hold is worked on where the
  // queue put it, until Drop().
  __aicore__ inline LocalTensor<float> Load(uint32_t column, bool store) {
    const uint32_t n = tile.rows * tile.padded;
    held = inQueue.template DeQue<T>();
    LocalTensor<float> v = Widen(held, wide, n);
    if constexpr (!kIsFloat<T>) inQueue.FreeTensor(held);
    if (t.residual) {
      LocalTensor<T> r = inQueue.template DeQue<T>();
      AscendC::Add(v, v, Widen(r, other, n), n);
      inQueue.FreeTensor(r);
      if (store) {
        LocalTensor<T> s = outQueue.template AllocTensor<T>();
        if constexpr (kIsFloat<T>)
          AscendC::DataCopy(s, v, n);
        else
          AscendC::Cast(s, v, RoundMode::CAST_RINT, n);
        CopyOut(summedGlobal, s, column);
      }
    }
    return v;
  }

  __aicore__ inline void Drop() {
    if constexpr (kIsFloat<T>) inQueue.FreeTensor(held);
  }

  // square = 1 / sqrt(square / columns + eps), spread over the rows' data blocks. By a root and a division: the
  // instruction for both at once is less exact.
  __aicore__ inline void InverseRoot() {
    const uint32_t n = Eights();
    AscendC::Muls(square, square, 1.0f / t.columns, n);
    AscendC::Adds(square, square, t.eps, n);
    AscendC::Sqrt(square, square, n);
    AscendC::Div(square, ones, square, n);
    SpreadRows(spread, square, tile.rows);
  }

  __aicore__ inline void Finish(const LocalTensor<float>& v, uint32_t column) {
    const uint32_t n = tile.rows * tile.padded;
    LocalTensor<T> y = outQueue.template AllocTensor<T>();
    LocalTensor<float> last = v;  // where the last operation writes
    if constexpr (kIsFloat<T>) last = y;
    WithRowNumber<Times>(t.weight + t.bias ? v : last, v, spread, tile);
    if constexpr (!kIsFloat<T>) {
      if (t.roundBeforeWeight && t.weight) {
        AscendC::Cast(y, v, RoundMode::CAST_RINT, n);
        AscendC::Cast(v, y, RoundMode::CAST_NONE, n);
      }
    }
    if (t.weight) {
      LocalTensor<float> w = Widen(weight, other, tile.columns);
      if (t.weightOffset != 0.0f) {
        AscendC::Adds(other, w, t.weightOffset, tile.columns);
        w = other;
      }
      WithVector<Times>(t.bias ? v : last, v, w, tile);
    }
    if (t.bias) WithVector<Plus>(last, v, Widen(bias, other, tile.columns), tile);
    if constexpr (!kIsFloat<T>) AscendC::Cast(y, v, RoundMode::CAST_RINT, n);
    Drop();
    CopyOut(yGlobal, y, column);
  }

  __aicore__ inline void CopyOut(const GlobalTensor<T>& to, const LocalTensor<T>& made, uint32_t column) {
    outQueue.EnQue(made);
    LocalTensor<T> ready = outQueue.template DeQue<T>();
    CopyRowsOut(to[row * t.columns + column], ready, tile.rows, tile.columns, t.columns);
    outQueue.FreeTensor(ready);
  }

  // weight and bias of some columns
  __aicore__ inline void Fetch(uint32_t column, uint32_t columns) {
    if (t.weight) weight = FetchOne(weightGlobal[column], columns);
    if (t.bias) bias = FetchOne(biasGlobal[column], columns);
  }
  __aicore__ inline LocalTensor<W> FetchOne(const GlobalTensor<W>& from, uint32_t columns) {
    LocalTensor<W> v = vectorQueue.template AllocTensor<W>();
    CopyRowsIn(v, from, 1, columns, columns);
    vectorQueue.EnQue(v);
    return vectorQueue.template DeQue<W>();
  }
  __aicore__ inline void Release() {
    if (t.weight) vectorQueue.FreeTensor(weight);
    if (t.bias) vectorQueue.FreeTensor(bias);
  }

  NormTilingData t;
  GlobalTensor<T> xGlobal, residualGlobal, yGlobal, summedGlobal;
  GlobalTensor<W> weightGlobal, biasGlobal;
  TQue<TPosition::VECIN, kBufferNum> inQueue, vectorQueue;
  TQue<TPosition::VECOUT, kBufferNum> outQueue;
  TBuf<TPosition::VECCALC> inside, statistics;
  LocalTensor<float> wide, other, spread, spreadMean, work;
  LocalTensor<float> mean, square, tileMean, tileSquare, delta, merged, ones;  // a number a row
  LocalTensor<T> held;
  LocalTensor<W> weight, bias;
  Tile tile;
  uint64_t row;
  bool whole;
};

}  // namespace opsmith
