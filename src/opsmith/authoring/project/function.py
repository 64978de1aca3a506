"""The public function of a project's operator, and its card: checks, memory, autograd, the choice of a kernel.

What the operator computes is the project's own `reference`; what its kernels are called with, its `KERNELS`. Everything
between the two is the same for every operator, and stands here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from opsmith import backends
from opsmith.authoring.project import Kernels
from opsmith.call.arguments import check_device, check_is_tensor, check_number, short
from opsmith.call.checks import sizes_of
from opsmith.call.dispatch import compiling, transformed
from opsmith.call.forms import in_order
from opsmith.call.overlap import refuse_overlap
from opsmith.call.run import Call
from opsmith.call.signature import IN_KERNELS
from opsmith.kernels import triton
from opsmith.measure.pool import tensors_of
from opsmith.operator import (
    Cost,
    Implementation,
    Kind,
    Make,
    Operator,
    Pattern,
    Sample,
    Supports,
    as_pattern,
    register,
)

Before = Callable[..., tuple[Tensor, ...]] | None  # what comes in front of the kernels


def rotate_half(x: Tensor) -> Tensor:
    """(-x2, x1) for the halves x1, x2 of the last axis.

    >>> rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([-3., -4.,  1.,  2.])
    """
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_interleaved(x: Tensor) -> Tensor:
    """(-x2, x1) for each pair x1, x2 of neighbors on the last axis.

    >>> rotate_interleaved(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([-2.,  1., -4.,  3.])
    """
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def fit(kernels: Kernels, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The inputs of a sample in the first combination of dtypes whose first input has this one."""
    column = next((c for c in kernels.signature.columns if c[0] == dtype), (dtype,) * len(tensors))
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
    patterns: Sequence[Pattern] | None = None,
    before: Before = None,
    inner: Callable[..., Any] | None = None,
    even: Sequence[str] = (),
    differentiable: bool = True,
    **more: Any,
) -> Operator:
    """Make and register the card of a project's operator.

    Args:
        kernels: what `project.kernels` gave.
        reference: the operator in plain PyTorch; its parameters are the operator's.
        kind, cost, samples, differentiable: as on every card, and so what else is given: workloads, tolerance, source.
        patterns: the same; by default the reference, where it has one result.
        before: from the operator's tensors to the kernels', where these differ: a matmul in front.
        inner: the reference of what the kernels compute, where there is a `before`.
        even: sizes that must be even.
    """
    kernels.signature = replace(kernels.signature, even=tuple(even))  # which the binding checks
    call = ProjectCall(kernels, reference, before, inner or reference)
    call.learns = differentiable
    kernels.misdeclared = functools.cache(partial(call.misdeclared, samples))
    function = call.form(call.answer, out=True)
    function.__name__ = function.__qualname__ = kernels.name
    function.__doc__ = reference.__doc__
    function.__signature__ = inspect.signature(call.public)  # type: ignore[attr-defined]
    if patterns is None:
        own = as_pattern(kernels.name, reference, samples) if len(kernels.signature.results) == 1 else None
        patterns = () if own is None else (own,)
    floats = [c[0] for c in kernels.signature.columns if c[0].is_floating_point and c[0] != torch.float64]
    return register(
        Operator(
            name=kernels.name,
            kind=Kind(kind),
            function=function,
            reference=reference,
            cost=cost,
            samples=samples,
            implementations=[*call.implementations(), Implementation("eager", reference)],
            patterns=patterns,
            dtypes=tuple(dict.fromkeys(floats)),
            differentiable=differentiable,
            **more,
        )
    )


class ProjectCall(Call):
    """An operator of a project: any parameters, kernels of several back ends, dtypes in combinations."""

    def __init__(
        self, kernels: Kernels, reference: Callable[..., Any], before: Before, inner: Callable[..., Any]
    ) -> None:
        parameters = inspect.signature(reference).parameters
        for name, declared in kernels.signature.attributes.items():
            default = parameters[name].default if name in parameters else "no such parameter"
            if default != (inspect.Parameter.empty if declared is None else declared):
                said = "no default" if default is inspect.Parameter.empty else default
                raise ValueError(
                    f"{kernels.name}: attributes= says {name}: {declared}, the reference has {said}; correct one"
                )
        out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None)
        public: Any = update_wrapper(partial(reference), reference)
        public.__signature__ = inspect.Signature([*parameters.values(), out])
        super().__init__(kernels.signature, public, inner, op=kernels.name)
        self.kernels, self.before, self.columns = kernels, before, kernels.signature.columns
        self.names = tuple(parameters)
        # Tensors come first.
        self.count = len([n for n in self.names if n not in kernels.signature.attributes])
        self.read = len(self.signature.tensors)  # by the kernels
        self.floating = tuple(any(c[i].is_floating_point for c in self.columns) for i in range(self.read))
        # What the binding takes is then what `native_dtypes` does, and results have the first input's dtype.
        self.direct = all(
            set(c) <= {*IN_KERNELS, torch.float64} and {*c[self.read :]} == {c[0]} for c in self.columns
        )

    def form(self, to: Callable[..., Any], *, out: bool = False) -> Callable[..., Any]:
        return in_order(self.public, self.names, {}, to, out=out)

    def answer(self, values: tuple[Any, ...], out: Any) -> Any:
        """A call of the public function, given the values of all its parameters."""
        if self.before is not None:
            values = self.taken_in(values, out)
        return (self.fast.call if self.direct and not compiling() else self.traced)(*values, out)

    def traced(self, *given: Any) -> Any:
        values, out = given[:-1], given[-1]
        return super().traced(*(self.taken_in(values) if self.before is None else values), out)

    def taken_in(self, values: tuple[Any, ...], out: Any = None) -> tuple[Any, ...]:
        """What the kernels take of a call, in their order."""
        return (*self.alike(self.prepare(values[: self.count], out)), *values[self.count :])

    def check(self, values: Sequence[Any]) -> None:
        tensors = values[: self.read]
        self.dtypes(tensors)
        sizes_of(self.op, self.signature, tensors, self.signature.even)
        for one, value in zip(self.signature.numbers, values[self.read :], strict=True):
            check_number(self.op, one.name, value, whole=one.type is int)

    def misdeclared(self, samples: Callable[[Make], Iterator[Sample]]) -> str:
        """How the declared sizes of results differ from those that the reference gives for a sample, "" where none do.

        Memory is made of the declared sizes, and a kernel that computes what the reference does would write past it.
        """
        sizes = self.form(lambda values: [tuple(size) for _, size, _ in self.made(self.taken_in(values))])
        for sample in samples(Make(self.columns[0][0])):
            # What a sample raises is verify's to say: no kernel takes it.
            with torch.no_grad(), suppress(Exception):
                declared = sizes(*sample.args, **sample.kwargs)
                given = [tuple(t.shape) for t in tensors_of(self.public(*sample.args, **sample.kwargs))]
                if declared != given:
                    said = [", ".join(map(str, shapes)) or "no tensor" for shapes in (declared, given)]
                    return (
                        f"{self.kernels.folder / 'operator.py'}: outputs= declares {said[0]} for sample "
                        f"{sample.name!r}, the reference returns {said[1]}; correct one of them"
                    )
        return ""

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        tensors = values[: self.read]
        backend = self.kernels.backend(tensors[0].device)
        if backend is None or transformed() or not self.native_dtypes(tensors):
            return None
        if training and compiling():  # a graph is not differentiated inside a graph
            covered = self.signature.gradients
            for one, t in zip(self.signature.tensors, tensors, strict=True):
                if t.requires_grad and one.name not in covered:
                    return None
        return backend

    def kernel(self, backend: str, backward: bool = False) -> Callable[..., Any]:
        return self.kernels.op(backend, "backward" if backward else "forward")

    def result_dtypes(self, values: Sequence[Any]) -> Sequence[torch.dtype]:
        return self.dtypes(values[: self.read])[self.read :]

    def prepare(self, tensors: Sequence[Any], out: Any = None) -> tuple[Tensor, ...]:
        """What the kernels take, of the operator's own tensors."""
        for name, t in zip(self.names, tensors, strict=False):
            check_is_tensor(self.op, t, name)
            check_device(self.op, t, tensors[0], name, self.names[0])
        if self.before is None:
            return tuple(tensors)
        # What `before` reads is not all among what the kernels read, with which `traced` compares an `out`.
        if out is not None:
            for one in out if isinstance(out, tuple) else (out,):
                refuse_overlap(self.op, one, (), dict(zip(self.names, tensors, strict=False)))
        return self.before(*tensors)

    def alike(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Under autocast, the inputs in the dtype of the first, where they come in a mixture that no kernel takes."""
        first = next((t.dtype for t, floating in zip(tensors, self.floating, strict=True) if floating), None)
        if all(t.dtype is first or not f for t, f in zip(tensors, self.floating, strict=True)):
            return tensors
        if not torch.is_autocast_enabled(tensors[0].device.type):
            return tensors
        if any(self.matches(tensors, column) for column in self.columns):
            return tensors
        return tuple(t.to(first) if f else t for t, f in zip(tensors, self.floating, strict=True))

    def matches(self, tensors: Sequence[Tensor], column: Sequence[torch.dtype]) -> bool:
        """Whether tensors come in a combination of dtypes."""
        return all(t.dtype is d for t, d in zip(tensors, column, strict=False))

    def dtypes(self, tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
        """The dtypes of a call, inputs then outputs.

        Raises:
            TypeError: a combination that is neither one of the card's nor one dtype throughout.
        """
        for column in self.columns:
            if self.matches(tensors, column):
                return column
        floats = {t.dtype for t, floating in zip(tensors, self.floating, strict=True) if floating}
        if len(floats) == 1 and (one := floats.pop()).is_floating_point:
            return (*(t.dtype for t in tensors), *(one for _ in self.signature.results))
        got = ", ".join(short(t.dtype) for t in tensors)
        known = "; ".join(", ".join(short(d) for d in c[: self.read]) for c in self.columns)
        raise TypeError(f"{self.op}: inputs must be of types {known}; got {got}; cast them first")

    def native_dtypes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the kernels take these dtypes; else the reference does."""
        dtypes = self.dtypes(tensors)
        return dtypes in self.columns and all(d in IN_KERNELS for d in dtypes)

    def supports(self, backend: str, values: tuple[Any, ...]) -> Supports:
        """True where this back end can run a call, else the reason why not."""
        try:
            given = self.taken_in(values)
            self.check(given)
            if not self.native_dtypes(given[: self.read]):
                return f"the kernels take no {', '.join(short(t.dtype) for t in given[: self.read])}"
        except (TypeError, ValueError) as wrong:
            return str(wrong)
        return self.kernels.offers(backend)

    def implementations(self, **more: Any) -> list[Implementation]:
        """One for each back end that the project has kernels for."""

        def on(backend: str, name: str, device: str) -> Implementation:
            def run(values: tuple[Any, ...], out: Any) -> Any:
                given = self.taken_in(values)
                self.check(given)
                return self.native(backend, given, out)

            supports = self.form(partial(self.supports, backend))
            offers = partial(self.kernels.offers, backend)
            return Implementation(name, self.form(run, out=True), device, supports, offers, takes_out=True)

        devices = {"cpu": ("native", "cpu"), "triton": ("triton", triton.DEVICE), "cuda": ("cuda", "cuda")}
        devices |= {one.name: (one.name, one.device) for one in backends.installed().values()}
        return [on(b, *devices[b]) for b in self.kernels.backends()]
