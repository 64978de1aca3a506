// Functions of one element that are no single instruction, over n floats that lie together. `to` may be `x`; what else they
// compute in is given. Reciprocals are divisions: the instructions Reciprocal and Rsqrt are coarse.
#pragma once

#include "formula.h"

namespace formula {

__aicore__ inline void NumberOver(const Floats& to, float number, const Floats& x, const Floats& one,
                                  uint32_t n) {
  AscendC::Duplicate(one, number, n);
  AscendC::Div(to, one, x, n);
}
__aicore__ inline void OverNumber(const Floats& to, const Floats& x, float number, const Floats& many,
                                  uint32_t n) {
  AscendC::Duplicate(many, number, n);
  AscendC::Div(to, x, many, n);
}
__aicore__ inline void ReciprocalRoot(const Floats& to, const Floats& x, const Floats& one, uint32_t n) {
  AscendC::Sqrt(to, x, n);
  NumberOver(to, 1.0f, to, one, n);
}
// 1 + e^-x, what x is divided by for SiLU and 1 for the sigmoid.
__aicore__ inline void OnePlusPower(const Floats& to, const Floats& x, uint32_t n) {
  AscendC::Muls(to, x, -1.0f, n);
  AscendC::Exp(to, to, n);
  AscendC::Adds(to, to, 1.0f, n);
}
__aicore__ inline void Sigmoid(const Floats& to, const Floats& x, const Floats& one, uint32_t n) {
  OnePlusPower(to, x, n);
  NumberOver(to, 1.0f, to, one, n);
}
__aicore__ inline void Silu(const Floats& to, const Floats& x, const Floats& below, uint32_t n) {
  OnePlusPower(below, x, n);
  AscendC::Div(to, x, below, n);
}
// to = to * x + c
__aicore__ inline void Step(const Floats& to, const Floats& x, float c, uint32_t n) {
  AscendC::Mul(to, to, x, n);
  AscendC::Adds(to, to, c, n);
}
__aicore__ inline void Linear(const Floats& to, const Floats& x, float a, float b, uint32_t n) {
  AscendC::Muls(to, x, a, n);
  AscendC::Adds(to, to, b, n);
}
// Near 0 the series, which has x itself and a small rest; from 0.6 on 1 - 2 / (e^2|x| + 1), with the sign of x.
__aicore__ inline void Tanh(const Floats& to, const Floats& x, const Floats& a, const Floats& far,
                            const Floats& near, const Floats& mask, uint32_t n) {
  const auto bits = mask.ReinterpretCast<uint8_t>();
  AscendC::Abs(a, x, n);
  AscendC::CompareScalar(bits, a, 0.6f, CMPMODE::LT, RoundedUp(n, kLanes));
  AscendC::Muls(far, a, 2.0f, n);
  AscendC::Exp(far, far, n);
  AscendC::Adds(far, far, 1.0f, n);
  NumberOver(far, 2.0f, far, near, n);
  AscendC::Muls(far, far, -1.0f, n);
  AscendC::Adds(far, far, 1.0f, n);
  AscendC::Div(near, x, a, n);
  AscendC::Mul(far, far, near, n);
  AscendC::Mul(a, x, x, n);
  Linear(near, a, 0.00234493123f, -0.00838877368f, n);
  Step(near, a, 0.0217822467f, n);
  Step(near, a, -0.0539608544f, n);
  Step(near, a, 0.133333101f, n);
  Step(near, a, -0.333333332f, n);
  AscendC::Mul(near, near, a, n);
  AscendC::Mul(near, near, x, n);
  AscendC::Add(near, near, x, n);
  AscendC::Select(to, bits, near, far, SELMODE::VSEL_TENSOR_TENSOR_MODE, n);
}
// erf as an odd rational function, absolute error below 2e-7: that of the CPU's kernels.
__aicore__ inline void Erf(const Floats& to, const Floats& x, const Floats& t, const Floats& p, uint32_t n) {
  AscendC::Maxs(to, x, -4.0f, n);
  AscendC::Mins(to, to, 4.0f, n);
  AscendC::Mul(t, to, to, n);
  Linear(p, t, -2.72614225801306e-10f, 2.77068142495902e-08f, n);
  Step(p, t, -2.10102402082508e-06f, n);
  Step(p, t, -5.69250639462346e-05f, n);
  Step(p, t, -7.34990630326855e-04f, n);
  Step(p, t, -2.95459980854025e-03f, n);
  Step(p, t, -1.60960333262415e-02f, n);
  AscendC::Mul(to, to, p, n);
  Linear(p, t, -1.45660718464996e-05f, -2.13374055278905e-04f, n);
  Step(p, t, -1.68282697438203e-03f, n);
  Step(p, t, -7.37332916720468e-03f, n);
  Step(p, t, -1.42647390514189e-02f, n);
  AscendC::Div(to, to, p, n);
  AscendC::Maxs(to, to, -1.0f, n);
  AscendC::Mins(to, to, 1.0f, n);
}
// The normal distribution's tail beyond a >= 0, as e^(-a^2 / 2) times a polynomial in 1 / (1 + 0.35 a).
__aicore__ inline void NormalTail(const Floats& to, const Floats& a, const Floats& t, uint32_t n) {
  Linear(t, a, 0.35f, 1.0f, n);
  NumberOver(t, 1.0f, t, to, n);
  Linear(to, t, -0.0291459318f, 0.143971711f, n);
  Step(to, t, -0.255714267f, n);
  Step(to, t, 0.159174174f, n);
  Step(to, t, -0.0231098365f, n);
  Step(to, t, 0.105508f, n);
  Step(to, t, 0.119832866f, n);
  Step(to, t, 0.139861867f, n);
  Step(to, t, 0.139621407f, n);
  AscendC::Mul(to, to, t, n);
  AscendC::Mul(t, a, a, n);
  AscendC::Muls(t, t, -0.5f, n);
  AscendC::Exp(t, t, n);
  AscendC::Mul(to, to, t, n);
}
// relu(x) - |x| tail(|x|): no difference of near numbers.
__aicore__ inline void Gelu(const Floats& to, const Floats& x, const Floats& a, const Floats& tail,
                            const Floats& t, uint32_t n) {
  AscendC::Abs(a, x, n);
  NormalTail(tail, a, t, n);
  AscendC::Mul(tail, tail, a, n);
  AscendC::Relu(to, x, n);
  AscendC::Sub(to, to, tail, n);
}
// x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
__aicore__ inline void GeluTanh(const Floats& to, const Floats& x, const Floats& t, uint32_t n) {
  AscendC::Mul(t, x, x, n);
  Linear(t, t, 1.59576912f * 0.044715f, 1.59576912f, n);
  AscendC::Mul(t, t, x, n);
  OnePlusPower(t, t, n);
  AscendC::Div(to, x, t, n);
}
// What a value is after it was rounded to T.
template <class T>
__aicore__ inline void RoundedTo(const Floats& to, const Floats& x, const Floats& narrow, uint32_t n) {
  const auto rounded = narrow.template ReinterpretCast<T>();
  AscendC::Cast(rounded, x, RoundMode::CAST_RINT, n);
  AscendC::Cast(to, rounded, RoundMode::CAST_NONE, n);
}
// For each of n elements of a row: where the other of its pair lies, in bytes, and the sign that it has in a rotation. By
// vectors: the scalar pipe would take longer to write them than a core takes for a few rows.
__aicore__ inline void FindPartners(const AscendC::LocalTensor<int32_t>& partners, const Floats& signs,
                                    uint32_t size, bool halves, uint32_t n) {
  const auto index = signs.ReinterpretCast<int32_t>();
  AscendC::CreateVecIndex(index, 0, n);
  if (halves) {  // i + half, or i - half
    const int32_t half = int32_t(size / 2);
    AscendC::Adds(partners, index, 1 - half, n);
    AscendC::Maxs(partners, partners, 0, n);
    AscendC::Mins(partners, partners, 1, n);
    AscendC::Muls(partners, partners, -2 * half, n);
    AscendC::Adds(partners, partners, half, n);
    AscendC::Add(partners, partners, index, n);
  } else {  // i ^ 1 = 4 (i / 2) + 1 - i
    AscendC::ShiftRight(partners, index, 1, n);
    AscendC::Muls(partners, partners, 4, n);
    AscendC::Sub(partners, partners, index, n);
    AscendC::Adds(partners, partners, 1, n);
  }
  AscendC::Sub(index, index, partners, n);  // below 0 for the first of a pair, above for the second
  AscendC::Maxs(index, index, -1, n);
  AscendC::Mins(index, index, 1, n);
  AscendC::Cast(signs, index, RoundMode::CAST_NONE, n);
  AscendC::Mins(partners, partners, int32_t(size) - 1, n);  // behind the row anything that is there will do
  AscendC::Muls(partners, partners, int32_t(sizeof(float)), n);
}
// to = (-x2, x1) for the halves of each row, or for each pair of neighbors. Halves that begin at a data block are copied as
// they lie; other elements are gathered by a row of offsets, and multiplied by a row of signs.
template <bool kHalves>
class Rotation {
 public:
  __aicore__ inline void Init(TPipe& pipe, uint32_t size) {
    half_ = size / 2;
    signs_.Init(pipe, RoundedUp(size, kBlock));
    pipe.InitBuffer(offsets_, RoundedUp(size, kBlock) * sizeof(uint32_t));
    if (!Aligned()) FindPartners(offsets_.Get<int32_t>(), signs_.Get(), size, kHalves, size);
  }
  __aicore__ inline void operator()(const Floats& to, const Floats& x, const Tile& tile) {
    if (Aligned()) {
      const UnaryRepeatParams down(1, 1, tile.width / kBlock, tile.width / kBlock);
      for (uint32_t at = 0; at < half_; at += kLanes) {
        const uint32_t lanes = Smaller(kLanes, half_ - at);
        AscendC::Muls(to[at], x[half_ + at], -1.0f, lanes, tile.rows, down);
        AscendC::Adds(to[half_ + at], x[at], 0.0f, lanes, tile.rows, down);
      }
      return;
    }
    for (uint32_t r = 0; r < tile.rows; ++r) {
      AscendC::Gather(to[r * tile.width], x[r * tile.width], offsets_.Get<uint32_t>(), 0, tile.size);
    }
    Apply<Times>(to, Whole(to, tile), Columns(signs_.Get()), tile);
  }

 private:
  __aicore__ inline bool Aligned() const { return kHalves && half_ % kBlock == 0; }

  uint32_t half_ = 0;
  Values signs_;
  TBuf<AscendC::QuePosition::VECCALC> offsets_;
};

}  // namespace formula
