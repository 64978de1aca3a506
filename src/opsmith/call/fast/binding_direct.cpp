// Calls kernels from Python without PyTorch's argument parser and dispatcher, where these would decide nothing: tensors that are plain
// and on the CPU, no gradient, and a thread in which nothing listens. Every other call goes to the operator that PyTorch registered.
//
// What has no place in PyTorch's stable ABI is needed here, so a library serves the one version it was built with.
#include "direct.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/Dtype.h>

#include <algorithm>
#include <cstddef>
#include <memory>

TORCH_API PyObject* THPVariable_Wrap(const at::TensorBase& tensor);  // without its header, as in direct.h

namespace opsmith {

PyTypeObject* tensor_type;
PyTypeObject* parameter_type;
Py_ssize_t place_of_impl;  // in a tensor's Python object
PyObject* forward_ad;  // the names of torch.autograd.forward_ad
PyObject* current_level;  // one of them
PyObject* no_level;  // its value outside: -1, of which Python has one

// Whether a level of forward-mode differentiation is open, so that tensors may carry tangents. Asking each of them, or PyTorch's own list of
// levels, means taking a lock.
bool may_be_dual() { return PyDict_GetItemWithError(forward_ad, current_level) != no_level; }

bool is_tensor_object(PyObject* given) {
  return Py_TYPE(given) == tensor_type || Py_TYPE(given) == parameter_type;
}

const at::Tensor& tensor_of(PyObject* tensor_object) {
  return *reinterpret_cast<const at::Tensor*>(reinterpret_cast<char*>(tensor_object) + place_of_impl);
}

}  // namespace opsmith

namespace {

using namespace opsmith;

// The tensor of a Python object, or nullptr where it is not a plain one on the CPU.
c10::TensorImpl* plain(PyObject* given) {
  if (!is_tensor_object(given)) return nullptr;
  c10::TensorImpl* const t = tensor_of(given).unsafeGetTensorImpl();
  return is_plain(t) ? t : nullptr;
}

// One argument as a number; a tensor as its address. False where PyTorch has to decide.
bool convert(char type, PyObject* given, Value& value) {
  if (is_tensor(type)) {
    value = 0;
    if (given == Py_None && is_optional(type)) return true;
    c10::TensorImpl* const t = plain(given);
    value = reinterpret_cast<Value>(t);
    return t != nullptr;
  }
  if (type == 'i') {
    if (!PyLong_CheckExact(given)) return false;
    int overflow;
    value = static_cast<Value>(PyLong_AsLongLongAndOverflow(given, &overflow));
    return overflow == 0;
  }
  if (type == 'g') {  // the object itself: 0.0 and None are two things
    value = given == Py_None ? 0 : reinterpret_cast<Value>(given);
    return given == Py_None || PyFloat_CheckExact(given);
  }
  if (type == 'f') {
    if (!PyFloat_CheckExact(given)) return false;
    const double number = PyFloat_AS_DOUBLE(given);
    std::memcpy(&value, &number, sizeof(number));
    return true;
  }
  value = given == Py_True;
  return PyBool_Check(given);
}

// The arguments by position; false where PyTorch's parser has to say what is wrong. An output that we make may be left out.
bool place(const Kernel* self, PyObject* const* args, Py_ssize_t given, PyObject* names, PyObject** placed) {
  if (given > self->count) return false;
  for (int i = 0; i < self->count; ++i) placed[i] = i < given ? args[i] : PyTuple_GET_ITEM(self->defaults, i);
  const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t n = 0; n < named; ++n) {
    int i = int(given);
    while (i < self->count && PyTuple_GET_ITEM(self->names, i) != PyTuple_GET_ITEM(names, n)) ++i;
    if (i == self->count) return false;
    placed[i] = args[given + n];
  }
  for (int i = 0; i < self->count; ++i) {
    if (placed[i] == Py_Ellipsis && !(self->makes && is_output(self->types[i]))) return false;
  }
  return true;
}

// Whether what a public function hands on behind a kernel's arguments, at last `out`, asks for nothing that is not done here: it is not given,
// or the dtype of the first result, or where results are to lie.
bool only_hands_on(PyObject* const* given, int count, PyObject*& dtype, PyObject*& out) {
  for (int i = 0; i < count; ++i) {
    if (i + 1 < count && THPDtype_Check(given[i])) {
      dtype = given[i];
    } else if (i + 1 == count && (is_tensor_object(given[i]) || PyTuple_CheckExact(given[i]))) {
      out = given[i];
    } else if (given[i] != Py_None && given[i] != Py_False) {
      return false;
    }
  }
  return true;
}

bool is_floating(const c10::TensorImpl* t) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(t->dtype());
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// That of a result as the signature declares it; the call may name another dtype.
bool declared(const Result& result, const Value* values, PyObject* given, Layout& found) {
  if (result.like >= 0) {
    const c10::TensorImpl* const like = impl_of(values[result.like]);
    if (!like) return false;
    found = {{like->sizes().begin(), like->sizes().end()},
             strides_like(like),
             c10::typeMetaToScalarType(like->dtype())};
    return true;
  }
  found.dtype = result.dtype;
  if (THPDtype_Check(given)) {
    found.dtype = reinterpret_cast<THPDtype*>(given)->scalar_type;
  } else if (given != Py_None && given != Py_Ellipsis) {
    return false;
  } else if (result.dtype_of >= 0) {
    const c10::TensorImpl* const by = impl_of(values[result.dtype_of]);
    if (!by || !is_floating(by)) return false;
    found.dtype = c10::typeMetaToScalarType(by->dtype());
  }
  for (const Piece& piece : result.pieces) {
    if (piece.of < 0) {
      found.sizes.push_back(piece.at);
      continue;
    }
    const c10::TensorImpl* const t = impl_of(values[piece.of]);
    if (!t) return false;
    if (t->dim() == 0) continue;  // a number, which is a row
    if (t->dim() < piece.at) return false;
    if (piece.leading) {
      found.sizes.append(t->sizes().begin(), t->sizes().end() - piece.at);
    } else {
      found.sizes.push_back(t->size(t->dim() - piece.at));
    }
  }
  if (result.halved_without >= 0 && values[result.halved_without] == 0 && !found.sizes.empty())
    found.sizes.back() /= 2;
  return true;
}

// Whether two tensors have memory between the same two addresses.
bool meet(const c10::TensorImpl* a, const c10::TensorImpl* b) {
  const auto span = [](const c10::TensorImpl* t) {
    int64_t last = 0;
    for (int64_t i = 0; i < t->dim(); ++i) last += (t->size(i) - 1) * t->stride(i);
    const char* const start = static_cast<const char*>(t->data());
    return std::pair(start, start + (t->numel() ? (last + 1) * int64_t(t->itemsize()) : 0));
  };
  const auto [a_start, a_end] = span(a);
  const auto [b_start, b_end] = span(b);
  return a_start < b_end && b_start < a_end;
}

// Whether a tensor can be a result: it lies as a new one would, and apart from what is read or what it may be written over.
bool can_be(c10::TensorImpl* out, const Kernel* self, const Result& result, const Layout& wanted,
            const Value* values) {
  const bool lies = wanted.strides.empty() ? out->is_contiguous()
                                           : out->strides() == c10::IntArrayRef(wanted.strides);
  if (!lies || out->sizes() != c10::IntArrayRef(wanted.sizes) ||
      c10::typeMetaToScalarType(out->dtype()) != wanted.dtype)
    return false;
  for (int i = 0; i < self->count; ++i) {
    if (!is_tensor(self->types[i]) || values[i] == 0) continue;
    const c10::TensorImpl* const read = impl_of(values[i]);
    const bool itself = (result.onto >> i & 1) && read->data() == out->data() &&
                        read->dtype() == out->dtype() && read->sizes() == out->sizes() &&
                        read->strides() == out->strides();
    if (!itself && meet(read, out)) return false;
  }
  return true;
}

// The results that a call asks for: those that the signature declares, in `out` where that is given. A tensor among the arguments is one to write
// into. Only a kernel whose results lie as a tensor does takes an x that is not contiguous.
bool make(const Kernel* self, PyObject** placed, PyObject* out, Value* values, Made& made) {
  const c10::TensorImpl* const x = plain(placed[0]);
  if (!x) return false;
  if (self->most_rows && (x->dim() == 0 || x->numel() > self->most_rows * x->size(x->dim() - 1)))
    return false;
  const bool contiguous = x->is_contiguous();
  const bool several = out && PyTuple_CheckExact(out);
  const Py_ssize_t given = several ? PyTuple_GET_SIZE(out) : out != nullptr;
  Py_ssize_t taken = 0;
  for (int i = 0; i < self->count; ++i) {
    if (!is_output(self->types[i])) continue;
    const Result* result = nullptr;
    if (self->results) {
      for (const Result& one : *self->results) {
        const bool wanted = (one.when < 0 || values[one.when] != 0) &&
                            (one.unless < 0 || values[one.unless] == 0);
        if (one.place == i && wanted) result = &one;
      }
    }
    if (!contiguous && (result ? result->like < 0 : placed[i] != Py_None)) return false;
    if (!(result && placed[i] == Py_None) && convert(self->types[i], placed[i], values[i])) continue;
    Layout layout;
    if (!result || !declared(*result, values, placed[i], layout)) return false;
    if (out) {
      if (taken == given) return false;
      c10::TensorImpl* const y = plain(several ? PyTuple_GET_ITEM(out, taken) : out);
      if (!y || !can_be(y, self, *result, layout, values)) return false;
      values[i] = reinterpret_cast<Value>(y);
      ++taken;
      continue;
    }
    if (made.count == kMostMade || !fresh(layout, made.tensors[made.count])) return false;
    made.places[made.count] = i;
    values[i] = reinterpret_cast<Value>(made.tensors[made.count++].unsafeGetTensorImpl());
  }
  return taken == given;
}

// Tells autograd, which may have kept them, that tensors that were given are written.
void writes(const Kernel* self, const Value* values) {
  for (int i = 0; i < self->count; ++i) {
    if (is_output(self->types[i]) && values[i] != 0 && !impl_of(values[i])->is_inference())
      impl_of(values[i])->bump_version();
  }
}

int outputs(const Kernel* self, const Value* values) {
  int count = 0;
  for (int i = 0; i < self->count; ++i) count += is_output(self->types[i]) && values[i] != 0;
  return count;
}

// Whether autograd would record the call.
bool wants_gradient(const Kernel* self, const Value* values) {
  for (int i = 0; i < self->count; ++i) {
    if (is_tensor(self->types[i]) && values[i] != 0 && impl_of(values[i])->requires_grad()) return true;
  }
  return false;
}

PyObject* results(const Made& made) {
  if (made.count == 1) return THPVariable_Wrap(made.tensors[0]);
  PyObject* const all = PyTuple_New(made.count);
  for (int i = 0; all && i < made.count; ++i) {
    PyObject* const one = THPVariable_Wrap(made.tensors[i]);
    if (!one) {
      Py_DECREF(all);
      return nullptr;
    }
    PyTuple_SET_ITEM(all, i, one);
  }
  return all;
}

PyObject* call(PyObject* me, PyObject* const* args, size_t flags, PyObject* names) {
  auto* const self = reinterpret_cast<Kernel*>(me);
  PyObject* placed[kMost];
  Value values[kMost];
  Made made;
  Py_ssize_t positional = PyVectorcall_NARGS(flags);
  PyObject *dtype = nullptr, *out = nullptr;
  if (self->otherwise && positional == self->inputs + self->beside + 1 &&
      only_hands_on(args + self->inputs, self->beside + 1, dtype, out))
    positional = self->inputs;
  bool ours = !(self->otherwise && positional > self->inputs) &&
              place(self, args, positional, names, placed) && undisturbed() && !may_be_dual();
  if (ours && dtype) placed[self->results->front().place] = dtype;
  for (int i = 0; ours && i < self->count; ++i) {
    const char type = self->types[i];
    if (self->makes && is_output(type)) {
      values[i] = 0;
    } else {
      ours = convert(type, placed[i], values[i]);
    }
  }
  const bool grad = ours && c10::GradMode::is_enabled();
  const bool records = grad && wants_gradient(self, values);
  ours = ours && (!records || (self->makes && self->recorder && self->recorder->takes(*self, values)));
  ours = ours && (!self->makes || make(self, placed, out, values, made));
  if (ours && grad && made.count < outputs(self, values))
    ours = !records && !wants_gradient(self, values);  // into what is given
  if (!ours) {
    if (self->otherwise) return PyObject_Vectorcall(self->otherwise, args, flags, names);
    if (self->makes) Py_RETURN_NONE;
    const Py_ssize_t given = PyVectorcall_NARGS(flags) + (names ? PyTuple_GET_SIZE(names) : 0);
    const auto loses_tangent = [](PyObject* one) { return is_tensor_object(one) && is_dual(tensor_of(one)); };
    if (may_be_dual() && std::any_of(args, args + given, loses_tangent)) {
      return PyErr_Format(PyExc_NotImplementedError,
                          "%U: a kernel has no rule for forward-mode differentiation", self->name);
    }
    return PyObject_Vectorcall(self->op, args, flags, names);
  }
  if (out) writes(self, values);
  const std::string wrong = records ? self->recorder->run(*self, values, made) : run(*self, values);
  if (wrong.empty()) {
    if (!self->makes) Py_RETURN_NONE;
    if (out) return Py_NewRef(out);
    if (made.count == 0) Py_RETURN_TRUE;
    return results(made);
  }
  if (PyErr_Occurred()) return nullptr;  // of a hook for saved tensors
  if (self->otherwise)
    return PyObject_Vectorcall(self->otherwise, args, flags, names);  // it says what is wrong
  PyErr_SetString(PyExc_RuntimeError, wrong.c_str());
  return nullptr;
}

// What it is given, its memory on huge pages where that is worth something.
PyObject* in_huge_pages(PyObject*, PyObject* given) {
  if (c10::TensorImpl* const t = plain(given)) {
    PyThreadState* const state = PyEval_SaveThread();
    back_with_huge_pages(t->mutable_data(), t->numel() * int64_t(t->itemsize()));
    PyEval_RestoreThread(state);
  }
  return Py_NewRef(given);
}

PyMethodDef for_large_memory = {"in_huge_pages", in_huge_pages, METH_O, nullptr};

PyObject* text(PyObject* me) {
  return PyUnicode_FromFormat("<kernel %U>", reinterpret_cast<Kernel*>(me)->name);
}

void drop(PyObject* me) {
  auto* const self = reinterpret_cast<Kernel*>(me);
  Py_XDECREF(self->op);
  Py_XDECREF(self->otherwise);
  delete self->results;
  Py_XDECREF(self->name);
  Py_XDECREF(self->names);
  Py_XDECREF(self->defaults);
  Py_TYPE(me)->tp_free(me);
}

PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// To be called once. 1, or 0 where a tensor's Python object does not hold its tensor as we think it does: `impl` is that of `tensor`.
EXPORT int opsmith_direct_begin(PyObject* tensor, PyObject* parameter, void* impl,
                                PyObject* names_of_forward_ad) {
  forward_ad = Py_NewRef(names_of_forward_ad);
  current_level = PyUnicode_InternFromString("_current_level");
  no_level = PyLong_FromLong(-1);
  tensor_type = Py_TYPE(tensor);
  parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
  place_of_impl = sizeof(PyObject);
  while (place_of_impl < tensor_type->tp_basicsize &&
         *reinterpret_cast<void**>(reinterpret_cast<char*>(tensor) + place_of_impl) != impl) {
    place_of_impl += sizeof(void*);
  }
  if (place_of_impl >= tensor_type->tp_basicsize) return 0;
  type.tp_name = "opsmith.Kernel";
  type.tp_basicsize = sizeof(Kernel);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
  type.tp_vectorcall_offset = offsetof(Kernel, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_dealloc = drop;
  type.tp_repr = text;
  return PyType_Ready(&type) == 0;
}

// What Python has of its own too.
EXPORT PyObject* opsmith_direct_in_huge_pages() { return PyCFunction_New(&for_large_memory, nullptr); }

// The results of a signature, each a tuple: place, when, unless, like, dtype_of, dtype, halved_without, onto, pieces. nullptr and an exception for others.
static std::vector<Result>* results_of(PyObject* all) {
  auto found = std::make_unique<std::vector<Result>>();
  for (Py_ssize_t r = 0; r < PyTuple_GET_SIZE(all); ++r) {
    Result result{};
    PyObject *dtype, *pieces;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(all, r), "iiiiiOiIO!", &result.place, &result.when, &result.unless,
                          &result.like, &result.dtype_of, &dtype, &result.halved_without, &result.onto,
                          &PyTuple_Type, &pieces))
      return nullptr;
    if (THPDtype_Check(dtype)) result.dtype = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
    for (Py_ssize_t p = 0; p < PyTuple_GET_SIZE(pieces); ++p) {
      Piece piece;
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pieces, p), "ipL", &piece.of, &piece.leading, &piece.at))
        return nullptr;
      result.pieces.push_back(piece);
    }
    found->push_back(std::move(result));
  }
  return found.release();
}

// A kernel that Python can call, as `types` says of its arguments; or nullptr and an exception. `results` and `otherwise` may be None.
EXPORT PyObject* opsmith_direct(void* direct, const char* types, PyObject* op, PyObject* name,
                                PyObject* names, PyObject* defaults, int makes, PyObject* results,
                                PyObject* otherwise, int64_t most_rows, int beside) {
  const size_t count = std::strlen(types);
  if (count > kMost)
    return PyErr_Format(PyExc_ValueError, "opsmith: a kernel of %zu arguments, at most %d", count, kMost);
  std::vector<Result>* const declared = results == Py_None ? nullptr : results_of(results);
  if (PyErr_Occurred()) return nullptr;
  auto* const self = PyObject_New(Kernel, &type);
  if (!self) return nullptr;
  self->vectorcall = call;
  self->direct = reinterpret_cast<Direct>(direct);
  self->recorder = nullptr;
  self->op = Py_NewRef(op);
  self->name = Py_NewRef(name);
  self->names = Py_NewRef(names);
  self->defaults = Py_NewRef(defaults);
  self->count = int(count);
  self->otherwise = otherwise == Py_None ? nullptr : Py_NewRef(otherwise);
  self->results = declared;
  self->most_rows = most_rows;
  self->beside = beside;
  self->inputs = int(std::count_if(types, types + count, [](char type) { return !is_output(type); }));
  self->makes = makes != 0;
  std::memcpy(self->types, types, count);
  return reinterpret_cast<PyObject*>(self);
}
