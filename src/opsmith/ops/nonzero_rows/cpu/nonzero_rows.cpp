// Which rows of a gradient are not zero: a loss that leaves tokens out gives them rows of zeros.
#include "nonzero_rows.h"

#include <cstring>

#include "parallel.h"
#include "rows.h"

namespace opsmith {
namespace {

constexpr int64_t kLook = 16;  // numbers looked at together: a cache line
constexpr int64_t kAhead = 8;  // rows

bool any(const float* p, int64_t n) {
  uint32_t bits = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t one;
    std::memcpy(&one, p + i, sizeof one);
    bits |= one;
  }
  return bits << 1 != 0;  // -0.0 is zero
}

}  // namespace

void nonzero_rows(const View& x, const View& found) {
  const int64_t m = x.sizes[0], n = x.sizes[1], stride = x.strides[0];
  const float* const from = x.as<float>();
  int64_t* const count = found.as<int64_t>();
  int64_t* const rows = count + 1;
  int64_t doubtful = 0;
  for (int64_t r = 0; r < m; ++r) {  // of a dense gradient this is all
    if (r + kAhead < m) prefetch(from + (r + kAhead) * stride);
    rows[r] = any(from + r * stride, std::min(n, kLook));
    doubtful += rows[r] == 0;
  }
  if (doubtful > 0 && n > kLook) {
    parallel_for(m, row_grain(n, 1 << 17), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        for (int64_t i = kLook; i < n && rows[r] == 0; i += 4 * kLook) {
          rows[r] = any(from + r * stride + i, std::min(n - i, 4 * kLook));
        }
      }
    });
  }
  int64_t kept = 0;
  for (int64_t r = 0; r < m; ++r) {
    const bool live = rows[r] != 0;
    rows[kept] = r;
    kept += live;
  }
  if (kept == 0) rows[0] = 0;
  *count = kept;
}

}  // namespace opsmith
