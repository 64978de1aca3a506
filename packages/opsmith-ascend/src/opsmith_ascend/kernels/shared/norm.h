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
    pipe->InitBuffer(statistics, kNormStatistics + t.rowsPerTile * kLanes * sizeof(float));
    other = inside.template Get<float>();
    wide = other[kIsFloat<T> ? 0 : length];
    const Floats s = statistics.template Get<float>();
    mean = s, square = s[kNormMaxRows], tileMean = s[2 * kNormMaxRows], tileSquare = s[3 * kNormMaxRows];
    delta = s[4 * kNormMaxRows], merged = s[5 * kNormMaxRows], ones = s[6 * kNormMaxRows];
    blocks = s[8 * kNormMaxRows], lanes = s[16 * kNormMaxRows];
    AscendC::Duplicate(s, 1.0f, 8 * kNormMaxRows);
  }

  __aicore__ inline void Process() {
    const uint64_t tiles = CeilDiv(t.rows, t.rowsPerTile);
    const uint64_t first = tiles * AscendC::GetBlockIdx() / t.blocks;
    const uint64_t last = tiles * (AscendC::GetBlockIdx() + 1) / t.blocks;
    if (whole) FetchVectors(0, t.columns);
    for (uint64_t i = first; i < last; ++i) {
      row = i * t.rowsPerTile;
      Rows();
    }
    if (whole) Release();
  }

 private:
  // Rows that fit local memory are one piece, which stays there. A longer row is read twice.
  __aicore__ inline void Rows() {
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Arrive(c);
      const Floats v = Load(c, true);
      Gather(v, c);
      if (whole) {
        InverseRoot();
        return Finish(v, c);
      }
      Drop();
    }
    InverseRoot();
    for (uint32_t c = 0; c < t.columns; c += t.columnsPerTile) {
      Arrive(c);
      FetchVectors(c, tile.size);
      const Floats v = Load(c, false);
      if constexpr (kCenter) Apply<Minus>(v, Whole(v, tile), PerRow(mean, blocks, tile), tile);
      Finish(v, c);
      Release();
    }
  }

  // The mean of a piece, which is subtracted from it, and the squares of what is left; those of several pieces are merged
  // by Chan's formula (Welford's update, a piece at a time).
  __aicore__ inline void Gather(const Floats& v, uint32_t column) {
    const uint32_t n = Eights();
    const Floats center = column ? tileMean : mean, squares = column ? tileSquare : square;
    if constexpr (kCenter) {
      SumOfRows(center, v, lanes, tile);
      AscendC::Muls(center, center, 1.0f / tile.size, n);
      Apply<Minus>(v, Whole(v, tile), PerRow(center, blocks, tile), tile);
    }
    AscendC::Mul(other, v, v, tile.rows * tile.width);
    SumOfRows(squares, other, lanes, tile);
    if (column == 0) return;
    AscendC::Add(square, square, tileSquare, n);
    if constexpr (kCenter) {
      const float before = column, now = tile.size;
      AscendC::Sub(delta, tileMean, mean, n);
      AscendC::Mul(merged, delta, delta, n);
      AscendC::Muls(merged, merged, before * now / (before + now), n);
      AscendC::Add(square, square, merged, n);
      AscendC::Muls(delta, delta, now / (before + now), n);
      AscendC::Add(mean, mean, delta, n);
    }
  }

  __aicore__ inline uint32_t Eights() const { return RoundedUp(tile.rows, kBlock); }

  __aicore__ inline void Arrive(uint32_t column) {
    tile = RowsOf<T>(Min(t.rowsPerTile, t.rows - row), Min(t.columnsPerTile, t.columns - column));
    const uint64_t at = row * t.columns + column;
    Fetch(inQueue, xGlobal[at], tile, t.columns);
    if (t.residual) Fetch(inQueue, residualGlobal[at], tile, t.columns);
  }

  // x, or x + residual, in float32; `store` writes the sum out too. What float32 tensors hold is worked on where the
  // queue put it, until Drop().
  __aicore__ inline Floats Load(uint32_t column, bool store) {
    const uint32_t n = tile.rows * tile.width;
    held = inQueue.template DeQue<T>();
    Floats v = Widen(held, wide, n);
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
        outQueue.EnQue(s);
        Leave(summedGlobal[row * t.columns + column], outQueue, tile, t.columns);
      }
    }
    return v;
  }

  __aicore__ inline void Drop() {
    if constexpr (kIsFloat<T>) inQueue.FreeTensor(held);
  }

  // square = 1 / sqrt(square / columns + eps). By a root and a division: the
  // instruction for both at once is less exact.
  __aicore__ inline void InverseRoot() {
    const uint32_t n = Eights();
    AscendC::Muls(square, square, 1.0f / t.columns, n);
    AscendC::Adds(square, square, t.eps, n);
    AscendC::Sqrt(square, square, n);
    AscendC::Div(square, ones, square, n);
  }

  __aicore__ inline void Finish(const Floats& v, uint32_t column) {
    const uint32_t n = tile.rows * tile.width;
    LocalTensor<T> y = outQueue.template AllocTensor<T>();
    Floats last = v;  // where the last operation writes
    if constexpr (kIsFloat<T>) last = y;
    Apply<Times>(t.weight + t.bias ? v : last, Whole(v, tile), PerRow(square, blocks, tile), tile);
    if constexpr (!kIsFloat<T>) {
      if (t.roundBeforeWeight && t.weight) {
        AscendC::Cast(y, v, RoundMode::CAST_RINT, n);
        AscendC::Cast(v, y, RoundMode::CAST_NONE, n);
      }
    }
    if (t.weight) {
      Floats w = Widen(weight, other, tile.size);
      if (t.weightOffset != 0.0f) {
        AscendC::Adds(other, w, t.weightOffset, tile.size);
        w = other;
      }
      Apply<Times>(t.bias ? v : last, Whole(v, tile), Columns(w), tile);
    }
    if (t.bias) Apply<Plus>(last, Whole(v, tile), Columns(Widen(bias, other, tile.size)), tile);
    if constexpr (!kIsFloat<T>) AscendC::Cast(y, v, RoundMode::CAST_RINT, n);
    Drop();
    outQueue.EnQue(y);
    Leave(yGlobal[row * t.columns + column], outQueue, tile, t.columns);
  }

  // weight and bias of some columns
  __aicore__ inline void FetchVectors(uint32_t column, uint32_t columns) {
    if (t.weight) weight = FetchOne(weightGlobal[column], columns);
    if (t.bias) bias = FetchOne(biasGlobal[column], columns);
  }
  __aicore__ inline LocalTensor<W> FetchOne(const GlobalTensor<W>& from, uint32_t columns) {
    Fetch(vectorQueue, from, Line(columns), columns);
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
  Floats wide, other, blocks, lanes;
  Floats mean, square, tileMean, tileSquare, delta, merged, ones;  // a number a row
  LocalTensor<T> held;
  LocalTensor<W> weight, bias;
  Tile tile;
  uint64_t row;
  bool whole;
};

}  // namespace opsmith
