"""What every operator's file needs: the checks, the views, and whether native kernels can run.

docs/authoring/calls.md has the path of a call. A question to a tensor takes 50 to 100 ns, a helper 30 to 50, and where
weights stream through the caches each of them waits for memory: so a public function asks nothing that the kernel's
binding refuses itself, and the checks run after that, to say what to do. Those that are no `Call` (run.py) begin

    if OTHER_OPTIONS_ARE_DEFAULT and not compiling():
        try:
            y = direct.new_operator(x, weight, ...)  # None for what PyTorch has to decide: fast/direct.py
            if y is not None:
                return y
        except RuntimeError:  # the checks say why
            pass
    _check(x, ...)                                  # views, copies, other devices, float64

Where PyTorch's builtin is done before a call of ours begins, it is called first (`embedding`), and
what it would take in silence and the function does not (broadcasting, promotion, another device) is tested on the way.
Which of the two an operator takes is measured: `benchmarks/overhead.py`, docs/guide/small-calls.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from opsmith.call.fast import direct, nodes
from opsmith.call.overlap import refuse_overlap
from opsmith.kernels import libraries, triton
from opsmith.operator import Implementation, Supports

Tensor = torch.Tensor
PLAIN = (Tensor, torch.nn.Parameter)

SMALL = 4096  # elements up to which PyTorch's own kernel is done before a call of ours has begun
limit = SMALL  # the same, or what `small_up_to` says; read as `common.limit`, for it changes
_QUICK = 1 << 20  # elements up to which the time before the kernel is a part of a call's time that counts
_ready = False  # whether C++ kernels can be called without asking: known after the first call that asked

NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def native_library(*kernels: str) -> bool:
    """True once the native libraries of these kernels, or all, are loaded (built first if need be).

    A constant in a compiled graph.
    """
    global _ready
    loaded = libraries.load(*kernels)
    if loaded and not triton.INTERPRETED:
        _ready = True
    return loaded


# What torch.compiler.assume_constant_result sets; calling it would import Dynamo, a second at every start.
native_library._dynamo_marked_constant = True  # type: ignore[attr-defined]


def native(x: torch.Tensor, op: str, *more: str) -> bool | str:
    """True when a kernel of ours, `torch.ops.opsmith.op`, can take this tensor, else the reason why not.

    `more` are kernels that the same call needs: what of them has to be built is built at once.
    """
    if not compiling() and (_transforming() or carries_tangents()):
        return "the kernels have no rules for forward-mode differentiation and torch.func's transforms"
    if x.dtype not in NATIVE_DTYPES:
        return f"the kernels take float32, bfloat16 and float16, not {short(x.dtype)}"
    if x.is_cuda or (x.is_cpu and triton.DEVICE == "cpu"):
        return triton.offers(op)
    if not x.is_cpu:
        return f"there are kernels for CPU and GPU, the input is on {x.device}"
    return native_library(op, *more) or "the native library is not available (see `opsmith doctor`)"


def kernels(
    fn: Callable[..., Any], supports: Callable[..., Supports], *, takes_out: bool = True, **more: Any
) -> list[Implementation]:
    """The implementations of a function that calls `torch.ops.opsmith`: C++ on a CPU, Triton on a GPU.

    Under Triton's interpreter the CPU is Triton's too.
    """

    def on_cpu() -> Supports:
        return triton.DEVICE != "cpu" or "TRITON_INTERPRET=1 gives the CPU to Triton's interpreter"

    return [
        Implementation("native", fn, "cpu", supports, on_cpu, takes_out=takes_out, **more),
        Implementation("triton", fn, triton.DEVICE, supports, _gpu, takes_out=takes_out, **more),
    ]


def _gpu() -> Supports:
    if triton.DEVICE == "cuda" and not torch.cuda.is_available():
        return "there is no GPU here"
    return triton.installed()


compiling = torch.compiler.is_dynamo_compiling
_transforming = torch._C._are_functorch_transforms_active


def carries_tangents() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level`, where PyTorch's own operators alone hand tangents on."""
    return forward_ad._current_level >= 0


def small(elements: int) -> bool:
    """True for a call that PyTorch finishes sooner than our dispatch begins; never inside a compiled graph."""
    return not compiling() and elements <= limit


def small_node(elements: int) -> bool:
    """True for a small call that records gradients, where ours would be a Function in Python: PyTorch's node is faster.

    From then on such calls of contiguous tensors are recorded in C++, if that can be had, and come here no more.
    """
    if compiling():
        return False
    nodes.begin()
    return elements <= limit


recording = torch.is_grad_enabled


@contextmanager
def small_up_to(elements: int) -> Iterator[None]:
    """Public functions give calls of at most so many elements to PyTorch, in all threads."""
    global limit
    before, limit = limit, elements
    try:
        yield
    finally:
        limit = before


def always_native() -> AbstractContextManager[None]:
    """Public functions take our kernels for the smallest call too: what verification and tests are about."""
    return small_up_to(-1)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """True when autograd is recording and one of the tensors takes part."""
    if not recording():
        return False
    for t in tensors:  # noqa: SIM110  at every call; any() over a generator costs three times as much
        if t is not None and t.requires_grad:
            return True
    return False


def recorded(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply(*args)`, where two of the arguments may be one tensor."""
    if compiling():  # Dynamo traces no Function that gets the same tensor twice
        distinct: list[Any] = []
        for arg in args:
            twice = isinstance(arg, torch.Tensor) and any(arg is other for other in distinct)
            distinct.append(arg.view_as(arg) if twice else arg)
        args = tuple(distinct)
    else:
        nodes.begin()  # for the calls to come
    return function.apply(*args)


def fresh(x: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """New contiguous memory for a result like x, or of another shape."""
    # empty_like takes a third of the time of empty with a shape.
    like = shape is None and x.is_contiguous()
    y = torch.empty_like(x) if like else x.new_empty(x.shape if shape is None else shape)
    return y if compiling() else in_huge_pages(y)


def fresh_as(x: torch.Tensor) -> torch.Tensor:
    """New memory for a result that lies as x does, heads inside, say; contiguous where x's rows are not."""
    if x.is_contiguous():
        return fresh(x)
    y = torch.empty_like(x)
    if y.stride()[-1] != 1:
        return fresh(x)
    return y if compiling() else in_huge_pages(y)


def in_huge_pages(t: torch.Tensor) -> torch.Tensor:
    """The same tensor, its large new memory backed by pages of 2 MB at once, where that is possible."""
    return direct.in_huge_pages(t)


def soonest(kernel: Any) -> Callable[..., Any]:
    """A kernel, an operator of ours, as it is called soonest: directly, or PyTorch's way where a graph is captured."""
    return kernel if compiling() else direct.of(kernel)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` as [rows, n] with a contiguous last dimension; a view wherever the strides allow one."""
    if x.dim() == 2 and x.stride()[1] == 1:
        return x
    n = x.shape[-1]
    rows = x.reshape(-1, n) if n else x.reshape(x.numel(), 0)
    return rows if n <= 1 or rows.stride()[1] == 1 else rows.contiguous()


def flat(x: torch.Tensor) -> torch.Tensor:
    """`x` as a kernel takes it whose binding reads a tensor of any dimensions as rows: itself, if contiguous."""
    return x if x.is_contiguous() else as_rows(x)


def flat_out(out: torch.Tensor) -> torch.Tensor:
    """The same for an `out` to be written through; one that cannot be viewed as rows is refused."""
    return out if out.is_contiguous() else out_rows(out)


def dense(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A vector of weights as the kernels read it: its elements next to each other."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def out_rows(out: torch.Tensor) -> torch.Tensor:
    """`out` as [rows, n] to be written through; an `out` that has no such view is refused."""
    if out.dim() == 2 and out.stride()[1] == 1:
        return out
    try:
        rows = (
            out.view(-1, out.shape[-1])
            if out.numel()
            else out.reshape((-1, out.shape[-1]) if out.shape[-1] else (0, 0))
        )
    except RuntimeError:
        raise ValueError(
            f"out= must be viewable as rows, got strides {out.stride()}; pass a contiguous tensor"
        ) from None
    return rows


def writable(out: torch.Tensor) -> bool:
    """True where the kernels can write their rows into `out` itself, whose memory may have gaps between rows only."""
    if out.is_contiguous():
        return True
    if out.dim() == 0 or out.stride()[-1] != 1:
        return False
    step = 0
    for size, stride in zip(reversed(out.shape[:-1]), reversed(out.stride()[:-1]), strict=True):
        if size != 1:
            if stride == 0 or (step and stride != step):
                return False
            step = stride * size
    return True


def check_number(op: str, name: str, value: Any, *, whole: bool = False) -> None:
    """Refuse an option that is no number."""
    if isinstance(value, int if whole else (int, float)) or compiling():
        return
    if not hasattr(value, "__index__" if whole else "__float__"):  # tensors and NumPy's numbers have it
        kind = "a whole number" if whole else "a number"
        raise TypeError(f"{op}: {name} must be {kind}, got {value!r} ({type(value).__name__})")


def alike(t: Any, x: torch.Tensor, shape: Sequence[int]) -> bool:
    """True for a tensor of this shape, in x's dtype and on its device: the usual case, found out quickly."""
    return isinstance(t, torch.Tensor) and t.shape == shape and t.dtype is x.dtype and t.device == x.device


def check_float(op: str, x: Any, name: str = "x", *, least_dim: int = 1) -> None:
    """Refuse what is no floating-point tensor of at least `least_dim` dimensions."""
    if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() >= least_dim:
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"{op}: {name} must be a floating-point tensor, got {short(x.dtype)}; cast it first")
    if x.dim() < least_dim:
        raise ValueError(
            f"{op}: {name} must have at least {least_dim} dimension(s), got shape {tuple(x.shape)}"
        )


def check_like(
    op: str, t: Any, x: torch.Tensor, name: str, shape: Sequence[int], what: str, like: str = "x"
) -> None:
    """Refuse an argument that is not a floating-point tensor of this shape on x's device."""
    check_float(op, t, name, least_dim=0)
    if tuple(t.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)} ({what}), got {tuple(t.shape)}")
    if t.device != x.device:
        raise ValueError(f"{op}: {name} is on {t.device}, {like} on {x.device}; move one of them")


def one_of(*dtypes: torch.dtype) -> str:
    """Their names, each once, as a message says them."""
    return " or ".join(dict.fromkeys(short(dtype) for dtype in dtypes))


def check_mask(op: str, mask: Any, x: torch.Tensor, shape: Sequence[int], what: str) -> None:
    """Refuse a mask that is neither boolean nor additive, or does not broadcast to this shape."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{op}: mask must be a tensor, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, torch.float32, x.dtype):
        raise TypeError(
            f"{op}: mask must be bool (True = keep), or additive in {one_of(x.dtype, torch.float32)}, "
            f"got {short(mask.dtype)}"
        )
    if mask.device != x.device:
        raise ValueError(f"{op}: mask is on {mask.device}, the input on {x.device}; move one of them")
    fits = mask.shape == shape
    if not fits and mask.dim() <= len(shape):
        sizes = zip(mask.shape, shape[len(shape) - mask.dim() :], strict=True)
        fits = all(m in (1, n) for m, n in sizes)
    if not fits:
        raise ValueError(f"{op}: mask must broadcast to {tuple(shape)} ({what}), got {tuple(mask.shape)}")


def spread(mask: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The mask in this shape, stride 0 where it is broadcast; only the last dimension becomes memory."""
    if mask.dim() == 0 or mask.shape[-1] != shape[-1]:
        mask = mask.expand(*mask.shape[:-1], shape[-1])
    if mask.stride()[-1] != 1 and mask.shape[-1] > 1:
        mask = mask.contiguous()
    return mask if mask.shape == shape else mask.expand(shape)


def check_out(
    op: str,
    out: Any,
    like: torch.Tensor,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    *,
    onto: Collection[str] = (),
    **read: Any,
) -> None:
    """Refuse an output that is not on like's device, and of this shape and dtype (like's, by default).

    Nor may it share memory with what is read, except that it may be one of the inputs named in `onto` (overlap.py).
    """
    shape = like.shape if shape is None else shape
    dtype = like.dtype if dtype is None else dtype
    if dtype != like.dtype or not alike(out, like, shape):
        if not isinstance(out, torch.Tensor):
            raise TypeError(f"{op}: out must be a tensor, got {type(out).__name__}")
        if out.shape != shape or out.dtype != dtype or out.device != like.device:
            raise ValueError(
                f"{op}: out must be {short(dtype)} {tuple(shape)} on {like.device}, "
                f"got {short(out.dtype)} {tuple(out.shape)} on {out.device}"
            )
    if not compiling() and not _transforming():  # there memory has no address
        refuse_overlap(op, out, onto, read)


def earlier(out: Sequence[Any], i: int) -> dict[str, Any]:
    """The outputs before one of several, by name: they may not share memory either."""
    return {f"out[{j}]": t for j, t in enumerate(out[:i])}


def nbytes(*tensors: torch.Tensor | None) -> int:
    """The bytes of memory behind the tensors, what is broadcast with stride 0 counted once."""
    total = 0
    for t in tensors:
        if t is not None:
            spread = math.prod(size for size, step in zip(t.shape, t.stride(), strict=True) if step)
            total += (spread if t.numel() else 0) * t.element_size()
    return total


def short(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")
