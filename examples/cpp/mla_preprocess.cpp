// MLA pre-processing from a C++ program, without Python: create the operation, set up a call, execute it.
//
//   python examples/cpp/build.py            builds and runs this
//
// The program is linked with PyTorch's stable ABI alone, so one build of it serves every torch from 2.10 on. A library of
// opsmith's kernels offers them under the names that the schemas here define; which libraries there are says
// `opsmith doctor`, and `build.py` asks for the schemas.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "schemas.h"  // OPSMITH_MLA_PREPROCESS, by build.py

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

STABLE_TORCH_LIBRARY_FRAGMENT(opsmith, m) { m.def(OPSMITH_MLA_PREPROCESS); }

namespace {

using torch::stable::detail::from;

using Sizes = std::vector<int64_t>;

struct Params {
  int64_t heads, hidden, q_lora, kv_lora, nope, rope;
  double eps = 1e-6;
};

struct Weights {
  Tensor wdqkv, wuq,
      wuk;  // [kv_lora + rope + q_lora, hidden], [heads * (nope + rope), q_lora], [heads, nope, kv_lora]
  Tensor gamma0, gamma1, gamma2;  // [hidden], [q_lora], [kv_lora]
};

// One operation: its parameters and weights are given once, each call's tensors in `setup`, and `execute` runs it.
class MlaPreprocess {
 public:
  static MlaPreprocess create(const Params& params, Weights weights) {
    require(weights.wdqkv, {params.kv_lora + params.rope + params.q_lora, params.hidden}, "wdqkv");
    require(weights.wuq, {params.heads * (params.nope + params.rope), params.q_lora}, "wuq");
    require(weights.wuk, {params.heads, params.nope, params.kv_lora}, "wuk");
    return {params, std::move(weights)};
  }

  // x is [tokens, hidden], cos and sin are [tokens, rope]; slots say where in the cache each token goes, -1 for nowhere.
  void setup(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& slots, const Tensor& latent,
             const Tensor& rope) {
    const int64_t tokens = x.size(0);
    require(x, {tokens, params_.hidden}, "x");
    require(cos, {tokens, params_.rope}, "cos");
    require(sin, {tokens, params_.rope}, "sin");
    require(slots, {tokens}, "slots");
    require(latent, {latent.size(0), latent.size(1), 1, params_.kv_lora}, "latent");
    require(rope, {latent.size(0), latent.size(1), 1, params_.rope}, "rope");
    q_out = torch::stable::empty(Sizes{tokens, params_.heads, params_.kv_lora}, ScalarType::Float);
    q_rope = torch::stable::empty(Sizes{tokens, params_.heads, params_.rope}, ScalarType::Float);
    call_.assign({x, cos, sin, slots, latent, rope});
  }

  // As often as one likes; what the kernel refuses is thrown, with its reason.
  void execute() const {
    if (call_.empty()) throw std::logic_error("mla_preprocess: call setup before execute");
    const std::optional<Tensor> none;
    const auto some = [](const Tensor& t) { return from(std::optional<Tensor>(t)); };
    const auto& [wdqkv, wuq, wuk, gamma0, gamma1, gamma2] = weights_;
    std::vector<StableIValue> stack{from(call_[0]), from(wdqkv),  from(wuq),   from(wuk),
                                    some(gamma0),   some(gamma1), from(gamma2)};
    for (int absent = 0; absent < 10; ++absent)
      stack.push_back(from(none));  // betas, biases, what int8 weights have
    for (StableIValue given : {some(call_[1]), some(call_[2]), from(call_[3]), from(int64_t(0)), from(false),
                               from(false), from(params_.eps), from(none), from(none), from(*q_out),
                               some(*q_rope), from(call_[4]), some(call_[5]), from(none)})
      stack.push_back(given);
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("opsmith::mla_preprocess", "", stack.data(), TORCH_ABI_VERSION));
  }

  std::optional<Tensor> q_out, q_rope;  // [tokens, heads, kv_lora], [tokens, heads, rope]

 private:
  MlaPreprocess(const Params& params, Weights weights) : params_(params), weights_(std::move(weights)) {}

  static void require(const Tensor& t, const Sizes& sizes, const char* name) {
    if (t.dim() == int64_t(sizes.size()) && std::equal(sizes.begin(), sizes.end(), t.sizes().begin())) return;
    std::string wanted;
    for (int64_t size : sizes) wanted += (wanted.empty() ? "[" : ", ") + std::to_string(size);
    throw std::invalid_argument(std::string("mla_preprocess: ") + name + " must have shape " + wanted + "]");
  }

  Params params_;
  Weights weights_;
  std::vector<Tensor> call_;  // x, cos, sin, slots, latent, rope
};

// The formula, number by number in double: what the kernel's results are held to.
struct Reference {
  const Params& p;
  const Weights& w;

  static const float* data(const Tensor& t) { return static_cast<const float*>(t.data_ptr()); }

  std::vector<double> norm(std::vector<double> x, const Tensor& gamma) const {
    double sum = 0;
    for (double v : x) sum += v * v;
    const double scale = 1 / std::sqrt(sum / double(x.size()) + p.eps);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= scale * data(gamma)[i];
    return x;
  }
  static std::vector<double> product(const float* w, int64_t rows, const std::vector<double>& x) {
    std::vector<double> y(rows);
    for (int64_t r = 0; r < rows; ++r)
      for (size_t i = 0; i < x.size(); ++i) y[r] += w[r * int64_t(x.size()) + int64_t(i)] * x[i];
    return y;
  }
  static std::vector<double> rotated(const double* x, const float* cos, const float* sin, int64_t n) {
    std::vector<double> y(n);
    for (int64_t i = 0, half = n / 2; i < half; ++i) {
      y[i] = x[i] * cos[i] - x[i + half] * sin[i];
      y[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
    }
    return y;
  }

  // The largest difference of one token's four results from these.
  double error(const float* x, const float* cos, const float* sin, const float* q_out, const float* q_rope,
               const float* latent, const float* rope) const {
    double worst = 0;
    const auto hold = [&](const std::vector<double>& exact, const float* got) {
      for (size_t i = 0; i < exact.size(); ++i) worst = std::max(worst, std::abs(exact[i] - got[i]));
    };
    const int64_t keys = p.kv_lora + p.rope;
    const std::vector<double> a = product(data(w.wdqkv), keys + p.q_lora, norm({x, x + p.hidden}, w.gamma0));
    hold(norm({a.begin(), a.begin() + p.kv_lora}, w.gamma2), latent);
    hold(rotated(a.data() + p.kv_lora, cos, sin, p.rope), rope);
    const std::vector<double> q = product(data(w.wuq), p.heads * (p.nope + p.rope),
                                          norm({a.begin() + keys, a.end()}, w.gamma1));
    for (int64_t h = 0; h < p.heads; ++h) {
      const double* const head = q.data() + h * (p.nope + p.rope);
      hold(rotated(head + p.nope, cos, sin, p.rope), q_rope + h * p.rope);
      std::vector<double> absorbed(p.kv_lora);
      for (int64_t n = 0; n < p.nope; ++n)
        for (int64_t k = 0; k < p.kv_lora; ++k)
          absorbed[k] += head[n] * data(w.wuk)[(h * p.nope + n) * p.kv_lora + k];
      hold(absorbed, q_out + h * p.kv_lora);
    }
    return worst;
  }
};

Tensor random(const Sizes& sizes, double low, double high, std::mt19937& engine) {
  Tensor t = torch::stable::empty(sizes, ScalarType::Float);
  std::uniform_real_distribution<float> numbers{float(low), float(high)};
  for (int64_t i = 0; i < t.numel(); ++i) static_cast<float*>(t.data_ptr())[i] = numbers(engine);
  return t;
}

int run(const char* library) {
  if (dlopen(library, RTLD_NOW) == nullptr) throw std::runtime_error(dlerror());
  std::mt19937 engine{0};
  const Params p{.heads = 4, .hidden = 256, .q_lora = 96, .kv_lora = 64, .nope = 32, .rope = 16};
  const int64_t tokens = 4, blocks = 2, block_size = 8;
  const auto weight = [&](const Sizes& sizes) {
    const double bound = std::sqrt(3.0 / double(sizes.back()));
    return random(sizes, -bound, bound, engine);
  };
  const Weights w{weight({p.kv_lora + p.rope + p.q_lora, p.hidden}),
                  weight({p.heads * (p.nope + p.rope), p.q_lora}),
                  weight({p.heads, p.nope, p.kv_lora}),
                  random({p.hidden}, 0.5, 1.5, engine),
                  random({p.q_lora}, 0.5, 1.5, engine),
                  random({p.kv_lora}, 0.5, 1.5, engine)};
  MlaPreprocess operation = MlaPreprocess::create(p, w);

  const Tensor x = random({tokens, p.hidden}, -1, 1, engine);
  const Tensor cos = random({tokens, p.rope}, -1, 1, engine), sin = random({tokens, p.rope}, -1, 1, engine);
  Tensor latent = torch::stable::full(Sizes{blocks, block_size, 1, p.kv_lora}, 0.0, ScalarType::Float);
  Tensor rope = torch::stable::full(Sizes{blocks, block_size, 1, p.rope}, 0.0, ScalarType::Float);
  Tensor slots = torch::stable::empty(Sizes{tokens}, ScalarType::Long);
  const std::array<int64_t, 4> places{3, 11, 0, 15};
  std::copy(places.begin(), places.end(), static_cast<int64_t*>(slots.data_ptr()));
  operation.setup(x, cos, sin, slots, latent, rope);
  operation.execute();

  const Reference reference{p, w};
  double worst = 0;
  const auto row = [](const Tensor& t, int64_t i, int64_t n) { return Reference::data(t) + i * n; };
  for (int64_t t = 0; t < tokens; ++t)
    worst = std::max(worst, reference.error(row(x, t, p.hidden), row(cos, t, p.rope), row(sin, t, p.rope),
                                            row(*operation.q_out, t, p.heads * p.kv_lora),
                                            row(*operation.q_rope, t, p.heads * p.rope),
                                            row(latent, places[t], p.kv_lora), row(rope, places[t], p.rope)));
  std::printf("%lld tokens, %lld heads: largest error against double %.2e\n", (long long)tokens,
              (long long)p.heads, worst);
  return worst < 1e-4 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: %s LIBRARY, of opsmith's mla kernels\n", argv[0]), 2;
  try {
    return run(argv[1]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
