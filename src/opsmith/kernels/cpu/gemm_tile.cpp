// The products in registers and the transposition that attention, latent attention and gradients share.
#include "gemm_tile.h"

namespace opsmith {

template <class Units, int M, int N>
__attribute__((noinline)) void product_in_registers(int64_t depth, Operand a, const float* b, int64_t ldb,
                                                    float* c, int64_t ldc, bool add) {
  using Sum = typename Units::Sum;
  Sum sum[M][N];
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
    for (int n = 0; n < N; ++n) sum[r][n] = Sum{};
  }
  const float* row[M];
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) row[r] = a.data + r * a.row_stride;
  for (int64_t k = 0, at = 0; k < depth; ++k, at += a.step) {
    Sum column[N];
    for (int n = 0; n < N; ++n) column[n] = __builtin_convertvector(load(b + k * ldb + n * W), Sum);
    for (int r = 0; r < M; ++r) {
      const Sum x = __builtin_convertvector(Units::broadcast(row[r] + at), Sum);
      for (int n = 0; n < N; ++n) sum[r][n] = Units::mac(x, column[n], sum[r][n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < M; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      float* p = c + r * ldc + n * W;
      store(p, add ? load(p) + __builtin_convertvector(sum[r][n], Vec)
                   : __builtin_convertvector(sum[r][n], Vec));
    }
  }
}

template <class Units, int M>
inline void product_columns(int vecs, int64_t depth, Operand a, const float* b, int64_t ldb, float* c,
                            int64_t ldc, bool add) {
  switch (vecs) {
    case 1: return product_in_registers<Units, M, 1>(depth, a, b, ldb, c, ldc, add);
    case 2: return product_in_registers<Units, M, 2>(depth, a, b, ldb, c, ldc, add);
    case 3: return product_in_registers<Units, M, std::min(3, VECS)>(depth, a, b, ldb, c, ldc, add);
    default: return product_in_registers<Units, M, VECS>(depth, a, b, ldb, c, ldc, add);
  }
}

template <class Units>
void product(int m, int64_t vecs, int64_t depth, Operand a, const float* b, int64_t ldb, int64_t panel_stride,
             float* c, int64_t ldc, bool add) {
  while (depth > Units::chain) {  // one long chain of additions would lose accuracy
    product<Units>(m, vecs, Units::chain, a, b, ldb, panel_stride, c, ldc, add);
    a.data += Units::chain * a.step;
    b += Units::chain * ldb;
    depth -= Units::chain;
    add = true;
  }
  for (int64_t v = 0; v < vecs; v += VECS, b += panel_stride, c += PANEL) {
    const int n = int(std::min<int64_t>(VECS, vecs - v));
    switch (padded_rows(m)) {
      case 1: product_columns<Units, 1>(n, depth, a, b, ldb, c, ldc, add); break;
      case 2: product_columns<Units, 2>(n, depth, a, b, ldb, c, ldc, add); break;
      case 4: product_columns<Units, 4>(n, depth, a, b, ldb, c, ldc, add); break;
      default: product_columns<Units, ROWS>(n, depth, a, b, ldb, c, ldc, add);
    }
  }
}

template <class Units, class T>
void pack_transposed(const T* from, int64_t stride, int64_t rows, int64_t n, float* to) {
  const int64_t depth = ceil_div(n, Units::per_unit);
  for (int64_t j = 0; j < rows; j += W) {
    float* panel = to + j / PANEL * depth * PANEL + j % PANEL;
    const int count = int(std::min<int64_t>(W, rows - j));
    for (int64_t k = 0; k < depth; k += W) {
      Vec unit[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; ++i) {
        unit[i] = i < count ? load_units<Units>(from + (j + i) * stride, k * Units::per_unit, n) : Vec{};
      }
      transpose(unit);
      float* p = panel + k * PANEL;
      if (depth - k >= W) {
        for (int i = 0; i < W; ++i) store(p + i * PANEL, unit[i]);
      } else {
        for (int i = 0; i < depth - k; ++i) store(p + i * PANEL, unit[i]);
      }
    }
  }
}

template void product_in_registers<FloatUnits, ROWS, VECS>(int64_t, Operand, const float*, int64_t, float*,
                                                           int64_t, bool);
template void product<FloatUnits>(int, int64_t, int64_t, Operand, const float*, int64_t, int64_t, float*,
                                  int64_t, bool);
template void pack_transposed<FloatUnits>(const float*, int64_t, int64_t, int64_t, float*);
template void pack_transposed<FloatUnits>(const float16*, int64_t, int64_t, int64_t, float*);
#if defined(OPSMITH_AVX512) && defined(__AVX512BF16__)
template void product<BFloatUnits>(int, int64_t, int64_t, Operand, const float*, int64_t, int64_t, float*,
                                   int64_t, bool);
template void pack_transposed<BFloatUnits>(const bfloat16*, int64_t, int64_t, int64_t, float*);
#else
template void pack_transposed<FloatUnits>(const bfloat16*, int64_t, int64_t, int64_t, float*);
#endif

}  // namespace opsmith
