// Experts for a few tokens each, as in decoding: bound by their weights' way from memory, which are read once and in order.
//
// Threads share the rows of all experts together, in two parallel loops: first gate and up of the same hidden numbers, with the
// activation behind their sums; then each a piece of the result, of all experts in turn, so that sums meet in one order.
#include "linear/linear_dots.h"
#include "linear/kept.h"
#include "middle.h"
#include "schedules/shares.h"

namespace opsmith {
namespace {

constexpr int64_t kHidden = kLinearPanel / 2;  // numbers whose gates and ups are summed together
constexpr int64_t kOut = 16;  // numbers of the result in a piece
constexpr int64_t kWork = 1 << 17;  // products that are worth a thread

template <class T>
void run(const View& x, const Experts& all, const Visits& visits, const std::vector<Group>& groups,
         float* sums) {
  const int64_t d = x.sizes[1], hidden = all.down.sizes[2], blocks = (hidden + kHidden - 1) / kHidden;
  const int64_t visited = int64_t(visits.token.size());
  const Middle middle(all);
  const Kept<2> memory(visited * (d + hidden) * int64_t(sizeof(float)));
  float *const rows = memory.as<float>(), *const acted = rows + visited * d;
  int64_t most = 1;
  for (const Group& g : groups) {
    most = std::max(most, g.count);
    for (int64_t r = g.first; r < g.first + g.count; ++r) {
      const T* from = x.as<T>() + visits.token[size_t(r)] * x.strides[0];
      for_lanes(d, [&](int64_t i, auto lanes) { store(rows + r * d + i, load(from + i, lanes), lanes); });
    }
  }
  const auto grain = [&](int64_t products) {
    return std::max<int64_t>(1, kWork / std::max<int64_t>(1, most * products));
  };
  parallel_shares(int64_t(groups.size()) * blocks, grain(2 * kHidden * d), [&](int64_t begin, int64_t end) {
    float block[few::kMost * kLinearPanel];
    for (int64_t task = begin; task < end; ++task) {
      const Group& g = groups[size_t(task / blocks)];
      const int64_t first = task % blocks * kHidden, some = std::min(kHidden, hidden - first);
      const int64_t stride = all.gate_up.strides[1];
      const T* const weight = all.gate_up.as<T>() + g.expert * all.gate_up.strides[0];
      const T* const bias = bias_of<T>(all.gate_up_bias, g.expert);
      for (int64_t r = g.first; r < g.first + g.count; r += few::kMost) {
        const int64_t count = std::min<int64_t>(few::kMost, g.first + g.count - r);
        // Gate and up of as many hidden numbers: two runs of rows, or one in which they take turns.
        const int64_t runs = middle.interleaved() ? 1 : 2, width = 2 * some / runs;
        for (int64_t run = 0; run < runs; ++run) {
          const int64_t row = (2 / runs) * first + run * hidden;
          float* const to = block + run * kHidden;
          few::panel(count, weight + row * stride, stride, width, rows + r * d, d, d, to);
          for (int64_t i = 0; bias && i < count; ++i) add_bias(to + i * kLinearPanel, bias + row, width);
        }
        for (int64_t i = 0; i < count; ++i)
          middle(block + i * kLinearPanel, kHidden, some, acted + (r + i) * hidden + first);
      }
    }
  });
  const int64_t grain_of_out = grain(kOut * hidden * int64_t(groups.size()));
  parallel_shares((d + kOut - 1) / kOut, grain_of_out, [&](int64_t begin, int64_t end) {
    float block[few::kMost * kLinearPanel];
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task * kOut, some = std::min(kOut, d - first), stride = all.down.strides[1];
      for (const Group& g : groups) {
        const T* const weight = all.down.as<T>() + g.expert * all.down.strides[0] + first * stride;
        const T* const bias = bias_of<T>(all.down_bias, g.expert);
        for (int64_t r = g.first; r < g.first + g.count; r += few::kMost) {
          const int64_t count = std::min<int64_t>(few::kMost, g.first + g.count - r);
          few::panel(count, weight, stride, some, acted + r * hidden, hidden, hidden, block);
          for (int64_t i = 0; i < count; ++i) {
            float* const from = block + i * kLinearPanel;
            add_bias(from, bias ? bias + first : nullptr, some);
            float* const to = sums + visits.token[size_t(r + i)] * d + first;
            const Vec by = splat(visits.weight[size_t(r + i)]);
            for_lanes(some, [&](int64_t c, auto lanes) {
              store(to + c, fma(by, load(from + c, lanes), load(to + c, lanes)), lanes);
            });
          }
        }
      }
    }
  });
}

}  // namespace

void experts_of_few(const View& x, const Experts& all, const Visits& visits, const std::vector<Group>& groups,
                    float* sums) {
  with_float_type(x.dtype,
                  [&](auto* t) { run<std::remove_pointer_t<decltype(t)>>(x, all, visits, groups, sums); });
}

}  // namespace opsmith
