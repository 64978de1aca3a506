// A kernel that is called without PyTorch's dispatcher, and what its two callers share: Python (binding_direct.cpp) and autograd's
// nodes (binding_nodes.cpp).
#pragma once

#include <Python.h>

#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "binding_tensor.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

// Their headers would take ten times as long to compile as all of this. A version of PyTorch that has them no more makes the library one that
// does not load, and all calls PyTorch's.
namespace at {
TORCH_API bool hasCallbacks();
TORCH_API std::vector<int64_t> infer_dense_strides(IntArrayRef sizes, IntArrayRef strides);
}  // namespace at

namespace opsmith {

using Value = uint64_t;  // a number, or the address of what a kernel is lent
using Direct = void (*)(const Value*);
using Impl = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
static_assert(sizeof(Impl) == sizeof(at::Tensor));  // all that a tensor is

constexpr int kMost = 32;  // arguments
constexpr int kMostMade = 4;  // results
constexpr int64_t kLarge = int64_t(4) << 20;  // bytes from which memory comes from the system, page by page

struct Made {
  at::TensorBase tensors[kMostMade];
  int places[kMostMade];  // of the arguments that they are
  int count = 0;
};

struct Kernel;

// Calls a kernel and records for autograd how to go back: binding_nodes.cpp.
struct Recorder {
  virtual ~Recorder() = default;
  // Whether it can: the gradients that are wanted are those it has.
  virtual bool takes(const Kernel& kernel, const Value* values) const = 0;
  // What went wrong, or nothing. The results that were made are those the caller sees.
  virtual std::string run(const Kernel& kernel, Value* values, const Made& made) const = 0;
};

// Sizes of a result: those of a tensor from its first dimension to the one before `at`, or its dimension `at`, both counted from the last; of
// no tensor the number itself.
struct Piece {
  int of;
  int leading;
  long long at;  // as Python's numbers are read
};

// A result as the signature declares it: made where the argument `when` is there and `unless` is not; lying as the tensor `like`, or of these sizes and the dtype
// of a tensor, or of one that is fixed. -1 stands for none. A bit for each argument that it may be written over, element for element.
struct Result {
  int place, when, unless, like, dtype_of, halved_without;
  unsigned onto;
  at::ScalarType dtype;
  std::vector<Piece> pieces;
};

struct Kernel {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Direct direct;
  const Recorder* recorder;  // nullptr where calls that record gradients are not for us
  PyObject* op;  // what PyTorch registered
  PyObject*
      otherwise;  // what takes a call that is not for us, or that the kernel refuses; nullptr where the caller is told
  std::vector<Result>* results;  // as they are declared; nullptr where the caller describes them
  int64_t most_rows;  // of x; 0 for any
  int inputs;  // arguments before the outputs
  int beside;  // what a public function hands on after these for `otherwise` alone
  PyObject* name;
  PyObject* names;  // of the arguments
  PyObject* defaults;  // of the arguments, Ellipsis where there is none
  int count;
  bool makes;  // its results, or True where it was given all of them; None from a call that is not for us
  char types[kMost];  // T tensor, o tensor or None, y output, p output or None, i int, f float, g float or None, b bool
};

inline c10::TensorImpl* impl_of(Value value) { return reinterpret_cast<c10::TensorImpl*>(value); }

inline bool is_output(char type) { return type == 'y' || type == 'p'; }
inline bool is_tensor(char type) { return is_output(type) || type == 'T' || type == 'o'; }
inline bool is_optional(char type) { return type == 'o' || type == 'p'; }

constexpr c10::DispatchKeySet kOfAutograd = c10::autograd_dispatch_keyset |
                                            c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView);

// Whether a tensor carries a tangent of PyTorch's forward-mode differentiation, which a kernel would lose. There is one level of it.
inline bool is_dual(const at::TensorBase& t) { return t._fw_grad(0).defined(); }

// Whether nothing but the tensors decides which kernel runs. A dispatch mode includes keys of Python's for as long as there is one.
inline bool undiverted() {
  static const c10::impl::LocalDispatchKeySet usual{c10::impl::PODLocalDispatchKeySet{}};
  const c10::impl::LocalDispatchKeySet now = c10::impl::tls_local_dispatch_key_set();
  return now.included_ - kOfAutograd == usual.included_ - kOfAutograd &&
         now.excluded_ - kOfAutograd == usual.excluded_ - kOfAutograd &&
         !at::impl::torch_function_mode_enabled();
}

// And nobody looks on.
inline bool undisturbed() { return undiverted() && !at::hasCallbacks(); }

// Whether a tensor is nothing but memory on the CPU.
inline bool is_plain(const c10::TensorImpl* t) {
  constexpr c10::DispatchKeySet kBeside = kOfAutograd | c10::autocast_dispatch_keyset;
  return t->key_set() - kBeside == c10::DispatchKeySet(c10::DispatchKey::CPU);
}

// Lets Linux back new memory, about to be written, with pages of 2 MB, and at once. Most of a large result's time goes to its first
// touch. Where two threads touch it while they write, a quarter of the calls were seen to take twice as long. Memory that is there
// already stays as it is.
inline void back_with_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
#if !defined(MADV_POPULATE_WRITE)
#define MADV_POPULATE_WRITE 23
#endif
  static const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  if (bytes < kLarge) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(memory), start = (at + page - 1) / page * page;
  const size_t size = (at + uintptr_t(bytes) - start) / page * page;
  unsigned char resident = 0;
  mincore(reinterpret_cast<void*>(start + size / (2 * page) * page), page, &resident);
  if (resident & 1) return;
  madvise(reinterpret_cast<void*>(start), size, MADV_HUGEPAGE);  // wishes: may be refused
  madvise(reinterpret_cast<void*>(start), size, MADV_POPULATE_WRITE);
#endif
}

using Strides = c10::SmallVector<int64_t, 4>;

// How a tensor is to lie: contiguous where there are no strides.
struct Layout {
  c10::SmallVector<int64_t, 6> sizes;
  Strides strides;
  at::ScalarType dtype;
};

// How new memory lies that is to lie as a tensor does: with the same order of dimensions, and no gaps.
inline Strides strides_like(const c10::TensorImpl* t) {
  if (t->is_non_overlapping_and_dense()) return {t->strides().begin(), t->strides().end()};
  const std::vector<int64_t> dense = at::infer_dense_strides(t->sizes(), t->strides());
  return {dense.begin(), dense.end()};
}

// New memory for a result; false where there is no such memory.
inline bool fresh(const Layout& wanted, at::TensorBase& y) {
  const auto& [sizes, strides, dtype] = wanted;
  int64_t bytes = int64_t(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes)) return false;
  }
  try {
    y = strides.empty() ? at::detail::empty_cpu(sizes, dtype)
                        : at::detail::empty_strided_cpu(sizes, strides, dtype);
  } catch (const std::exception&) {
    return false;
  }
  back_with_huge_pages(y.mutable_data_ptr(), bytes);
  return true;
}

inline Tensor lent(c10::TensorImpl* t) {
  const c10::Device device = t->device();
  return {t->mutable_data(),
          t->sizes().data(),
          t->strides().data(),
          t->dim(),
          c10::typeMetaToScalarType(t->dtype()),
          device.type(),
          device.index()};
}

// Calls a kernel, tensors being given as their addresses. Whoever calls us holds them meanwhile.
inline void lend(Direct direct, const char* types, int count, Value* values) {
  Tensor tensors[kMost];
  for (int i = 0; i < count; ++i) {
    if (!is_tensor(types[i]) || values[i] == 0) continue;
    tensors[i] = lent(impl_of(values[i]));
    values[i] = reinterpret_cast<Value>(&tensors[i]);
  }
  direct(values);
}

// The same from Python, whose lock is given back meanwhile. What went wrong, or nothing.
inline std::string run(const Kernel& kernel, Value* values) {
  PyThreadState* const state = PyEval_SaveThread();
  std::string wrong;
  try {
    for (int i = 0; i < kernel.count; ++i) {
      if (kernel.types[i] != 'g' || values[i] == 0) continue;
      values[i] = reinterpret_cast<Value>(&reinterpret_cast<PyFloatObject*>(values[i])->ob_fval);
    }
    lend(kernel.direct, kernel.types, kernel.count, values);
  } catch (const std::exception& error) {
    wrong = error.what();
    if (wrong.empty()) wrong = "opsmith: a kernel failed";
  } catch (...) {
    wrong = "opsmith: a kernel failed";
  }
  PyEval_RestoreThread(state);
  return wrong;
}

}  // namespace opsmith
