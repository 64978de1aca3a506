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
from opsmith.call.arguments import short
from opsmith.call.checks import check_outputs, sizes_of
from opsmith.call.dispatch import compiling, needs_grad, recorded, small
from opsmith.call.run import Call
from opsmith.call.signature import Signature
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


class Kernels(Protocol):
    """What this file asks of a project's kernels: `opsmith.authoring.project.Kernels`."""

    name: str
    signature: Signature

    @property
    def outputs(self) -> Mapping[str, tuple[int | str, ...]]: ...
    @property
    def attributes(self) -> Mapping[str, float | int | bool | None]: ...
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
    call = ProjectCall(kernels, reference, before, inner or reference, tuple(even))

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


class ProjectCall(Call):
    """An operator of a project: any parameters, kernels of several back ends, dtypes in combinations."""

    def __init__(
        self,
        kernels: Kernels,
        reference: Callable[..., Any],
        before: Callable[..., tuple[torch.Tensor, ...]] | None,
        inner: Callable[..., Any],
        even: tuple[str, ...],
    ) -> None:
        super().__init__(kernels.signature, reference, inner, op=kernels.name)
        self.kernels, self.reference, self.before, self.even = kernels, reference, before, even
        parameters = inspect.signature(reference).parameters
        self.defaults = {n: p.default for n, p in parameters.items()}
        self.names = tuple(parameters)
        self.count = len([n for n in parameters if n not in kernels.attributes])  # tensors, which come first
        count = len(self.signature.tensors)
        self.floating = tuple(any(c[i].is_floating_point for c in kernels.columns) for i in range(count))

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        values = self.bind(args, kwargs)
        tensors = self.alike(self.prepare(values[: self.count]))
        given = (*tensors, *values[self.count :])
        if self.before is None:
            values[: self.count] = tensors
        dtypes = self.dtypes(tensors)
        sizes_of(self.op, self.signature, tensors, self.even)
        if dtypes is None:
            result = self.reference(*values)
            if out is not None:
                results = result if isinstance(result, tuple) else (result,)
                declared = zip(self.signature.results, results, strict=True)
                made = [(one, t.shape, t.dtype) for one, t in declared]
                check_outputs(self.op, out, made, tensors[0], dict(zip(self.names, values, strict=True)))
            return self.store(result, out)
        if out is not None:
            self.check_out(given, out)
        backend = self.kernels.backend(tensors[0].device)
        if backend is None or small(max(t.numel() for t in tensors)):
            return self.store(self.reference(*values), out)
        if needs_grad(*tensors):
            covered = self.signature.gradients
            missing = [
                one.name
                for one, t in zip(self.signature.tensors, tensors, strict=True)
                if t.requires_grad and one.name not in covered
            ]
            if missing and compiling():  # a graph is not differentiated inside a graph
                return self.store(self.reference(*values), out)
            return self.store(recorded(self.function, backend, *given), out)
        return self.native(backend, given, out)

    def kernel(self, backend: str) -> Callable[..., Any]:
        return self.kernels.ops(backend)[0]  # type: ignore[no-any-return]

    def kernel_of_gradients(self, backend: str) -> Callable[..., Any]:
        return self.kernels.ops(backend)[1]  # type: ignore[no-any-return]

    def result_dtypes(self, values: Sequence[Any]) -> Sequence[torch.dtype]:
        dtypes = self.dtypes(values[: len(self.signature.tensors)])
        assert dtypes is not None  # else the reference takes the call
        return dtypes

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values of all parameters, in order."""
        values = list(args)
        if len(values) > len(self.names):
            raise TypeError(f"{self.op} takes {', '.join(self.names)}; got {len(values)} values")
        for name in self.names[len(values) :]:
            if name in kwargs:
                values.append(kwargs[name])
            elif self.defaults[name] is inspect.Parameter.empty:
                raise TypeError(f"{self.op}: {name} is missing")
            else:
                values.append(self.defaults[name])
        if len(args) + len(kwargs) > len(values) or any(name not in self.names for name in kwargs):
            raise TypeError(f"{self.op} takes {', '.join(self.names)}; got also {', '.join(kwargs)}")
        return values

    def prepare(self, tensors: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """What the kernels take, of the operator's own tensors."""
        for name, t in zip(self.names, tensors, strict=False):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{self.op}: {name} must be a tensor, got {type(t).__name__}")
            if t.device != tensors[0].device:
                raise ValueError(
                    f"{self.op}: {name} is on {t.device}, {self.names[0]} on {tensors[0].device}; move one of them"
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
        raise TypeError(f"{self.op}: inputs must be of types {known}; got {got}; cast them first")

    def supports(self, backend: str, *args: Any, **kwargs: Any) -> Supports:
        """True where this back end can run a call, else the reason why not."""
        try:
            tensors = self.prepare(self.bind(args, kwargs)[: self.count])
            if self.dtypes(tensors) is None:
                return f"the kernels take float32, bfloat16 and float16, not {short(tensors[0].dtype)}"
            sizes_of(self.op, self.signature, tensors, self.even)
        except (TypeError, ValueError) as wrong:
            return str(wrong)
        return self.kernels.offers(backend)

    def implementations(self, **more: Any) -> list[Implementation]:
        """One for each back end that the project has kernels for."""

        def on(backend: str, name: str, device: str) -> Implementation:
            def fn(*args: Any, out: Any = None, **kwargs: Any) -> Any:
                values = self.bind(args, kwargs)
                tensors = self.prepare(values[: self.count])
                sizes_of(self.op, self.signature, tensors, self.even)
                return self.native(backend, (*tensors, *values[self.count :]), out)

            def supports(*args: Any, **kwargs: Any) -> Supports:
                return self.supports(backend, *args, **kwargs)

            return Implementation(
                name, fn, device, supports, lambda: self.kernels.offers(backend), takes_out=True
            )

        devices = {"cpu": ("native", "cpu"), "triton": ("triton", triton.DEVICE), "cuda": ("cuda", "cuda")}
        devices |= {one.name: (one.name, one.device) for one in backends.installed().values()}
        return [on(b, *devices[b]) for b in self.kernels.backends()]


_NATIVE = (torch.float32, torch.bfloat16, torch.float16, torch.bool)
