// Experts: tokens are sorted by expert, each expert multiplies its own, and every token adds up what its experts gave, in the
// order of their ids.
#include "experts.h"

#include "linear/linear_product.h"
#include "middle.h"

namespace opsmith {
namespace {

constexpr int64_t kFew = 16;  // tokens of an expert up to which its weights are not worth packing

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
  with_float_type(weights.dtype, [&](auto* t) {
    const auto* numbers = weights.as<std::remove_pointer_t<decltype(t)>>();
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

// The epilogue of the first product: sums as they are, and a bias.
template <class T>
struct Store {
  float* to;
  int64_t stride;
  const T* bias;

  void expect(int64_t, int, int64_t, int64_t) const {}
  void operator()(int64_t row, int rows, int64_t column, int64_t width, const float* sums, int64_t) const {
    for (int r = 0; r < rows; ++r, sums += kPanel) {
      float* const at = to + (row + r) * stride + column;
      std::copy_n(sums, width, at);
      add_bias(at, bias ? bias + column : nullptr, width);
    }
  }
};

// That of the second: each row is added to its token's, of which an expert has none twice.
template <class T>
struct Add {
  float* to;
  int64_t stride;
  const T* bias;
  const int64_t* token;
  const float* weight;

  void expect(int64_t, int, int64_t, int64_t) const {}
  void operator()(int64_t row, int rows, int64_t column, int64_t width, const float* sums, int64_t) const {
    for (int r = 0; r < rows; ++r, sums += kPanel) {
      float* const at = to + token[row + r] * stride + column;
      const Vec by = splat(weight[row + r]);
      for_lanes(width, [&](int64_t c, auto lanes) {
        Vec v = load(sums + c);
        if (bias) v += load(bias + column + c, lanes);
        store(at + c, fma(by, v, load(at + c, lanes)), lanes);
      });
    }
  }
};

// An expert's matrix.
View matrix(const View& all, int64_t expert) {
  View one = all;
  const int64_t size = all.dtype == DType::f32 ? 4 : 2;
  one.data = all.as<char>() + expert * all.strides[0] * size;
  one.dim = 2, one.sizes = all.sizes + 1, one.strides = all.strides + 1;
  return one;
}

// One expert for many tokens: both products as the linear layer's.
template <class T>
void expert_of_many(const View& x, const Experts& all, const Visits& visits, const Group& g, float* sums) {
  const int64_t d = x.sizes[1], hidden = all.down.sizes[2];
  // Rows a line further apart than they are long: apart by pages, they would push each other out of the nearest cache.
  constexpr int64_t line = 64 / int64_t(sizeof(T));
  const int64_t in = d + line, mid = hidden + line;
  const Kept<1> memory(g.count * (2 * hidden * int64_t(sizeof(float)) + (in + mid) * int64_t(sizeof(T))));
  float* const between = memory.as<float>();
  T *const rows = reinterpret_cast<T*>(between + g.count * 2 * hidden), *const acted = rows + g.count * in;
  const int64_t* const token = visits.token.data() + g.first;
  const Middle middle(all);
  parallel_for(g.count, row_grain(d, 16384), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) std::copy_n(x.as<T>() + token[r] * x.strides[0], d, rows + r * in);
  });
  const int64_t in_sizes[2] = {g.count, d}, in_strides[2] = {in, 1};
  const int64_t mid_sizes[2] = {g.count, hidden}, mid_strides[2] = {mid, 1};
  plain_product<T>(View{rows, x.dtype, 2, in_sizes, in_strides}, matrix(all.gate_up, g.expert),
                   Store<T>{between, 2 * hidden, bias_of<T>(all.gate_up_bias, g.expert)});
  parallel_for(g.count, row_grain(hidden, 4096), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) middle(between + r * 2 * hidden, hidden, hidden, acted + r * mid);
  });
  plain_product<T>(
      View{acted, x.dtype, 2, mid_sizes, mid_strides}, matrix(all.down, g.expert),
      Add<T>{sums, d, bias_of<T>(all.down_bias, g.expert), token, visits.weight.data() + g.first});
}

}  // namespace

void experts(const View& x, const Experts& all, const View& ids, const View& weights, const View& y) {
  const int64_t tokens = x.sizes[0], d = x.sizes[1];
  if (tokens == 0 || d == 0) return;
  Visits visits;
  with_id_type(ids.dtype, [&](auto* t) {
    visits = sorted<std::remove_pointer_t<decltype(t)>>(ids, weights, all.down.sizes[0]);
  });
  const Kept<3> memory(tokens * d * int64_t(sizeof(float)));
  float* const sums = memory.as<float>();
  std::fill_n(sums, tokens * d, 0.0f);
  const bool rows_lie = (all.gate_up.strides[2] == 1 || d == 1) &&
                        (all.down.strides[2] == 1 || all.down.sizes[2] <= 1);
  std::vector<Group> few, many;
  for (const Group& g : visits.groups) (rows_lie && g.count <= kFew ? few : many).push_back(g);
  if (!few.empty()) experts_of_few(x, all, visits, few, sums);
  with_float_type(x.dtype, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    for (const Group& g : many) expert_of_many<T>(x, all, visits, g, sums);
    parallel_for(tokens, row_grain(d, 16384), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* const to = y.as<T>() + r * y.strides[0];
        for_lanes(d, [&](int64_t i, auto lanes) { store(to + i, load(sums + r * d + i, lanes), lanes); });
      }
    });
  });
}

}  // namespace opsmith
