"""The public function of a project's operator, and its card: checks, memory, autograd, the choice of a kernel.

What the operator computes is the project's own `reference`; what its kernels are called with, its `KERNELS`. Everything
between the two is the same for every operator, and stands here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from opsmith import backends
from opsmith.call.common import compiling, in_huge_pages, needs_grad, recorded, short, small
from opsmith.kernels import triton
from opsmith.operator import (
    Cost,
    Implementation,
    Kind,
    Make,
    Operator,
    Pattern,
    Sample,
    Supports,
    Tolerance,
    as_pattern,
    register,
)

__all__ = ["Kernels", "card", "fit", "rotate_half", "rotate_interleaved"]

Sizes = Mapping[str, Any]


class Kernels(Protocol):
    """What this file asks of a project's kernels: `opsmith.authoring.project.Kernels`."""

    name: str

    @property
    def inputs(self) -> Mapping[str, tuple[int | str, ...]]: ...
    @property
    def outputs(self) -> Mapping[str, tuple[int | str, ...]]: ...
    @property
    def attributes(self) -> Mapping[str, float | int | bool | None]: ...
    @property
    def gradients(self) -> tuple[str, ...]: ...
    @property
    def columns(self) -> tuple[tuple[torch.dtype, ...], ...]: ...
    def backends(self) -> tuple[str, ...]: ...
    def offers(self, backend: str) -> bool | str: ...
    def backend(self, device: torch.device) -> str | None: ...
    def ops(self, backend: str) -> tuple[Any, Any]: ...


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """(-x2, x1) for the halves x1, x2 of the last axis.

    >>> rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([-3., -4.,  1.,  2.])
    """
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_interleaved(x: torch.Tensor) -> torch.Tensor:
    """(-x2, x1) for each pair x1, x2 of neighbors on the last axis.

    >>> rotate_interleaved(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([-2.,  1., -4.,  3.])
    """
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def fit(kernels: Kernels, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inputs of a sample in the first combination of dtypes whose first input has this one."""
    column = next((c for c in kernels.columns if c[0] == dtype), (dtype,) * len(tensors))
    return tuple(
        t if t.dtype == torch.bool else t.to(d) for t, d in zip(tensors, column[: len(tensors)], strict=True)
    )


def card(
    kernels: Kernels,
    reference: Callable[..., Any],
    *,
    kind: str,
    cost: Callable[..., Cost],
    samples: Callable[[Make], Iterator[Sample]],
    workloads: Callable[[Make], Iterator[Sample]] | None = None,
    patterns: Sequence[Pattern] = (),
    tolerance: Tolerance | None = None,
    before: Callable[..., tuple[torch.Tensor, ...]] | None = None,
    inner: Callable[..., Any] | None = None,
    even: Sequence[str] = (),
    source: str = "",
) -> Operator:
    """Make and register the card of a project's operator.

    Args:
        kernels: what `project.kernels` gave.
        reference: the operator in plain PyTorch; its parameters are the operator's.
        kind, cost, samples, workloads, tolerance, source: as on every card.
        patterns: the same; the reference is the pattern where there is none.
        before: from the operator's tensors to the kernels', where these differ: a matmul in front.
        inner: the reference of what the kernels compute, where there is a `before`.
        even: sizes that must be even.
    """
    call = Call(kernels, reference, before, inner or reference, tuple(even))

    def function(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    function.__name__ = function.__qualname__ = kernels.name
    function.__doc__ = reference.__doc__
    parameters = inspect.signature(reference).parameters.values()
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
    function.__signature__ = inspect.Signature([*parameters, out])  # type: ignore[attr-defined]
    floats = [c[0] for c in kernels.columns if c[0].is_floating_point and c[0] != torch.float64]
    return register(
        Operator(
            name=kernels.name,
            kind=Kind(kind),
            function=function,
            reference=reference,
            cost=cost,
            samples=samples,
            workloads=workloads,
            implementations=[*call.implementations(), Implementation("eager", reference)],
            patterns=patterns
            or (() if (own := as_pattern(kernels.name, reference, samples)) is None else (own,)),
            tolerance=tolerance or Tolerance(),
            dtypes=tuple(dict.fromkeys(floats)),
            outputs=len(kernels.outputs),
            source=source,
        )
    )


class Call:
    """One operator: how a call becomes a call of a kernel."""

    def __init__(
        self,
        kernels: Kernels,
        reference: Callable[..., Any],
        before: Callable[..., tuple[torch.Tensor, ...]] | None,
        inner: Callable[..., Any],
        even: tuple[str, ...],
    ) -> None:
        self.kernels, self.name, self.reference = kernels, kernels.name, reference
        self.before, self.inner, self.even = before, inner, even
        parameters = inspect.signature(reference).parameters
        self.defaults = {n: p.default for n, p in parameters.items()}
        self.names = tuple(parameters)
        self.count = len([n for n in parameters if n not in kernels.attributes])  # tensors, which come first
        self.inputs = tuple(kernels.inputs.items())
        self.outputs = tuple(kernels.outputs.items())
        self.floating = tuple(
            any(c[i].is_floating_point for c in kernels.columns) for i in range(len(self.inputs))
        )
        self.function = _differentiated(self)

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        values = self.bind(args, kwargs)
        tensors, attributes = self.alike(self.prepare(values[: self.count])), values[self.count :]
        if self.before is None:
            values[: self.count] = tensors
        dtypes = self.dtypes(tensors)
        sizes = self.sizes(tensors)
        backend = None if dtypes is None else self.kernels.backend(tensors[0].device)
        if backend is None or small(max(t.numel() for t in tensors)):
            return self.store(self.reference(*values), out)
        if needs_grad(*tensors):
            missing = [
                name
                for (name, _), t in zip(self.inputs, tensors, strict=True)
                if t.requires_grad and name not in self.kernels.gradients
            ]
            if missing and compiling():  # a graph is not differentiated inside a graph
                return self.store(self.reference(*values), out)
            return self.store(recorded(self.function, backend, attributes, *tensors), out)
        assert dtypes is not None  # else there is no back end
        return self.run(backend, tensors, attributes, dtypes, sizes, out)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values of all parameters, in order."""
        values = list(args)
        if len(values) > len(self.names):
            raise TypeError(f"{self.name} takes {', '.join(self.names)}; got {len(values)} values")
        for name in self.names[len(values) :]:
            if name in kwargs:
                values.append(kwargs[name])
            elif self.defaults[name] is inspect.Parameter.empty:
                raise TypeError(f"{self.name}: {name} is missing")
            else:
                values.append(self.defaults[name])
        if len(args) + len(kwargs) > len(values) or any(name not in self.names for name in kwargs):
            raise TypeError(f"{self.name} takes {', '.join(self.names)}; got also {', '.join(kwargs)}")
        return values

    def prepare(self, tensors: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """What the kernels take, of the operator's own tensors."""
        for name, t in zip(self.names, tensors, strict=False):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{self.name}: {name} must be a tensor, got {type(t).__name__}")
            if t.device != tensors[0].device:
                raise ValueError(
                    f"{self.name}: {name} is on {t.device}, {self.names[0]} on {tensors[0].device}; move one of them"
                )
        return tuple(tensors) if self.before is None else self.before(*tensors)

    def alike(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Under autocast, the inputs in the dtype of the first, where they come in a mixture that no kernel takes."""
        first = next((t.dtype for t, floating in zip(tensors, self.floating, strict=True) if floating), None)
        if all(t.dtype is first or not f for t, f in zip(tensors, self.floating, strict=True)):
            return tensors
        if not torch.is_autocast_enabled(tensors[0].device.type):
            return tensors
        if any(all(t.dtype is d for t, d in zip(tensors, c, strict=False)) for c in self.kernels.columns):
            return tensors
        return tuple(t.to(first) if f else t for t, f in zip(tensors, self.floating, strict=True))

    def dtypes(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.dtype, ...] | None:
        """The dtypes of the outputs; None where the reference takes the call.

        Raises:
            TypeError: a combination that is neither one of the card's nor one dtype throughout.
        """
        count = len(tensors)
        for column in self.kernels.columns:
            if all(t.dtype is d for t, d in zip(tensors, column[:count], strict=True)):
                return column[count:] if all(d in _NATIVE for d in column) else None
        floats = {t.dtype for t, floating in zip(tensors, self.floating, strict=True) if floating}
        if len(floats) == 1 and next(iter(floats)).is_floating_point:
            return None
        got = ", ".join(short(t.dtype) for t in tensors)
        known = "; ".join(", ".join(short(d) for d in c[:count]) for c in self.kernels.columns)
        raise TypeError(f"{self.name}: inputs must be of types {known}; got {got}; cast them first")

    def sizes(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """What each symbol stands for.

        Raises:
            ValueError: a shape that does not fit.
        """
        found: dict[str, Any] = {}
        for (name, sizes), t in zip(self.inputs, tensors, strict=True):
            shape = t.shape
            if sizes and sizes[0] == "...":
                lead = len(shape) - len(sizes) + 1
                if lead < 0 or found.setdefault("...", shape[:lead]) != shape[:lead]:
                    self.refuse(name, sizes, shape, found)
                sizes, shape = sizes[1:], shape[lead:]
            if len(sizes) != len(shape):
                self.refuse(name, sizes, t.shape, found)
            for symbol, size in zip(sizes, shape, strict=True):
                if (found.setdefault(symbol, size) if isinstance(symbol, str) else symbol) != size:
                    self.refuse(name, dict(self.inputs)[name], t.shape, found)
        for symbol in self.even:
            if found[symbol] % 2:
                raise ValueError(
                    f"{self.name}: {symbol} must be even, as its elements are pairs; got {found[symbol]}"
                )
        return found

    def refuse(self, name: str, sizes: Sequence[Any], shape: Sequence[int], found: Sizes) -> None:
        """Raise for a shape."""
        known = ", ".join(f"{k} = {tuple(v) if k == '...' else v}" for k, v in found.items() if k in sizes)
        raise ValueError(
            f"{self.name}: {name} must have shape [{', '.join(map(str, sizes))}]"
            f"{f' with {known}' if known else ''}, got {tuple(shape)}"
        )

    def run(
        self,
        backend: str,
        tensors: Sequence[torch.Tensor],
        attributes: Sequence[Any],
        dtypes: Sequence[torch.dtype],
        sizes: Sizes,
        out: Any = None,
    ) -> Any:
        """Call the kernel, with memory for its results."""
        given = () if out is None else out if isinstance(out, tuple) else (out,)
        results = []
        for i, ((_, symbols), dtype) in enumerate(zip(self.outputs, dtypes, strict=True)):
            shape: list[int] = []
            for d in symbols:
                shape += sizes[d] if d == "..." else (sizes[d] if isinstance(d, str) else d,)
            if given:
                self.check_out(given, i, shape, dtype, tensors[0].device)
            if given and given[i].is_contiguous():
                results.append(given[i])
            else:
                t = torch.empty(shape, dtype=dtype, device=tensors[0].device)
                results.append(t if compiling() else in_huge_pages(t))
        flat = [t if t.is_contiguous() else t.contiguous() for t in tensors]
        outs = {name: t for (name, _), t in zip(self.outputs, results, strict=True)}
        self.kernels.ops(backend)[0](*flat, *attributes, **outs)
        result = results[0] if len(results) == 1 else tuple(results)
        return self.store(result, out)

    def check_out(
        self, given: Any, i: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Refuse an `out` of another type, shape, dtype or device."""
        many = len(self.outputs)
        if len(given) != many or not all(isinstance(t, torch.Tensor) for t in given):
            what = "a tensor" if many == 1 else f"a tuple of {many} tensors"
            raise TypeError(f"{self.name}: out must be {what}, got {type(given[0]).__name__}")
        t = given[i]
        if list(t.shape) != list(shape) or t.dtype != dtype or t.device != device:
            raise ValueError(
                f"{self.name}: out must be {short(dtype)} {tuple(shape)} on {device}, "
                f"got {short(t.dtype)} {tuple(t.shape)} on {t.device}"
            )

    def store(self, result: Any, out: Any) -> Any:
        """The result, in `out` where one was given."""
        if out is None or result is out:
            return result
        results = result if isinstance(result, tuple) else (result,)
        given = out if isinstance(out, tuple) else (out,)
        for i, (mine, theirs) in enumerate(zip(results, given, strict=False)):
            self.check_out(given, i, mine.shape, mine.dtype, mine.device)
            if theirs is not mine:
                theirs.copy_(mine)
        return out

    def supports(self, backend: str, *args: Any, **kwargs: Any) -> Supports:
        """True where this back end can run a call, else the reason why not."""
        try:
            tensors = self.prepare(self.bind(args, kwargs)[: self.count])
            if self.dtypes(tensors) is None:
                return f"the kernels take float32, bfloat16 and float16, not {short(tensors[0].dtype)}"
            self.sizes(tensors)
        except (TypeError, ValueError) as wrong:
            return str(wrong)
        return self.kernels.offers(backend)

    def implementations(self) -> list[Implementation]:
        """One for each back end that the project has kernels for."""

        def on(backend: str, name: str, device: str) -> Implementation:
            def fn(*args: Any, out: Any = None, **kwargs: Any) -> Any:
                values = self.bind(args, kwargs)
                tensors = self.prepare(values[: self.count])
                dtypes = self.dtypes(tensors)
                assert dtypes is not None  # `supports` has said so
                return self.run(backend, tensors, values[self.count :], dtypes, self.sizes(tensors), out)

            def supports(*args: Any, **kwargs: Any) -> Supports:
                return self.supports(backend, *args, **kwargs)

            return Implementation(
                name, fn, device, supports, lambda: self.kernels.offers(backend), takes_out=True
            )

        devices = {"cpu": ("native", "cpu"), "triton": ("triton", triton.DEVICE), "cuda": ("cuda", "cuda")}
        devices |= {one.name: (one.name, one.device) for one in backends.installed().values()}
        return [on(b, *devices[b]) for b in self.kernels.backends()]


def _differentiated(call: Call) -> type[torch.autograd.Function]:
    """Forward and backward of an operator: both its kernels, and autograd of the reference for what these leave out."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, backend: str, attributes: list[Any], *tensors: torch.Tensor) -> Any:
            dtypes = call.dtypes(tensors)
            assert dtypes is not None
            ctx.save_for_backward(*tensors)
            ctx.backend, ctx.attributes = backend, attributes
            return call.run(backend, tensors, attributes, dtypes, call.sizes(tensors))

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            tensors = ctx.saved_tensors
            wanted = [n for (n, _), w in zip(call.inputs, ctx.needs_input_grad[2:], strict=True) if w]
            grads: dict[str, torch.Tensor] = {}
            for (name, _), t in zip(call.inputs, tensors, strict=True):
                if name in wanted and name in call.kernels.gradients:
                    grads[name] = torch.empty(t.shape, dtype=t.dtype, device=t.device)
            if grads:
                flat = [t if t.is_contiguous() else t.contiguous() for t in (*slopes, *tensors)]
                outs = {f"d{name}": t for name, t in grads.items()}
                call.kernels.ops(ctx.backend)[1](*flat, *ctx.attributes, **outs)
            rest = [n for n in wanted if n not in grads]
            if rest:
                grads |= _through_reference(call, tensors, ctx.attributes, slopes, rest)
            return (None, None, *(grads.get(name) for name, _ in call.inputs))

    Function.__name__ = call.name
    return Function


def _through_reference(
    call: Call,
    tensors: Sequence[torch.Tensor],
    attributes: Sequence[Any],
    slopes: Sequence[Any],
    names: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Gradients by autograd of the reference, which is computed once more."""
    with torch.enable_grad():
        leaves = [
            t.detach().requires_grad_(name in names)
            for (name, _), t in zip(call.inputs, tensors, strict=True)
        ]
        results = call.inner(*leaves, *attributes)
        results = results if isinstance(results, tuple) else (results,)
        asked = [t for t in leaves if t.requires_grad]
        found = torch.autograd.grad(results, asked, slopes, allow_unused=True)
    return {
        n: g for n, g in zip([n for n, _ in call.inputs if n in names], found, strict=True) if g is not None
    }


_NATIVE = (torch.float32, torch.bfloat16, torch.float16, torch.bool)
