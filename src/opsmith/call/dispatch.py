"""Who computes a call: whether a kernel of ours can run, and whether PyTorch's own is done before one has begun.

docs/authoring/calls.md has the path of a call. A question to a tensor takes 50 to 100 ns, a helper 30 to 50, and where
weights stream through the caches each of them waits for memory: so a public function asks nothing that the kernel's
binding refuses itself, and the checks run after that, to say what to do. Where PyTorch's builtin is done before a call
of ours begins, it is called first (`embedding`), and what it would take in silence and the function does not
(broadcasting, promotion, another device) is tested on the way. Which of the two an operator takes is measured:
`benchmarks/overhead.py`, docs/guide/small-calls.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import forward_ad

from opsmith.call.arguments import short
from opsmith.call.fast import nodes
from opsmith.kernels import libraries, triton
from opsmith.operator import Implementation, Supports

Tensor = torch.Tensor

SMALL = 4096  # what sizes of products and gathers that PyTorch computes sooner are multiples of
limit = SMALL  # the same, or what `small_up_to` says; read as `dispatch.limit`, for it changes

NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.constant
def native_library(*kernels: str) -> bool:
    """True once the native libraries of these kernels, or all, are loaded (built first if need be).

    A constant in a compiled graph.
    """
    return libraries.load(*kernels)


def native(x: torch.Tensor, op: str, *more: str) -> bool | str:
    """True when a kernel of ours, `torch.ops.opsmith.op`, can take this tensor, else the reason why not.

    `more` are kernels that the same call needs: what of them has to be built is built at once.
    """
    if transformed():
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
exporting = torch.compiler.is_exporting  # by torch.export, with Dynamo or without
_transforming = torch._C._are_functorch_transforms_active


def carries_tangents() -> bool:
    """True inside `torch.autograd.forward_ad.dual_level`, where PyTorch's own operators alone hand tangents on."""
    return forward_ad._current_level >= 0


def transformed() -> bool:
    """True inside torch.func's transforms and forward-mode differentiation, for which kernels have no rules."""
    return not compiling() and (_transforming() or carries_tangents())


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor, which nothing is before somebody has imported these."""
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


@contextmanager
def small_up_to(elements: int) -> Iterator[None]:
    """Public functions give PyTorch products and gathers up to multiples of this, in all threads."""
    global limit
    before, limit = limit, elements
    try:
        yield
    finally:
        limit = before


def always_native() -> AbstractContextManager[None]:
    """Public functions take our kernels for every product and gather: what verification and tests are about."""
    return small_up_to(-1)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """True when autograd is recording and one of the tensors takes part."""
    if not torch.is_grad_enabled():
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


def autocasts(x: torch.Tensor) -> bool:
    """Whether autocast is at work on x's device."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def uncast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """In here plain PyTorch computes in the dtype of its tensors, as kernels do, whatever autocast wants of it."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def once(op: str) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """A Function's backward whose results are not differentiated: a kernel has no derivative that autograd knows.

    The error leads to the tensors that they were made of. PyTorch's `once_differentiable` has none where the gradient
    of the result needs none, and autograd goes past it to what was asked for.
    """

    def decorated(backward: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(backward)
        def run(ctx: Any, *slopes: Any) -> tuple[Any, ...]:
            twice = torch.is_grad_enabled() and not compiling()
            through = (*slopes, *ctx.saved_tensors) if twice else ()  # some backwards write to what is saved
            with torch.no_grad():
                gradients: tuple[Any, ...] = backward(ctx, *slopes)
            if not twice:
                return gradients
            there = [g for g in gradients if g is not None]
            found = iter(_Once.apply(op, len(there), *there, *through, torch.empty(0, requires_grad=True)))
            return tuple(None if g is None else next(found) for g in gradients)

        return run

    return decorated


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ctx.op = op
        return tuple(t.detach() for t in tensors[:count] if t is not None)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            f"trying to differentiate twice through opsmith::{ctx.op}, which is a kernel; where second derivatives are "
            "needed, call the operator's definition in plain PyTorch, opsmith.operator.registry()[name].reference, or "
            "opsmith.restore(model)"
        )
