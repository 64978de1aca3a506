"""The two directions in which an operator is timed: what each takes, costs and computes, and whether that is right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith import measure
from opsmith.measure.pool import tensors_of, with_tensors
from opsmith.operator import Cost, Kind, Operator, Sample
from opsmith.proof.verify import forward, with_leaves

Calls = Mapping[str, Callable[..., Any]]  # contestants, by their names


class _Pass:
    """One direction of an operator on one sample, as contestants call it."""

    _card: Operator
    _sample: Sample
    _beside: Any  # what is taken beside the arguments: outputs to write into, or their gradients
    _defined: Any  # what a function of the operator's arguments gives
    _computed: Any  # what a contestant gives

    def check(
        self, contestants: Calls, theirs: Collection[str], limit: int, peak: Mapping[str, int]
    ) -> tuple[list[str], list[str]]:
        """Hold contestants to the card's tolerance on the very workload that is timed.

        Returns: those that are right, and notes, also on those of `theirs` that are not.

        Raises:
            WrongResult: one of ours computes something else.
        """
        exact, eager, notes = _truth(self._card, self._sample, self._defined, limit, peak)
        right = []
        for name, call in contestants.items():
            try:
                _hold(self._card, self._sample, name, tensors_of(self._computed(call)), eager, exact)
            except measure.WrongResult as wrong:
                if name not in theirs:  # a wrong baseline is no fault of the operator's
                    raise
                notes.append(str(wrong))
            else:
                right.append(name)
        return right, notes

    def inputs(self) -> tuple[Any, ...]:
        """A set of inputs of its own: the sample's values, and what is taken beside them."""
        return with_tensors((self._sample.args, dict(self._sample.kwargs), self._beside), _copy)  # type: ignore[no-any-return]


class Forward(_Pass):
    """The results of the operator; contestants take `(args, kwargs, outs)`."""

    direction = "forward"
    _defined = staticmethod(forward)

    def __init__(self, card: Operator, sample: Sample):
        self._card, self._sample = card, sample
        like = card.reference(*sample.args, **sample.kwargs)
        outs = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors_of(like))
        self._beside = outs if isinstance(like, tuple) else outs[0]
        self.largest_output = max((t.nbytes for t in outs), default=0)  # bytes

    def cost(self) -> Cost:
        """What the card says."""
        return self._card.cost_of(self._sample)

    def _computed(self, call: Callable[..., Any]) -> Any:
        args, kwargs, outs = self.inputs()
        for out in tensors_of(outs):
            measure.poison(out)
        return call(args, kwargs, outs)


class Backward(_Pass):
    """The gradients of all inputs; contestants take `(args, kwargs, seeds)` and run their forward off the clock.

    A loss may compute its gradients already while it goes forward, so of losses both are timed together.
    """

    def __init__(self, card: Operator, sample: Sample):
        self._card, self._sample = card, sample
        self._both = card.kind is Kind.LOSS
        self.direction = "forward + backward" if self._both else "backward"
        args, kwargs, leaves = with_leaves(sample.args, dict(sample.kwargs))
        saved: dict[int, int] = {}

        def keep(t: Tensor) -> Tensor:
            saved[t.untyped_storage().data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            outputs = [t for t in tensors_of(card.function(*args, **kwargs)) if t.requires_grad]
        generator = torch.Generator().manual_seed(0)
        self._beside = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
        gradients = torch.autograd.grad(outputs, leaves, self._beside, allow_unused=True)
        written = {t.untyped_storage().data_ptr(): t.nbytes for t in gradients if t is not None}
        self.largest_output = max(written.values(), default=0)
        self._bytes = sum(t.nbytes for t in self._beside) + sum(saved.values()) + sum(written.values())

    def contestant(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The gradients of a function of the operator's arguments."""
        return (lambda *given: _ready(fn, *given)()) if self._both else measure.Prepared(partial(_ready, fn))

    def cost(self) -> Cost:
        """What the card says of its gradient, of a loss beside the forward pass.

        Bytes: the gradients that come in and go out, and what our forward has kept for its backward; of a loss, its
        inputs and their gradients.
        """
        forward = self._card.cost_of(self._sample)
        if self._both:
            gradients = sum(t.nbytes for t in with_leaves(self._sample.args, self._sample.kwargs)[2])
            return Cost((1 + self._card.gradient.flops) * forward.flops, forward.min_bytes + gradients)
        return Cost(self._card.gradient.flops * forward.flops, self._bytes)

    def _defined(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
        return list(tensors_of(_ready(fn, args, kwargs, self._beside)()))

    def _computed(self, call: Callable[..., Any]) -> Any:
        return call(*self.inputs())


Pass = Forward | Backward


def cold_data(flush: Callable[[], object]) -> Callable[[], None]:
    """Evicts the caches before a backward pass is timed, and then brings autograd's own code back.

    A node of a model's backward pass is called by an engine that has just called another; only its data is cold.
    Without this, 0.25 ms of code that comes from memory line by line was counted as the operator's
    (docs/decisions/013).
    """
    leaf, seed = torch.ones(1, requires_grad=True), torch.ones(1)

    def evict() -> None:
        flush()
        # A small backward pass through a node in Python and one in C++.
        torch.autograd.grad([_Same.apply(leaf) * 2.0], [leaf], [seed], allow_unused=True)

    return evict


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _ready(fn: Callable[..., Any], args: Any, kwargs: Any, seeds: Any) -> Callable[[], Any]:
    """Run a function forward; returns the call that goes backward."""
    args, kwargs, leaves = with_leaves(args, kwargs)
    outputs = [t for t in tensors_of(fn(*args, **kwargs)) if t.requires_grad]
    seeds = [seed.to(t.dtype) for seed, t in zip(seeds, outputs, strict=True)]
    return partial(torch.autograd.grad, outputs, leaves, seeds, allow_unused=True)


def _truth(
    card: Operator, sample: Sample, run: Callable[..., Any], limit: int, peak: Mapping[str, int]
) -> tuple[list[Tensor], list[list[Tensor]], list[str]]:
    """The float64 results, eager's in the sample's dtype, in both its spellings, and a note where float64 is too large.

    Where it is, float32 stands in for it if the sample is in half precision; else there is nothing to compare with.
    """
    spellings = {card.eager: None, card.reference: None}
    eager = [run(fn, sample.args, dict(sample.kwargs)) for fn in spellings]
    dtype = next(t.dtype for t in tensors_of((sample.args, dict(sample.kwargs))) if t.is_floating_point())
    most = 2 * max(peak.values(), default=0)
    for wide in (torch.float64, torch.float32):
        if wide.itemsize > dtype.itemsize and most * wide.itemsize // dtype.itemsize <= limit:
            twin = sample.cast(wide)
            exact = [t.double() for t in run(card.reference, twin.args, dict(twin.kwargs))]
            note = "checked against float32: float64 would need more memory"
            return exact, eager, [note] * (wide == torch.float32)
    return [], eager, ["checked on the samples only: of this size, float64 would need more memory"]


def _hold(
    card: Operator, sample: Sample, name: str, got: Any, eager: list[list[Tensor]], exact: list[Tensor]
) -> None:
    for mine, right, *theirs in zip(got, exact, *eager, strict=bool(exact)):
        verdicts = [card.tolerance.check(mine, one, right) for one in theirs]
        if not any(verdict.ok for verdict in verdicts):
            verdict = max(verdicts, key=lambda v: v.bound)
            where = f"wrong value in workload {sample.name!r}"
            raise measure.WrongResult(f"{card.name} {name}", where, verdict.why, verdict.error, verdict.bound)


def _copy(t: Tensor) -> Tensor:
    """A tensor of its own, in the same strides."""
    if 0 in t.stride():  # expanded: nothing but the few elements behind it takes memory
        return t
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    with torch.no_grad():
        return copy.copy_(t).requires_grad_(t.requires_grad)
