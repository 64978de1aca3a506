// Pairs of a head's dimensions, rotated by the angles of the token's position: y1 = x1 cos - x2 sin, y2 = x2 cos + x1 sin.
//
// A unit of work is some tokens, whose rows of the tables are read once, and a group of heads that use them. The two
// numbers of a pair are in the halves of a head, which vectors take as they are; or they are neighbors, and then a
// gather swaps them: y = x cos + swapped(x) (-sin, +sin).
#include "formula_functions.h"
#include "rope_tiling.h"
#include "rows.h"

using namespace AscendC;
using opsmith::Padded;

// T: of x and y, C: of the tables, P: of the positions.
template <typename T, typename C, typename P>
class Rope {
 public:
  __aicore__ inline void Init(GM_ADDR x, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions, GM_ADDR y,
                              const RopeTilingData& tiling, TPipe* pipe) {
    t = tiling;
    xGlobal.SetGlobalBuffer((__gm__ T*)x);
    cosGlobal.SetGlobalBuffer((__gm__ C*)cos);
    sinGlobal.SetGlobalBuffer((__gm__ C*)sin);
    positionGlobal.SetGlobalBuffer((__gm__ P*)positions);
    yGlobal.SetGlobalBuffer((__gm__ T*)y);
    half_ = t.dims / 2;
    rest = t.width - t.dims;
    wideTable = t.tableWidth == t.dims;
    // Halves that fill data blocks stay side by side; others, and what is not rotated, lie apart.
    together = !t.interleaved && rest == 0 && Padded<T>(half_) == half_;
    step = t.interleaved ? Padded<T>(t.dims) : together ? t.dims : Padded<T>(half_);
    tableStep = t.interleaved ? Padded<C>(t.tableWidth) : Padded<C>(half_);
    const uint32_t row = opsmith::RopeRow(t.width, t.dims, sizeof(T));
    const uint32_t length = t.rowsPerTile * row, tableRows = t.headRows ? 1 : t.rowsPerTile;
    const uint32_t table = tableRows * opsmith::Max(opsmith::RopeRow(t.dims, t.dims, sizeof(C)),
                                                    opsmith::RopeRow(t.dims, t.dims, sizeof(T)));
    pipe->InitBuffer(xQueue, opsmith::kBufferNum, length * sizeof(T));
    pipe->InitBuffer(yQueue, opsmith::kBufferNum, length * sizeof(T));
    pipe->InitBuffer(tableQueue, 2 * opsmith::kBufferNum, table * sizeof(C));
    pipe->InitBuffer(inside, (opsmith::kIsFloat<T> ? 1 : 2) * length * sizeof(float));
    pipe->InitBuffer(tables, 3 * table * sizeof(float));
    spare = inside.template Get<float>();
    wide = spare[opsmith::kIsFloat<T> ? 0 : length];
    cosWide = tables.template Get<float>();
    sinWide = cosWide[table];
    tableSpare = cosWide[2 * table];
    if (t.interleaved) {
      pipe->InitBuffer(partners, 3 * row * sizeof(float));
      const LocalTensor<int32_t> p = partners.template Get<int32_t>();
      partner = p.ReinterpretCast<uint32_t>();
      column = p[row].template ReinterpretCast<uint32_t>();
      sign = p[2 * row].template ReinterpretCast<float>();
      opsmith::FindPartners(p, sign, t.dims, false, t.dims);
      opsmith::FindColumns(p[row], tableSpare, t.dims, wideTable ? half_ : 0, t.dims);
    }
  }

  __aicore__ inline void Process() {
    const uint64_t tokensAtOnce = t.headRows ? 1 : t.rowsPerTile;
    const uint64_t tiles = opsmith::CeilDiv(t.tokens, tokensAtOnce);
    const uint64_t units = t.batches * tiles * t.groups;
    const uint64_t first = units * GetBlockIdx() / t.blocks, last = units * (GetBlockIdx() + 1) / t.blocks;
    for (uint64_t unit = first; unit < last; ++unit) {
      const uint64_t batch = unit / t.groups / tiles;
      const uint64_t token = unit / t.groups % tiles * tokensAtOnce, group = unit % t.groups;
      const uint32_t tokens = opsmith::Min(tokensAtOnce, t.tokens - token);
      const uint32_t begin = t.heads * group / t.groups, end = t.heads * (group + 1) / t.groups;
      LoadTables(batch, token, tokens);
      const uint64_t at = batch * t.batchStride + token * t.tokenStride;
      for (uint32_t head = begin; head < end; head += t.headRows ? t.rowsPerTile : 1) {
        rows = t.headRows ? opsmith::Min(t.rowsPerTile, end - head) : tokens;
        Tile(at + head * t.headStride, t.headRows ? t.headStride : t.tokenStride);
      }
      DropTables();
    }
  }

 private:
  __aicore__ inline void LoadTables(uint64_t batch, uint64_t token, uint32_t tokens) {
    FetchTable(cosGlobal, batch, token, tokens);
    FetchTable(sinGlobal, batch, token, tokens);
    cosHeld = tableQueue.template DeQue<C>();
    sinHeld = tableQueue.template DeQue<C>();
    tableRows = tokens;
    cosRow = Spread(cosHeld, cosWide);
    sinRow = Spread(sinHeld, sinWide);
    if (t.interleaved)
      for (uint32_t r = 0; r < tokens; ++r) Mul(sinRow[r * step], sinRow[r * step], sign, int32_t(t.dims));
  }

  __aicore__ inline void DropTables() {
    tableQueue.FreeTensor(cosHeld);
    tableQueue.FreeTensor(sinHeld);
  }

  // The tokens' rows of a table: by halves, each beginning data blocks, or whole where pairs are neighbors.
  __aicore__ inline void FetchTable(const GlobalTensor<C>& table, uint64_t batch, uint64_t token,
                                    uint32_t tokens) {
    LocalTensor<C> to = tableQueue.template AllocTensor<C>();
    const uint32_t columns = t.interleaved ? t.tableWidth : half_,
                   parts = t.interleaved || !wideTable ? 1 : 2;
    for (uint32_t part = 0; part < parts; ++part) {
      const LocalTensor<C> plane = to[part * tokens * tableStep];
      if (t.positions) {
        for (uint32_t r = 0; r < tokens; ++r) {
          const uint64_t row = positionGlobal.GetValue(batch * t.positionStride + token + r);
          opsmith::CopyIn(plane[r * tableStep], table[row * t.tableWidth + part * half_],
                          opsmith::RowsOf<C>(1, columns), columns);
        }
      } else {
        const uint64_t at = batch * t.tableStride + token * t.tableWidth + part * half_;
        opsmith::CopyIn(plane, table[at], opsmith::RowsOf<C>(tokens, columns), t.tableWidth);
      }
    }
    tableQueue.EnQue(to);
  }

  // A table in float32; where pairs are neighbors, with a number for each element of x.
  __aicore__ inline LocalTensor<float> Spread(const LocalTensor<C>& table, const LocalTensor<float>& room) {
    const uint32_t parts = t.interleaved || !wideTable ? 1 : 2, n = parts * tableRows * tableStep;
    if (!t.interleaved) return opsmith::Widen(table, room, n);
    const LocalTensor<float> from = opsmith::Widen(table, tableSpare, n);
    for (uint32_t r = 0; r < tableRows; ++r)
      Gather(room[r * step], from, column, r * tableStep * uint32_t(sizeof(float)), t.dims);
    return room;
  }

  __aicore__ inline void Tile(uint64_t at, uint64_t stride) {
    const uint32_t rotated = rows * step * (t.interleaved || together ? 1 : 2);
    const uint32_t count = rotated + rows * Padded<T>(rest);
    LocalTensor<T> x = xQueue.template AllocTensor<T>();
    Copy(x, rotated, at, stride);
    xQueue.EnQue(x);
    x = xQueue.template DeQue<T>();
    const LocalTensor<float> v = opsmith::Widen(x, wide, count);
    if constexpr (!opsmith::kIsFloat<T>) xQueue.FreeTensor(x);
    LocalTensor<T> y = yQueue.template AllocTensor<T>();
    LocalTensor<float> out = v;
    if constexpr (opsmith::kIsFloat<T>) out = y;
    if (t.interleaved)
      Neighbors(out, v);
    else
      Halves(out, v);
    if constexpr (opsmith::kIsFloat<T>) {
      if (rest) DataCopy(y[rotated], x[rotated], count - rotated);
      xQueue.FreeTensor(x);
    } else {
      Cast(y, v, RoundMode::CAST_RINT, count);
    }
    yQueue.EnQue(y);
    y = yQueue.template DeQue<T>();
    Store(y, rotated, at, stride);
    yQueue.FreeTensor(y);
  }

  __aicore__ inline void Copy(const LocalTensor<T>& to, uint32_t rotated, uint64_t at, uint64_t stride) {
    if (t.interleaved || together) {
      opsmith::CopyIn(to, xGlobal[at], opsmith::RowsOf<T>(rows, t.dims), stride);
    } else {
      opsmith::CopyIn(to, xGlobal[at], opsmith::RowsOf<T>(rows, half_), stride);
      opsmith::CopyIn(to[rows * step], xGlobal[at + half_], opsmith::RowsOf<T>(rows, half_), stride);
    }
    if (rest) opsmith::CopyIn(to[rotated], xGlobal[at + t.dims], opsmith::RowsOf<T>(rows, rest), stride);
  }

  __aicore__ inline void Store(const LocalTensor<T>& from, uint32_t rotated, uint64_t at, uint64_t stride) {
    if (t.interleaved || together) {
      opsmith::CopyOut(yGlobal[at], from, opsmith::RowsOf<T>(rows, t.dims), stride);
    } else {
      opsmith::CopyOut(yGlobal[at], from, opsmith::RowsOf<T>(rows, half_), stride);
      opsmith::CopyOut(yGlobal[at + half_], from[rows * step], opsmith::RowsOf<T>(rows, half_), stride);
    }
    if (rest) opsmith::CopyOut(yGlobal[at + t.dims], from[rotated], opsmith::RowsOf<T>(rows, rest), stride);
  }

  // One repeat a row, in vectors of 64: the rows of the tables step along, or stay where heads share one.
  __aicore__ inline void Halves(const LocalTensor<float>& out, const LocalTensor<float>& v) {
    const uint32_t second = together ? half_ : rows * step,
                   secondTable = wideTable ? tableRows * tableStep : 0;
    const uint32_t s = step / 8, ts = t.headRows ? 0 : tableStep / 8;
    const BinaryRepeatParams by(1, 1, 1, s, s, ts), all(1, 1, 1, s, s, s);
    for (uint32_t c = 0; c < half_; c += 64) {
      const uint64_t mask = half_ - c < 64 ? half_ - c : 64;
      const LocalTensor<float> a = v[c], b = v[second + c], byA = spare[second + c];
      Mul(spare[c], b, sinRow[c], mask, rows, by);
      Mul(byA, a, sinRow[secondTable + c], mask, rows, by);
      Mul(a, a, cosRow[c], mask, rows, by);
      Mul(b, b, cosRow[secondTable + c], mask, rows, by);
      Sub(out[c], a, spare[c], mask, rows, all);
      Add(out[second + c], b, byA, mask, rows, all);
    }
  }

  __aicore__ inline void Neighbors(const LocalTensor<float>& out, const LocalTensor<float>& v) {
    for (uint32_t r = 0; r < rows; ++r)
      Gather(spare[r * step], v, partner, r * step * uint32_t(sizeof(float)), t.dims);
    const uint32_t s = step / 8, ts = t.headRows ? 0 : step / 8;
    const BinaryRepeatParams by(1, 1, 1, s, s, ts), all(1, 1, 1, s, s, s);
    for (uint32_t c = 0; c < t.dims; c += 64) {
      const uint64_t mask = t.dims - c < 64 ? t.dims - c : 64;
      Mul(spare[c], spare[c], sinRow[c], mask, rows, by);
      Mul(v[c], v[c], cosRow[c], mask, rows, by);
      Add(out[c], v[c], spare[c], mask, rows, all);
    }
  }

  RopeTilingData t;
  GlobalTensor<T> xGlobal, yGlobal;
  GlobalTensor<C> cosGlobal, sinGlobal;
  GlobalTensor<P> positionGlobal;
  TQue<TPosition::VECIN, opsmith::kBufferNum> xQueue, tableQueue;
  TQue<TPosition::VECOUT, opsmith::kBufferNum> yQueue;
  TBuf<TPosition::VECCALC> inside, tables, partners;
  LocalTensor<float> spare, wide, cosWide, sinWide, tableSpare, cosRow, sinRow, sign;
  LocalTensor<uint32_t> partner, column;
  LocalTensor<C> cosHeld, sinHeld;
  uint32_t half_, rest, step, tableStep, rows, tableRows;
  bool wideTable, together;
};

extern "C" __global__ __aicore__ void rope(GM_ADDR x, GM_ADDR cos, GM_ADDR sin, GM_ADDR positions, GM_ADDR y,
                                           GM_ADDR workspace, GM_ADDR tiling) {
  REGISTER_TILING_DEFAULT(RopeTilingData);
  GET_TILING_DATA_WITH_STRUCT(RopeTilingData, data, tiling);
  TPipe pipe;
  Rope<DTYPE_X, DTYPE_COS, DTYPE_POSITIONS> kernel;
  kernel.Init(x, cos, sin, positions, y, data, &pipe);
  kernel.Process();
}
