// What one pass along the rows of a tile gathers. Rows longer than a tile come in parts: each statistic is merged with
// that of the parts before it, so that a row of any length takes one pass.
#pragma once

#include "formula.h"

namespace formula {

// Memory that all statistics of a kernel share: a tile to compute in, and the lanes of each row.
struct Scratch {
  Floats tile, lanes, blocks;
};

class RowSum {
 public:
  __aicore__ inline void Init(TPipe& pipe) {
    sum_.Init(pipe, kMostRows);
    part_.Init(pipe, kMostRows);
  }
  __aicore__ inline void Begin() { AscendC::Duplicate(sum(), 0.0f, kMostRows); }
  __aicore__ inline void Add(const Floats& x, const Scratch& scratch, const Tile& tile) {
    SumOfRows(part_.Get(), x, scratch.lanes, tile);
    AscendC::Add(sum(), sum(), part_.Get(), tile.rows);
  }
  __aicore__ inline Floats sum() { return sum_.Get(); }

 private:
  Values sum_, part_;
};

template <class Op>
class RowExtreme {
 public:
  static constexpr bool kGreatest = kSame<Op, Larger>;
  static constexpr float kNeutral = kGreatest ? -kInfinity : kInfinity;

  __aicore__ inline void Init(TPipe& pipe) {
    best_.Init(pipe, kMostRows);
    part_.Init(pipe, kMostRows);
  }
  __aicore__ inline void Begin() { AscendC::Duplicate(best_.Get(), kNeutral, kMostRows); }
  __aicore__ inline void Add(const Floats& x, const Scratch& scratch, const Tile& tile) {
    if constexpr (kGreatest) {
      MaxOfRows(part_.Get(), x, scratch.lanes, tile);
      AscendC::Max(best_.Get(), best_.Get(), part_.Get(), tile.rows);
    } else {
      MinOfRows(part_.Get(), x, scratch.lanes, tile);
      AscendC::Min(best_.Get(), best_.Get(), part_.Get(), tile.rows);
    }
  }
  __aicore__ inline Floats max() { return best_.Get(); }
  __aicore__ inline Floats min() { return best_.Get(); }

 private:
  Values best_, part_;
};
using RowMax = RowExtreme<Larger>;
using RowMin = RowExtreme<Lesser>;

// Mean and squared deviations of each part by themselves, parts merged by Chan's formula (Welford's, for parts).
class RowMoments {
 public:
  __aicore__ inline void Init(TPipe& pipe) {
    mean_.Init(pipe, kMostRows);
    squares_.Init(pipe, kMostRows);
    part_.Init(pipe, kMostRows);
    delta_.Init(pipe, kMostRows);
  }
  __aicore__ inline void Begin() {
    count_ = 0;
    AscendC::Duplicate(mean(), 0.0f, kMostRows);
    AscendC::Duplicate(squares(), 0.0f, kMostRows);
  }
  __aicore__ inline void Add(const Floats& x, const Scratch& scratch, const Tile& tile) {
    const Floats part = part_.Get(), delta = delta_.Get();
    const float share = static_cast<float>(tile.size) / static_cast<float>(count_ + tile.size);
    SumOfRows(part, x, scratch.lanes, tile);
    AscendC::Muls(part, part, 1.0f / static_cast<float>(tile.size), tile.rows);  // its mean
    AscendC::Sub(delta, part, mean(), tile.rows);
    Apply<Minus>(scratch.tile, Whole(x, tile), PerRow(part, scratch.blocks, tile), tile);
    Apply<Times>(scratch.tile, Whole(scratch.tile, tile), Whole(scratch.tile, tile), tile);
    SumOfRows(part, scratch.tile, scratch.lanes, tile);
    AscendC::Add(squares(), squares(), part, tile.rows);
    AscendC::Muls(part, delta, share, tile.rows);
    AscendC::Add(mean(), mean(), part, tile.rows);
    AscendC::Mul(part, part, delta, tile.rows);
    AscendC::Muls(part, part, static_cast<float>(count_), tile.rows);
    AscendC::Add(squares(), squares(), part, tile.rows);
    count_ += tile.size;
  }
  __aicore__ inline Floats mean() { return mean_.Get(); }
  __aicore__ inline Floats squares() { return squares_.Get(); }  // the variance times the size

 private:
  uint32_t count_ = 0;
  Values mean_, squares_, part_, delta_;
};

// The maximum, and the sum of e^(x - maximum): the sum so far is scaled down where a larger element turns up.
class RowOnline {
 public:
  __aicore__ inline void Init(TPipe& pipe) {
    max_.Init(pipe, kMostRows);
    sum_.Init(pipe, kMostRows);
    top_.Init(pipe, kMostRows);
  }
  __aicore__ inline void Begin() {
    AscendC::Duplicate(max(), -kInfinity, kMostRows);
    AscendC::Duplicate(sum(), 0.0f, kMostRows);
  }
  __aicore__ inline void Add(const Floats& x, const Scratch& scratch, const Tile& tile) {
    const Floats top = top_.Get();
    MaxOfRows(top, x, scratch.lanes, tile);
    AscendC::Max(top, top, max(), tile.rows);
    AscendC::Sub(max(), max(), top, tile.rows);
    AscendC::Exp(max(), max(), tile.rows);
    AscendC::Mul(sum(), sum(), max(), tile.rows);
    AscendC::Adds(max(), top, 0.0f, tile.rows);
    Apply<Minus>(scratch.tile, Whole(x, tile), PerRow(top, scratch.blocks, tile), tile);
    AscendC::Exp(scratch.tile, scratch.tile, tile.count());
    SumOfRows(top, scratch.tile, scratch.lanes, tile);
    AscendC::Add(sum(), sum(), top, tile.rows);
  }
  __aicore__ inline Floats max() { return max_.Get(); }
  __aicore__ inline Floats sum() { return sum_.Get(); }

 private:
  Values max_, sum_, top_;
};

}  // namespace formula
