// Tells whether anything in a set of Python objects has changed: dictionaries, types, lists, functions, cells and tensors.
#include <c10/core/TensorImpl.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "direct.h"
#include "watch.h"

namespace opsmith {

bool is_tensor_object(PyObject* given);  // binding_direct.cpp
const at::Tensor& tensor_of(PyObject* tensor_object);

namespace {

c10::TensorImpl* impl_of(PyObject* tensor) { return tensor_of(tensor).unsafeGetTensorImpl(); }

// A tensor as it was: how its memory is read, and with its contents where that is and how often it was written.
class Seen {
 public:
  Seen(PyObject* object, bool contents) : object_(object), impl_(impl_of(object)), contents_(contents) {
    keys_ = impl_->key_set();
    dtype_ = impl_->dtype();
    learns_ = impl_->requires_grad();
    sizes_ = impl_->sizes().vec();
    strides_ = impl_->strides().vec();
    data_ = contents ? impl_->data() : nullptr;
    version_ = contents ? version() : 0;
  }
  PyObject* object() const { return object_; }
  bool unchanged() const {
    return impl_of(object_) == impl_ && impl_->key_set() == keys_ && impl_->dtype() == dtype_ &&
           impl_->requires_grad() == learns_ && impl_->sizes() == c10::IntArrayRef(sizes_) &&
           impl_->strides() == c10::IntArrayRef(strides_) &&
           (!contents_ || (impl_->data() == data_ && version() == version_));
  }

 private:
  uint32_t version() const { return impl_->is_inference() ? 0 : impl_->version_counter().current_version(); }

  PyObject* object_;
  c10::TensorImpl* impl_;  // not held, or PyTorch would not swap it; all that matters of it is looked at
  c10::DispatchKeySet keys_;
  caffe2::TypeMeta dtype_;
  std::vector<int64_t> sizes_, strides_;
  const void* data_;
  uint32_t version_;
  bool learns_, contents_;
};

struct Watch {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* held;
  Words* words;
  std::vector<Seen>* tensors;
};

// watch(): whether all is as it was. watch(args): whether all is, and the tensors are among these, in their order.
PyObject* ask(PyObject* me, PyObject* const* args, size_t flags, PyObject*) {
  const auto* const self = reinterpret_cast<Watch*>(me);
  if (PyVectorcall_NARGS(flags) == 1 && PyTuple_Check(args[0])) {
    Py_ssize_t i = 0;
    const Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
    for (const Seen& one : *self->tensors) {
      while (i < count && PyTuple_GET_ITEM(args[0], i) != one.object()) ++i;
      if (i++ >= count) Py_RETURN_FALSE;
    }
  }
  const auto same = [](const Seen& one) { return one.unchanged(); };
  return PyBool_FromLong(self->words->unchanged() &&
                         std::all_of(self->tensors->begin(), self->tensors->end(), same));
}

int traverse(PyObject* me, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Watch*>(me)->held);
  return 0;
}

int clear(PyObject* me) {
  auto* const self = reinterpret_cast<Watch*>(me);
  // What is no longer held is no longer looked at.
  delete self->words;
  delete self->tensors;
  self->words = nullptr;
  self->tensors = nullptr;
  self->vectorcall = [](PyObject*, PyObject* const*, size_t, PyObject*) { return Py_NewRef(Py_False); };
  Py_CLEAR(self->held);
  return 0;
}

void drop(PyObject* me) {
  PyObject_GC_UnTrack(me);
  clear(me);
  PyObject_GC_Del(me);
}

PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// watch(objects, contents): what tells whether they have changed; None where that cannot be told of one of them.
PyObject* watch(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !PyTuple_CheckExact(args[0]))
    return PyErr_Format(PyExc_TypeError, "watch: expected a tuple and a bool");
  PyObject* const objects = args[0];
  auto* const self = PyObject_GC_New(Watch, &type);
  if (!self) return nullptr;
  self->vectorcall = ask;
  self->held = PyList_New(0);
  self->words = new Words;
  self->tensors = new std::vector<Seen>;
  bool all = self->held != nullptr;
  for (Py_ssize_t i = 0; all && i < PyTuple_GET_SIZE(objects); ++i) {
    PyObject* const one = PyTuple_GET_ITEM(objects, i);
    if (is_tensor_object(one)) {
      all = is_plain(impl_of(one)) && PyList_Append(self->held, one) == 0;
      if (all) self->tensors->emplace_back(one, args[1] == Py_True);
    } else {
      all = self->words->add(one, self->held);
    }
  }
  PyObject_GC_Track(self);
  if (all) return reinterpret_cast<PyObject*>(self);
  Py_DECREF(self);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef method = {"watch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(watch)),
                      METH_FASTCALL, nullptr};

PyObject* is_undiverted(PyObject*, PyObject*) { return PyBool_FromLong(undiverted()); }

PyMethodDef undiverted_method = {"undiverted", is_undiverted, METH_NOARGS, nullptr};

}  // namespace
}  // namespace opsmith

extern "C" __attribute__((visibility("default"))) PyObject* opsmith_direct_undiverted() {
  return PyCFunction_New(&opsmith::undiverted_method, nullptr);
}

// What makes watches; after opsmith_direct_begin.
extern "C" __attribute__((visibility("default"))) PyObject* opsmith_direct_watch() {
  using namespace opsmith;
  type.tp_name = "opsmith.Watch";
  type.tp_basicsize = sizeof(Watch);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
  type.tp_vectorcall_offset = offsetof(Watch, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_dealloc = drop;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  return PyType_Ready(&type) == 0 ? PyCFunction_New(&method, nullptr) : nullptr;
}
