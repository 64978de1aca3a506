// Python objects as words of memory: what is found in them is the same as long as these words are.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace opsmith {

// A word, and what it was.
struct Word {
  const void* at;
  uint64_t was;
  bool half;  // of 32 bits

  uint64_t now() const {
    return half ? *static_cast<const uint32_t*>(at) : *static_cast<const uint64_t*>(at);
  }
};

class Words {
 public:
  // Whether changes of the object will be seen. `held` is a list of what has to live for longer than we do.
  bool add(PyObject* object, PyObject* held) {
    if (PyList_Append(held, object) != 0) return false;
    if (PyDict_CheckExact(object)) return add_dict(object);
    if (PyType_Check(object)) return add_type(reinterpret_cast<PyTypeObject*>(object));
    if (PyCell_Check(object)) {
      return reference(&reinterpret_cast<PyCellObject*>(object)->ob_ref, held);
    }
    if (PyFunction_Check(object)) {
      auto* const f = reinterpret_cast<PyFunctionObject*>(object);
      return reference(&f->func_code, held) && reference(&f->func_defaults, held) &&
             reference(&f->func_kwdefaults, held) && reference(&f->func_dict, held);
    }
    if (PyList_CheckExact(object)) {
      auto* const list = reinterpret_cast<PyListObject*>(object);
      word(&list->ob_base.ob_size);
      word(&list->ob_item);  // before what it points to: looking ends at the first change
      bool all = true;
      for (Py_ssize_t i = 0; all && i < PyList_GET_SIZE(object); ++i)
        all = reference(&list->ob_item[i], held);
      return all;
    }
    // Of any other, which class it is of, and which dictionary its attributes are in.
    PyObject** const attributes = _PyObject_GetDictPtr(object);
    return reference(reinterpret_cast<PyObject**>(&object->ob_type), held) &&
           (!attributes || reference(attributes, held)) && (!PyDict_Check(object) || add_dict(object));
  }

  bool unchanged() const {
    for (const Word& w : words_) {
      if (w.now() != w.was) return false;
    }
    return true;
  }

 private:
  void word(const void* at) { words_.push_back({at, *static_cast<const uint64_t*>(at), false}); }

  // An object that stands somewhere: while it is held, no other can come to its address.
  bool reference(PyObject* const* at, PyObject* held) {
    word(at);
    return *at == nullptr || PyList_Append(held, *at) == 0;
  }

  // Python counts all changes of all dictionaries, and notes in each when it changed last. From 3.13 on it does so no more, and those who
  // watch dictionaries there are not told of every attribute that is set.
  bool add_dict([[maybe_unused]] PyObject* dict) {
#if PY_VERSION_HEX < 0x030D0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    word(&reinterpret_cast<PyDictObject*>(dict)->ma_version_tag);
#pragma GCC diagnostic pop
    return true;
#else
    return false;
#endif
  }

  // A type has a number while nobody changes an attribute of it or of a base.
  bool add_type(PyTypeObject* type) {
    PyObject* const name = PyUnicode_InternFromString("__doc__");
    if (!name) return false;
    _PyType_Lookup(type, name);  // gives it a number where it has none
    Py_DECREF(name);
    if (type->tp_version_tag == 0) return false;
    words_.push_back({&type->tp_version_tag, type->tp_version_tag, true});
    return true;
  }

  std::vector<Word> words_;
};

}  // namespace opsmith
