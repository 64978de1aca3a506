"""Kernels as Python calls them: `calls.gelu(x, None, False, y=y)` is `torch.ops.opsmith.gelu`, only sooner.

PyTorch's way from Python to a kernel reads the arguments against a schema, boxes them and asks its dispatcher, which
for plain tensors on a CPU has nothing to decide. That takes 2 to 3 µs, and 50 to 100 where megabytes of weights have
just emptied the caches. A library of ours, built for this very PyTorch and Python, goes to the kernel at once and
leaves every other call (a mode, a profiler, a subclass, a gradient) to PyTorch. Where it cannot be built, all calls
are PyTorch's.

`calls.new_gelu(x, None, False)` makes its result too, like x, and returns it; where the call is not for it, it does
nothing and returns None. A result may be described: by the sizes in place of x's last one (`y=64`, `y=(8, 64)`), by a
dtype (`y=torch.int8`, `y=(torch.float32, 64)`), by a tensor that it is like and lies as (`y=[k]`), by a table of which
x picks rows (`y=[table, ...]`, or in another dtype, `y=[table, torch.float32]`), or by a contiguous weight by which x
is multiplied, and how many rows x may have (`y=[weight, 8]`); one that is optional is made where it is described, or is
True. A tensor is written into, and where there is none to make, True is returned. x is contiguous, unless the results
lie as a tensor.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

from opsmith.kernels import build

SOURCE = Path(__file__).parent / "binding_direct.cpp"
_TYPES = {
    "Tensor": "T",
    "Optional[Tensor]": "o",
    "int": "i",
    "float": "f",
    "Optional[float]": "g",
    "bool": "b",
}
_WRITTEN = {"T": "y", "o": "p"}

loaded: list[ctypes.CDLL] = []  # the libraries of kernels
early: set[str] = set()  # names that were asked for before theirs was
_lock = threading.Lock()


def __getattr__(name: str) -> Any:
    """A kernel that was not asked for before, as quick as it can be had by now."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    op = name.removeprefix("new_")
    overload = getattr(torch.ops.opsmith, op).default
    with _lock:
        at = boxed(op)
        made = None if at is None else _made(at, overload, op != name)
        globals()[name] = found = made or (overload._op if op == name else _not_ours)
        if at is None:
            early.add(name)
    return found


def boxed(kernel: str) -> int | None:
    """The address of a kernel that is loaded."""
    return next((at for kernels in loaded if (at := kernels.opsmith_kernel(kernel.encode()))), None)


def small_linear(x: Any, weight: Any, bias: Any, most: int, learns: int) -> torch.Tensor | None:
    """PyTorch's `linear(x, weight, bias)` for one row of at most `most` numbers; None for other calls.

    Where gradients are wanted, for any rows of which at most `learns` products are summed.
    """
    caller = library()
    found = _not_ours if caller is None else caller.opsmith_direct_small_linear()
    globals()["small_linear"] = found
    return found(x, weight, bias, most, learns)


def sizes(t: Any) -> tuple[int, ...]:
    """A tensor's shape, sooner than PyTorch says it."""
    return t.shape  # type: ignore[no-any-return]


def pieces(t: torch.Tensor, *shapes: tuple[int, ...]) -> Any:
    """The memory of a new tensor, which nobody else has, as two to four contiguous tensors that follow each other."""
    caller = library()
    found = _pieces if caller is None else caller.opsmith_direct_pieces()
    globals()["pieces"] = found
    return found(t, *shapes)


def in_huge_pages(t: torch.Tensor) -> torch.Tensor:
    """The same tensor, its large new memory backed by pages of 2 MB at once, where that is possible."""
    caller = library()
    found = _same if caller is None else caller.opsmith_direct_in_huge_pages()
    globals()["in_huge_pages"] = found
    return found(t)


def of(overload: Any) -> Callable[..., Any]:
    """An operator of ours as a program calls it."""
    if overload.namespace != "opsmith" or overload._overloadname != "default":
        return overload._op  # type: ignore[no-any-return]
    return globals().get(overload._opname) or __getattr__(overload._opname)  # type: ignore[no-any-return]


def begin(path: Path) -> None:
    """From now on, call the kernels of a loaded library directly, if that is possible."""
    caller = library()
    if caller is None:
        return
    kernels = ctypes.CDLL(str(path))
    kernels.opsmith_kernel.restype = ctypes.c_void_p
    with _lock:
        loaded.append(kernels)
        for name in [n for n in early if kernels.opsmith_kernel(n.removeprefix("new_").encode())]:
            early.remove(name)
            globals().pop(name, None)
    globals()["sizes"] = caller.opsmith_direct_sizes()


def not_built_yet() -> list[build.Library]:
    """What calls kernels, for whoever is about to build these: nothing where it is loaded, or cannot be had."""
    wanted = made_for_this_python("direct", SOURCE)
    return [wanted] if wanted and not library.cache_info().currsize else []


def made_for_this_python(name: str, *sources: Path) -> build.Library | None:
    """A library that is for one PyTorch and one Python; None where it cannot be had."""
    headers = Path(sysconfig.get_path("include"))
    if os.environ.get("OPSMITH_NATIVE") == "0" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    if not (headers / "Python.h").exists():  # a compiler would say so at the start of every process
        return None
    flags = (
        *("-std=c++20", "-UTORCH_TARGET_VERSION", "-DAT_PER_OPERATOR_HEADERS", f"-I{headers}"),
        *(f'-DOPSMITH_TORCH="{torch.__version__}"', f'-DOPSMITH_PYTHON="{sys.version}"'),
    )
    links = ("-ltorch_python", "-Wl,--unresolved-symbols=ignore-all")  # Python's own are in the process
    folders = [sources[0].parent, sources[0].parent / "cpu"]
    return build.Library(name, sources, folders, flags=flags, links=links, tier="portable")


@functools.cache
def library() -> ctypes.PyDLL | None:
    """What calls kernels, built if need be; None where it cannot be built or loaded."""
    wanted = made_for_this_python("direct", SOURCE)
    if wanted is None:
        return None
    try:
        found = ctypes.PyDLL(str(build.build_libraries([wanted])[0]))
    except (build.BuildError, OSError):  # an older compiler, say, or another PyTorch's headers
        return None
    for function in (
        found.opsmith_direct,
        found.opsmith_direct_small_linear,
        found.opsmith_direct_sizes,
        found.opsmith_direct_pieces,
        found.opsmith_direct_in_huge_pages,
    ):
        function.restype = ctypes.py_object
    found.opsmith_direct.argtypes = (
        *(ctypes.c_void_p, ctypes.c_char_p),
        *([ctypes.py_object] * 4),
        ctypes.c_int,
    )
    py_object = ctypes.py_object
    found.opsmith_direct_begin.argtypes = (py_object, py_object, ctypes.c_void_p, py_object)
    probe = torch.empty(1)
    begun = found.opsmith_direct_begin(probe, torch.nn.Parameter, probe._cdata, vars(forward_ad))
    return found if begun else None


def types_of(overload: Any) -> str | None:
    """A letter for the type of each argument, as direct.h has them; None for types that we do not pass on."""
    types = ""
    for a in overload._schema.arguments:
        one = _TYPES.get(str(a.type))
        if one is None:
            return None
        writes = a.alias_info is not None and a.alias_info.is_write
        types += _WRITTEN[one] if writes else one
    return types


def _made(at: int, overload: Any, makes: bool) -> Callable[..., Any] | None:
    """A kernel that is called directly; None where it takes what we do not pass on."""
    caller, types = library(), types_of(overload)
    if caller is None or types is None or overload._schema.returns:
        return None
    arguments = overload._schema.arguments
    names = tuple(sys.intern(a.name) for a in arguments)
    defaults = tuple(a.default_value if a.has_default_value() else ... for a in arguments)
    return caller.opsmith_direct(  # type: ignore[no-any-return]
        at, types.encode(), overload._op, str(overload), names, defaults, makes
    )


def _pieces(t: torch.Tensor, *shapes: tuple[int, ...]) -> Any:
    flat = t.view(-1).split([math.prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(flat, shapes, strict=True))


def _same(t: torch.Tensor) -> torch.Tensor:
    return t


def _not_ours(*args: Any, **kwargs: Any) -> None:
    """What makes results, where nothing of ours can."""
