// Autograd's nodes for kernels that have a backward: in C++ they cost a call of one row a few microseconds, as a Function in Python 20.
//
// One class serves all kernels. What it keeps and hands on is read from the signature, in nodes.py, and comes as a plan. PyTorch promises
// nothing about nodes in C++, so this library is for the one version it was built with, as binding_direct.cpp is.
#include "direct.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace opsmith;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// Where an argument of the backward comes from; `of` is an argument of the forward.
enum class From : char {
  gradient = 'g',  // of the result `of`
  saved = 's',  // the tensor `of`, or `instead` where that is not there
  number = 'n',  // `of`
  constant = 'c',
  made = 'm',  // a gradient like `of`, where it is wanted
  always = 'a',  // the same, made wherever `of` is there
};

struct Argument {
  From from;
  char type;
  int of, instead;
  Value constant;
};

struct Gradient {
  int of;  // an input of the forward
  int argument;  // of the backward, which is its gradient
};

// A result that nobody but the backward reads, float32: r for each row, p a pair of such vectors, e two in each row.
struct Kept {
  int place;
  char shape;
};

// A number that the forward must have been given.
struct Required {
  int place;
  Value value;
};

struct Plan {
  c10::OperatorHandle op;
  Direct direct;
  std::string name, types;  // a letter for each argument
  std::vector<Argument> arguments;
  std::vector<Gradient> gradients;
  std::vector<Kept> kept;
  std::vector<Required> required;
  bool strided;  // whether the backward takes any tensor whose last dimension is contiguous
};

// What a node keeps for an argument, beside saved tensors: a number, or which gradient arrives for it; and which of `likes` it is like.
struct Held {
  Value number = 0;
  bool there = false;
  int like = -1;
};

// Of all arguments. A node stays below 1 KB: for larger pieces of memory glibc first puts all small ones that are free in order.
struct AllHeld {
  c10::SmallVector<Held, 12> arguments;
  c10::SmallVector<Layout, 2> likes;

  void like(Held& held, const c10::TensorImpl* t, bool strided) {
    held.like = int(likes.size());
    likes.push_back({{t->sizes().begin(), t->sizes().end()},
                     strided && !t->is_contiguous() ? strides_like(t) : Strides{},
                     c10::typeMetaToScalarType(t->dtype())});
  }
};

Value value_of(const at::TensorBase& t) {
  return t.defined() ? reinterpret_cast<Value>(t.unsafeGetTensorImpl()) : 0;
}

at::Tensor tensor_of(Value value) {
  return value ? at::Tensor(Impl::reclaim_copy(impl_of(value))) : at::Tensor();
}

using Wanted = c10::SmallVector<bool, 6>;

// The same kernel through PyTorch, where somebody looks on: a mode, a profiler, a transform.
void dispatch(const Plan& plan, const Value* values) {
  torch::jit::Stack stack;
  for (size_t i = 0; i < plan.types.size(); ++i) {
    const char type = plan.types[i];
    if (is_tensor(type)) {
      stack.push_back(values[i] ? c10::IValue(tensor_of(values[i])) : c10::IValue());
    } else if (type == 'f') {
      double number;
      std::memcpy(&number, &values[i], sizeof(number));
      stack.emplace_back(number);
    } else if (type == 'i') {
      stack.emplace_back(int64_t(values[i]));
    } else {
      stack.emplace_back(values[i] != 0);
    }
  }
  plan.op.callBoxed(stack);
}

at::Tensor new_like(const Layout& like, bool direct) {
  at::TensorBase t;
  if (direct && fresh(like, t)) return at::Tensor(std::move(t));
  return like.strides.empty() ? at::empty(like.sizes, like.dtype)
                              : at::empty_strided(like.sizes, like.strides, like.dtype);
}

// A gradient as the backward takes it.
at::Tensor taken(const at::Tensor& t, bool strided) {
  return strided && (t.dim() == 0 || t.stride(-1) == 1) ? t : t.contiguous();
}

// Calls the backward. `saved` are the saved tensors that are there, in the order of its arguments; gradients that nobody wants are undefined.
variable_list backward(const Plan& plan, const AllHeld& held, const variable_list& saved,
                       const Wanted& wanted, const variable_list& arriving) {
  variable_list found(plan.gradients.size());
  const auto defined = [](const at::Tensor& t) { return t.defined(); };
  if (std::none_of(arriving.begin(), arriving.end(), defined)) return found;
  for (const at::Tensor& t : arriving) {  // undefined ones have none either
    TORCH_CHECK_NOT_IMPLEMENTED(!is_dual(t), plan.name,
                                ": a kernel has no rule for forward-mode differentiation");
  }
  const auto is_wanted = [&](size_t argument) {
    for (size_t g = 0; g < wanted.size(); ++g) {
      if (wanted[g] && plan.gradients[g].argument == int(argument)) return true;
    }
    return false;
  };
  const size_t count = plan.arguments.size();
  const bool direct = undisturbed();
  c10::SmallVector<at::Tensor, kMost> tensors(count);
  c10::SmallVector<Value, kMost> values(count, 0);
  auto next = saved.begin();
  for (size_t i = 0; i < count; ++i) {
    const Argument& a = plan.arguments[i];
    const Held& h = held.arguments[i];
    switch (a.from) {
      case From::constant: values[i] = a.constant; break;
      case From::number: values[i] = h.number; break;
      case From::saved:
        if (h.there) tensors[i] = *next++;
        break;
      case From::gradient:
        if (h.there && arriving[h.number].defined()) {
          tensors[i] = taken(arriving[h.number], plan.strided);
        } else if (!is_optional(a.type)) {
          tensors[i] = at::zeros(held.likes[h.like].sizes, held.likes[h.like].dtype);
        }
        break;
      case From::made:
      case From::always:
        if (h.there && (a.from == From::always || !is_optional(a.type) || is_wanted(i)))
          tensors[i] = new_like(held.likes[h.like], direct);
        break;
    }
  }
  bool plain = direct;
  for (size_t i = 0; i < count; ++i) {
    if (!tensors[i].defined()) continue;
    plain = plain && is_plain(tensors[i].unsafeGetTensorImpl());
    values[i] = value_of(tensors[i]);
  }
  if (plain) {
    lend(plan.direct, plan.types.data(), int(count), values.data());
  } else {
    dispatch(plan, values.data());
  }
  for (size_t g = 0; g < found.size(); ++g) {
    if (wanted[g]) found[g] = tensors[plan.gradients[g].argument];
  }
  return found;
}

// Gradients whose own gradients are an error: a kernel has no derivative that autograd knows. The error leads to the inputs, as
// torch.autograd.grad takes no way that does not end at what it was asked for.
variable_list once(const Plan& plan, variable_list&& found, const torch::autograd::edge_list& inputs) {
  const auto error = c10::make_intrusive<torch::autograd::Error>(
      "trying to differentiate twice through " + plan.name +
          ", which is a kernel; where second derivatives are needed, call the operator's definition in plain "
          "PyTorch, opsmith.operator.registry()[name].reference, or opsmith.restore(model)",
      torch::autograd::edge_list(inputs));
  for (at::Tensor& t : found) {
    if (!t.defined()) continue;
    t = t.detach();
    torch::autograd::set_history(t, error);
  }
  return std::move(found);
}

class KernelBackward final : public Node {
 public:
  explicit KernelBackward(const Plan& plan) : plan_(plan) { held_.arguments.resize(plan.arguments.size()); }

  std::string name() const override { return plan_.name; }

  // Becomes the history of the results, and keeps what the plan says.
  void record(const Value* values, const Made& made) {
    for (const Gradient& g : plan_.gradients) {
      const bool wanted = values[g.of] != 0 && impl_of(values[g.of])->requires_grad();
      add_next_edge(wanted ? torch::autograd::impl::gradient_edge(tensor_of(values[g.of])) : Edge());
    }
    for (int i = 0; i < made.count; ++i) torch::autograd::set_history(at::Tensor(made.tensors[i]), getptr());
    saved_.reserve(std::count_if(plan_.arguments.begin(), plan_.arguments.end(),
                                 [](const Argument& a) { return a.from == From::saved; }));
    for (size_t i = 0; i < plan_.arguments.size(); ++i)
      keep(plan_.arguments[i], values, made, held_.arguments[i]);
  }

  variable_list apply(variable_list&& arriving) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool differentiable = c10::GradMode::is_enabled();
    variable_list found;
    {
      const c10::AutoGradMode off(false);
      found = backward(plan_, held_, unpacked(), wanted(), arriving);
    }
    return differentiable ? once(plan_, std::move(found), next_edges()) : found;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable& s : saved_) s.reset_data();
  }

  // For compiled autograd: all that its graph, in which the backward is one call, is specialized on.
  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(plan_.name);
    for (const Held& h : held_.arguments) {
      args.collect(h.number);
      args.collect(h.there);
    }
    for (const Layout& like : held_.likes) {
      args.collect(std::vector<int64_t>(like.sizes.begin(), like.sizes.end()));
      args.collect(std::vector<int64_t>(like.strides.begin(), like.strides.end()));
      args.collect(like.dtype);
    }
    for (const bool one : wanted()) args.collect(one);
    args.collect(saved_, true);
  }

  variable_list apply_with_saved(const variable_list& arriving, SwapSavedVariables& swapped) override {
    swapped.before(saved_);
    torch::dynamo::autograd::PackedArgs packed;
    packed.pack(unpacked());
    const auto call = [plan = &plan_, held = held_, needed = wanted()](const variable_list& inputs,
                                                                       const std::vector<c10::IValue>& args) {
      const c10::AutoGradMode off(false);
      return backward(*plan, held, torch::dynamo::autograd::PackedArgs(args).unpack<variable_list>(), needed,
                      inputs);
    };
    auto args = std::move(packed).vec();
    std::vector<at::TypePtr> types;
    for (const c10::IValue& arg : args)
      types.push_back(arg.isTensor() ? at::TypePtr(at::TensorType::get()) : arg.type());
    const auto& compiler = torch::dynamo::autograd::getPyCompilerInterface();
    const std::string name = compiler->bind_function(swapped.get_py_compiler(), plan_.name, call,
                                                     std::move(types), true, false);
    const auto metadata = torch::dynamo::autograd::
        IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
            torch::dynamo::autograd::get_input_metadata(next_edges()));
    variable_list found = compiler->call_function(swapped.get_py_compiler(), "apply_functional", name,
                                                  arriving, args, metadata);
    swapped.after(saved_);
    return found;
  }

 private:
  void keep(const Argument& a, const Value* values, const Made& made, Held& held) {
    const auto result = [&](int place) {  // which of the results an argument is
      int i = 0;
      while (i < made.count && made.places[i] != place) ++i;
      return i;
    };
    const int of = a.of >= 0 && values[a.of] == 0 && a.instead >= 0 ? a.instead : a.of;
    switch (a.from) {
      case From::constant: break;
      case From::number: held.number = values[of]; break;
      case From::saved:
        held.there = values[of] != 0;
        if (held.there) saved_.emplace_back(tensor_of(values[of]), result(of) < made.count);
        break;
      case From::gradient:
        held.number = Value(result(of));
        held.there = result(of) < made.count;
        if (held.there && made.count > 1)
          held_.like(held, impl_of(values[of]), plan_.strided);  // of several one may get no gradient
        break;
      case From::made:
      case From::always:
        held.there = values[of] != 0;
        if (held.there) held_.like(held, impl_of(values[of]), plan_.strided);
        break;
    }
  }

  variable_list unpacked() {
    variable_list tensors;
    tensors.reserve(saved_.size());
    for (const SavedVariable& s : saved_) tensors.push_back(s.unpack(getptr()));
    return tensors;
  }

  Wanted wanted() const {
    Wanted all;
    for (size_t g = 0; g < plan_.gradients.size(); ++g) all.push_back(task_should_compute_output(g));
    return all;
  }

  const Plan& plan_;  // which is never freed
  AllHeld held_;
  std::vector<SavedVariable> saved_;
};

class KernelRecorder final : public Recorder {
 public:
  explicit KernelRecorder(Plan plan) : plan_(std::move(plan)) {}

  bool takes(const Kernel& kernel, const Value* values) const override {
    const c10::TensorImpl* const x = impl_of(values[0]);
    if (x->numel() == 0) return false;
    for (const Required& one : plan_.required) {
      if (values[one.place] != one.value) return false;
    }
    for (int i = 0; i < kernel.count; ++i) {
      if (!is_tensor(kernel.types[i]) || values[i] == 0) continue;
      if (impl_of(values[i])->requires_grad() && !differentiable(i)) return false;
    }
    return true;
  }

  std::string run(const Kernel& kernel, Value* values, const Made& made) const override {
    at::TensorBase kept[kMostMade];
    for (size_t i = 0; i < plan_.kept.size(); ++i) {
      if (!fresh({sizes_of(plan_.kept[i].shape, impl_of(values[0])), {}, at::kFloat}, kept[i]))
        return "opsmith: there is no memory";
      values[plan_.kept[i].place] = value_of(kept[i]);
    }
    Value given[kMost];
    std::copy(values, values + kernel.count, given);  // the call uses its own up
    std::string wrong = opsmith::run(kernel, values);
    if (!wrong.empty()) return wrong;
    try {
      c10::make_intrusive<KernelBackward>(plan_)->record(given, made);
    } catch (const std::exception&
                 error) {  // an inference tensor, say, or a hook for saved tensors, whose error is Python's
      wrong = error.what();
      if (wrong.empty()) wrong = "opsmith: a call cannot be recorded";
    }
    return wrong;
  }

 private:
  bool differentiable(int input) const {
    return std::ranges::count(plan_.gradients, input, &Gradient::of) != 0;
  }

  static c10::SmallVector<int64_t, 6> sizes_of(char shape, const c10::TensorImpl* x) {
    c10::SmallVector<int64_t, 6> sizes(x->sizes().begin(), x->sizes().end() - (x->dim() > 0));
    if (shape == 'e') {
      sizes.push_back(2);
      return sizes;
    }
    int64_t rows = 1;
    for (const int64_t size : sizes) rows *= size;
    if (shape == 'p') return {2, rows};
    return {rows};
  }

  const Plan plan_;
};

}  // namespace

// From now on the kernel's calls that want gradients are ours. `direct` is the backward, and `name` the operator's; the rest is the plan of
// nodes.py, lists of tuples. 0 and an exception where that cannot be.
extern "C" __attribute__((visibility("default"))) int opsmith_nodes_attach(
    PyObject* kernel, void* direct, const char* name, PyObject* arguments, PyObject* gradients,
    PyObject* kept, PyObject* required, int strided) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!op) {
    PyErr_Format(PyExc_ValueError, "opsmith: there is no operator %s", name);
    return 0;
  }
  Plan plan{*op, reinterpret_cast<Direct>(direct), name, {}, {}, {}, {}, {}, strided != 0};
  const auto read = [](PyObject* all, const char* format, auto each, auto*... to) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all); ++i) {
      if (!PyArg_ParseTuple(PyList_GET_ITEM(all, i), format, to...)) return false;
      each();
    }
    return true;
  };
  int first, second, of, instead;
  unsigned long long value;
  const auto argument = [&] {
    plan.types += char(second);
    plan.arguments.push_back({From(first), char(second), of, instead, value});
  };
  const auto gradient = [&] { plan.gradients.push_back({first, second}); };
  const auto one_kept = [&] { plan.kept.push_back({first, char(second)}); };
  const auto one_required = [&] { plan.required.push_back({first, value}); };
  const bool fits = read(arguments, "CCiiK", argument, &first, &second, &of, &instead, &value) &&
                    read(gradients, "ii", gradient, &first, &second) &&
                    read(kept, "iC", one_kept, &first, &second) &&
                    read(required, "iK", one_required, &first, &value);
  if (!fits) return 0;
  reinterpret_cast<Kernel*>(kernel)->recorder = new KernelRecorder(
      std::move(plan));  // as long as the process: graphs refer to it
  return 1;
}
