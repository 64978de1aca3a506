"""Kernels as Python calls them: `direct.gelu(x, None, False, y=y)` is `torch.ops.opsmith.gelu`, only sooner.

PyTorch's way from Python to a kernel reads the arguments against a schema, boxes them and asks its dispatcher, which
for plain tensors on a CPU has nothing to decide. That takes 2 to 3 µs, and 50 to 100 where megabytes of weights have
just emptied the caches. A library of ours, built for this very PyTorch and Python, goes to the kernel at once and
leaves every other call (a mode, a profiler, a subclass, a gradient) to PyTorch. Where it cannot be built, all calls
are PyTorch's.

`direct.new_gelu(x, None, False)` makes its results too, as the kernel's signature declares them, and returns them;
where the call is not for it, it does nothing and returns None. A result may be given a dtype (`loss=torch.float32`); a
tensor is written into, and where there is none to make, as always where a kernel has no signature, True is returned.
x is contiguous, unless the results lie as a tensor.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from opsmith.call.signature import Signature
from opsmith.kernels import build, libraries

SOURCE = Path(__file__).parent / "binding_direct.cpp"
_CODE = {"Tensor": "T", "int": "i", "float": "f", "bool": "b"}
_CODE |= {"Optional[Tensor]": "o", "Optional[float]": "g"}
_WRITTEN = {"T": "y", "o": "p"}
_MOST = 32  # arguments, as in direct.h
_LARGE = 4 << 20  # bytes from which memory comes from the system, page by page

loaded: list[ctypes.CDLL] = []  # the libraries of kernels
making: dict[str, list[Any]] = {}  # by kernel: what makes its results and calls it
_declared: dict[str, Signature] = {}
_waiting: dict[str, list[Callable[[], None]]] = {}  # by kernel: what to do once it is loaded
_lock = threading.RLock()


def __getattr__(name: str) -> Any:
    """A kernel that was not asked for before, as quick as it can be had by now."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = name.removeprefix("new_")
    overload = getattr(torch.ops.opsmith, op).default
    with _lock:
        declared = _declared.get(op) if op != name else None
        made = _declared_kernel(declared, None, 0) if declared else _kernel(op, op != name)
        globals()[name] = found = made or (overload._op if op == name else not_loaded)
        if boxed(op) is None:
            when_loaded(op, lambda: globals().pop(name, None))
    return found


def declare(signature: Signature) -> None:
    """Have results of a kernel made as its signature says."""
    _declared[signature.name] = signature


class Ready:
    """A kernel that makes its results, as `call`, once it is loaded; until then what stands in for it."""

    def __init__(
        self, signature: Signature, otherwise: Callable[..., Any] | None = None, most_rows: int = 0
    ) -> None:
        """Of a kernel.

        Args:
            signature: of the kernel.
            otherwise: is given every call that is not for it, or that the kernel refuses, with the same arguments.
            most_rows: of x that it takes; 0 for any.
        """
        self.call: Callable[..., Any] = otherwise or not_loaded
        self.loaded = False

        def loaded() -> None:
            self.call = _declared_kernel(signature, otherwise, most_rows) or self.call
            self.loaded = True

        when_loaded(signature.entry, loaded)


def when_loaded(kernel: str, do: Callable[[], Any]) -> None:
    """Do something once a kernel is loaded, which may be now."""
    with _lock:
        if boxed(kernel) is None:
            _waiting.setdefault(kernel, []).append(do)
            return
    do()


def boxed(kernel: str) -> int | None:
    """The address of a kernel that is loaded."""
    return next((at for kernels in loaded if (at := kernels.opsmith_kernel(kernel.encode()))), None)


def in_huge_pages(t: Tensor) -> Tensor:
    """The same tensor, its large new memory backed by pages of 2 MB, where that is possible; soon a function in C++."""
    if type(t) is Tensor and t.device.type == "cpu" and t.nbytes >= _LARGE:
        from opsmith.measure.pages import advise  # which a start without large tensors does not need

        advise(t.data_ptr(), t.nbytes, "MADV_HUGEPAGE")
    return t


def of(overload: Any) -> Callable[..., Any]:
    """An operator as it is called soonest: one of ours directly, or PyTorch's way where a graph is captured."""
    if torch.compiler.is_dynamo_compiling():
        return overload  # type: ignore[no-any-return]
    if overload.namespace != "opsmith" or overload._overloadname != "default":
        return overload._op  # type: ignore[no-any-return]
    return globals().get(overload._opname) or __getattr__(overload._opname)  # type: ignore[no-any-return]


def offer(op: str, function: Callable[..., None]) -> None:
    """Have an operator that is written in Python called as what it is."""
    globals()[op] = function


def begin(path: Path) -> None:
    """From now on, call the kernels of a loaded library directly, if that is possible."""
    caller = library()
    kernels = ctypes.CDLL(str(path))
    if caller is None or not hasattr(kernels, "opsmith_kernel"):  # as in CUDA's, or an older wheel
        return
    kernels.opsmith_kernel.restype = ctypes.c_void_p
    with _lock:
        loaded.append(kernels)
        for name in [n for n in _waiting if kernels.opsmith_kernel(n.encode())]:
            for do in _waiting.pop(name):
                do()
    globals()["in_huge_pages"] = caller.opsmith_direct_in_huge_pages()


def not_built_yet() -> list[build.Library]:
    """What calls kernels, for whoever is about to build these: nothing where it is loaded, or cannot be had."""
    wanted = made_for_this_python("direct", SOURCE)
    return [wanted] if wanted and not library.cache_info().currsize else []


def made_for_this_python(name: str, *sources: Path) -> build.Library | None:
    """A library that is for one PyTorch and one Python; None where it cannot be had."""
    headers = Path(sysconfig.get_path("include"))
    if os.environ.get("OPSMITH_NATIVE") == "0" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    known = {"TORCH": torch.__version__, "PYTHON": sysconfig.get_config_var("SOABI")}
    flags = ["-std=c++20", "-UTORCH_TARGET_VERSION", "-DAT_PER_OPERATOR_HEADERS"]
    flags += [f'-DOPSMITH_{what}="{version}"' for what, version in known.items()]
    links = ("-ltorch_python", "-Wl,--unresolved-symbols=ignore-all")  # Python's own are in the process
    folders = [sources[0].parent, *libraries.HEADERS]
    wanted = build.Library(
        name, sources, folders, [headers], flags=tuple(flags), links=links, tier="portable"
    )
    # Without headers, a compiler would say so at the start of every process.
    return wanted if (headers / "Python.h").exists() or build.find(wanted) else None


def opened(wanted: build.Library | None) -> ctypes.PyDLL | None:
    """Such a library, built if need be; None where it cannot be built or loaded."""
    try:
        return ctypes.PyDLL(str(build.build_libraries([wanted])[0])) if wanted else None
    except (build.BuildError, OSError):  # an older compiler, say, or another PyTorch's headers
        return None


@functools.cache
def library() -> ctypes.PyDLL | None:
    """What calls kernels; None where it cannot be had."""
    found = opened(made_for_this_python("direct", SOURCE))
    if found is None:
        return None
    for function in (found.opsmith_direct, found.opsmith_direct_in_huge_pages):
        function.restype = ctypes.py_object
    py_object = ctypes.py_object
    kernel: tuple[Any, ...] = ctypes.c_void_p, ctypes.c_char_p, *[py_object] * 4, ctypes.c_int
    found.opsmith_direct.argtypes = (*kernel, *[py_object] * 2, ctypes.c_int64, ctypes.c_int)
    found.opsmith_direct_begin.argtypes = (py_object, py_object, ctypes.c_void_p, py_object)
    probe = torch.empty(1)
    begun = found.opsmith_direct_begin(probe, torch.nn.Parameter, probe._cdata, vars(forward_ad))
    return found if begun else None


def types_of(overload: Any) -> str | None:
    """A letter for the type of each argument, as direct.h has them; None for types that we do not pass on."""
    types = ""
    for a in overload._schema.arguments:
        one = _CODE.get(str(a.type))
        if one is None:
            return None
        writes = a.alias_info is not None and a.alias_info.is_write
        types += _WRITTEN[one] if writes else one
    return types


def _declared_kernel(signature: Signature, otherwise: Callable[..., Any] | None, most_rows: int) -> Any:
    """One that makes the results that its signature declares; None where it is not loaded."""
    results = tuple(signature.described(one) for one in signature.results if not one.optional)
    return _kernel(signature.entry, True, results, otherwise, most_rows, len(signature.beside))


def _kernel(op: str, makes: bool, *how: Any) -> Any:
    """A kernel that is called directly; None where it is not loaded, or takes what we do not pass on."""
    namespace, _, entry = op.rpartition("::")
    overload = getattr(getattr(torch.ops, namespace or "opsmith"), entry).default
    at, caller, types = boxed(op), library(), types_of(overload)
    if at is None or caller is None or types is None or len(types) > _MOST or overload._schema.returns:
        return None
    arguments = overload._schema.arguments
    names = tuple(sys.intern(a.name) for a in arguments)
    defaults = tuple(a.default_value if a.has_default_value() else ... for a in arguments)
    known = (types.encode(), overload._op, str(overload), names, defaults, makes)
    found = caller.opsmith_direct(at, *known, *(how or (None, None, 0, 0)))
    if makes:
        making.setdefault(op, []).append(found)
    return found


def not_loaded(*args: Any, **kwargs: Any) -> None:
    """What stands in for a kernel that makes results, where there is none or not yet."""


libraries.follow(begin, lambda gradients: not_built_yet())
