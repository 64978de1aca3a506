// Experts: tokens are sorted by expert, each expert multiplies its own, and every token adds up what they gave in order of ids.
#include "experts.h"

#include "linear/linear_columns.h"
#include "linear/linear_product.h"
#include "middle.h"

namespace opsmith {
namespace {

// Tokens of an expert up to which its weights are not worth packing, whose rows or whose columns are contiguous.
constexpr int64_t kFew = 16, kFewByColumns = 8;
constexpr int64_t kTogether = 1 << 23;  // numbers in the rows of experts that share their loops: memory kept
constexpr int64_t kWork = 1 << 17;  // products that are worth a thread

template <class Id>
Visits sorted(const View& ids, const View& weights, int64_t experts) {
  const int64_t tokens = ids.sizes[0], each = ids.sizes[1];
  std::vector<int64_t> ends(size_t(experts), 0), place(size_t(tokens * each), 0);
  const auto id = [&](int64_t at) { return int64_t(ids.as<Id>()[at / each * ids.strides[0] + at % each]); };
  for (int64_t at = 0; at < tokens * each; ++at) ++ends[size_t(id(at))];
  int64_t end = 0;
  for (int64_t& e : ends) e = end += e;
  for (int64_t at = tokens * each - 1; at >= 0; --at) place[size_t(--ends[size_t(id(at))])] = at;
  Visits found;
  found.token.reserve(place.size());
  found.weight.reserve(place.size());
  with_float_type(weights.dtype, [&]<class T>(T*) {
    const T* numbers = weights.as<T>();
    for (int64_t at : place) {
      const int64_t expert = id(at), token = at / each;
      const float weight = to_float(numbers[token * weights.strides[0] + at % each]);
      const bool goes_on = !found.groups.empty() && found.groups.back().expert == expert;
      if (goes_on && found.token.back() == token) {  // the same expert twice, which need not compute twice
        found.weight.back() += weight;
        continue;
      }
      if (!goes_on) found.groups.push_back({expert, int64_t(found.token.size()), 0});
      ++found.groups.back().count;
      found.token.push_back(token);
      found.weight.push_back(weight);
    }
  });
  return found;
}

// The epilogue of a product: sums as they are.
struct Store {
  float* to;
  int64_t stride;

  void expect(int64_t, int, int64_t, int64_t) const {}
  void operator()(int64_t row, int rows, int64_t column, int64_t width, const float* sums, int64_t) const {
    for (int r = 0; r < rows; ++r, sums += kPanel) std::copy_n(sums, width, to + (row + r) * stride + column);
  }
};

// An expert's part of what has all experts in front.
View of_expert(const View& all, int64_t expert) {
  if (!all.defined()) return {};
  const int64_t size = all.dtype == DType::f32 ? 4 : all.dtype == DType::i8 ? 1 : 2;
  return {all.as<char>() + expert * all.strides[0] * size, all.dtype, all.dim - 1, all.sizes + 1,
          all.strides + 1};
}

// The rows of some experts, group after group, by a weight of each: to [rows, n].
template <class T>
void multiply(T* rows, DType dtype, int64_t stride, int64_t k, const Weights& weights,
              const std::vector<Group>& groups, float* to, int64_t n) {
  struct Sizes {
    int64_t x[2], y[2];
  };
  const int64_t x_strides[2] = {stride, 1}, y_strides[2] = {n, 1};
  std::vector<Sizes> sizes(groups.size());
  std::vector<PackedProduct> packed;
  std::vector<few::Rows<T>> streamed;
  const bool by_rows = weights.plain.dim == 3 && (weights.plain.strides[2] == 1 || k < 2);
  for (size_t i = 0; i < groups.size(); rows += groups[i].count * stride, to += groups[i].count * n, ++i) {
    const Group& g = groups[i];
    sizes[i] = {{g.count, k}, {g.count, n}};
    const View x{rows, dtype, 2, sizes[i].x, x_strides}, plain = of_expert(weights.plain, g.expert);
    if (!plain.defined()) {
      QuantizedWeight one = weights.packed;
      for (View* part : {&one.weight, &one.scale, &one.zero, &one.outer}) *part = of_expert(*part, g.expert);
      packed.push_back({x, one, {}, {to, DType::f32, 2, sizes[i].y, y_strides}});
    } else if (plain.dim == 2 && g.count <= (by_rows ? kFew : kFewByColumns)) {
      streamed.push_back({rows, plain.as<T>(), g.count, to});
    } else if (plain.dim == 2) {
      plain_product<T>(x, plain, Store{to, n});
    } else if (dtype == DType::bf16) {
      packed_product<T>(x, plain, 1, Store{to, n});
    } else {
      packed_product<T, WideBFloatFormat>(x, plain, 1, Store{to, n});
    }
  }
  packed_linear(std::move(packed), weights.dynamic);
  if (streamed.empty()) return;
  const int64_t some = int64_t(streamed.size()), apart = weights.plain.strides[by_rows ? 1 : 2];
  if (by_rows) {
    few::products(streamed.data(), some, stride, apart, n, k, row_grain(k * kPanel, kWork),
                  [&](const auto& one, int64_t row, int some, int64_t column, int64_t width,
                      const float* sums) { Store{one.to, n}(row, some, column, width, sums, 0); });
  } else {
    columns::products(streamed.data(), some, stride, apart, n, k, row_grain(k * columns::kWidth, kWork));
  }
}

// Some experts, whose visits follow each other: both products, each in one loop if they read their weights once.
template <class T>
void experts_together(const View& x, const Experts& all, const Visits& visits,
                      const std::vector<Group>& groups, float* sums) {
  const int64_t d = x.sizes[1], hidden = all.hidden, before = groups[0].first;
  const int64_t count = groups.back().first + groups.back().count - before;
  // Rows a line further apart than they are long: apart by pages, they would push each other out of the nearest cache.
  constexpr int64_t line = 64 / int64_t(sizeof(T));
  const int64_t in = d + line, mid = hidden + line, wide = std::max(d, 2 * hidden);
  const Kept<1> memory(count * (wide * int64_t(sizeof(float)) + (in + mid) * int64_t(sizeof(T))));
  float* const between = memory.as<float>();
  T *const rows = reinterpret_cast<T*>(between + count * wide), *const acted = rows + count * in;
  const int64_t* const token = visits.token.data() + before;
  const float* const weight = visits.weight.data() + before;
  const Middle middle(all);
  parallel_for(count, row_grain(d, 16384), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) std::copy_n(x.as<T>() + token[r] * x.strides[0], d, rows + r * in);
  });
  multiply(rows, x.dtype, in, d, all.gate_up, groups, between, 2 * hidden);
  for (const Group& g : groups) {
    parallel_for(g.count, row_grain(hidden, 4096), [&](int64_t begin, int64_t end) {
      for (int64_t r = g.first - before + begin; r < g.first - before + end; ++r) {
        float* const row = between + r * 2 * hidden;
        add_bias(row, of_expert(all.gate_up_bias, g.expert).as<T>(), 2 * hidden);
        middle(row, hidden, hidden, acted + r * mid);
      }
    });
  }
  multiply(acted, x.dtype, mid, hidden, all.down, groups, between, d);
  // Each number of a token's sum meets its experts in their order.
  parallel_for(ceil_div(d, kPanel), row_grain(count * kPanel, 16384), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kPanel, width = std::min(d, end * kPanel) - first;
    for (const Group& g : groups) {
      const T* const bias = of_expert(all.down_bias, g.expert).as<T>();
      for (int64_t r = g.first - before; r < g.first - before + g.count; ++r) {
        float *const from = between + r * d + first, *const to = sums + token[r] * d + first;
        add_bias(from, bias ? bias + first : nullptr, width);
        for_lanes(width, [&](int64_t c, auto lanes) {
          store(to + c, fma(splat(weight[r]), load(from + c, lanes), load(to + c, lanes)), lanes);
        });
      }
    }
  });
}

}  // namespace

void experts(const View& x, const Experts& all, const View& ids, const View& weights, const View& y) {
  const int64_t tokens = x.sizes[0], d = x.sizes[1];
  if (tokens == 0 || d == 0) return;
  Visits visits;
  with_id_type(ids.dtype, [&]<class Id>(Id*) { visits = sorted<Id>(ids, weights, all.count); });
  const Kept<3> memory(tokens * d * int64_t(sizeof(float)));
  float* const sums = memory.as<float>();
  std::fill_n(sums, tokens * d, 0.0f);
  std::vector<std::vector<Group>> together;
  for (const Group& g : visits.groups) {
    const bool full = together.empty() ||
                      (g.first + g.count - together.back()[0].first) * (2 * d + 3 * all.hidden) > kTogether;
    if (full) together.emplace_back();
    together.back().push_back(g);
  }
  with_float_type(x.dtype, [&]<class T>(T*) {
    for (const std::vector<Group>& groups : together) experts_together<T>(x, all, visits, groups, sums);
    parallel_for(tokens, row_grain(d, 16384), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* const to = y.as<T>() + r * y.strides[0];
        for_lanes(d, [&](int64_t i, auto lanes) { store(to + i, load(sums + r * d + i, lanes), lanes); });
      }
    });
  });
}

}  // namespace opsmith
