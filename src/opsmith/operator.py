"""The card of an operator: what is true of it, written once, asked by everyone else.

Dispatch, verification, benchmarks, the compiler's recognizer, the profiler and the docs all read the card;
none of them keeps a list of operators of its own. A new operator is one card, one kernel and one test.
"""

from __future__ import annotations

import enum
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from opsmith import backends
from opsmith.implementation import Implementation as Implementation, Supports as Supports


class Kind(enum.Enum):
    """Operator classes, as the profiler and the plan group them."""

    MATMUL = "matmul"
    ATTENTION = "attention"
    NORM = "norm"
    ROPE = "rope"
    EMBEDDING = "embedding"
    SOFTMAX = "softmax"
    ACTIVATION = "activation"
    CACHE = "cache"
    LOSS = "loss"
    MLA = "mla"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"{value!r} is no kind of operator; there are: {', '.join(k.value for k in cls)}")


@dataclass(frozen=True)
class Cost:
    """The least work an operator can do: operations, and bytes read plus written once.

    `int8_ops` of the operations are products of int8 with int8, for which machines have a matmul rate of their own.
    """

    flops: float
    min_bytes: float
    int8_ops: float = 0.0

    @property
    def intensity(self) -> float:
        """Operations per byte, the x axis of a roofline."""
        return self.flops / self.min_bytes if self.min_bytes else math.inf


@dataclass(frozen=True)
class Sample:
    """One input worth trying, with the name that a report shows for it."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def cast(self, dtype: torch.dtype) -> Sample:
        """The same sample with floating-point tensors in another dtype (float64 for the reference)."""
        return Sample(
            self.name,
            tuple(_cast(a, dtype) for a in self.args),
            {k: _cast(v, dtype) for k, v in self.kwargs.items()},
        )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    return value


class Make:
    """A seeded source of tensors for `samples`, so that a card says shapes and ranges only."""

    def __init__(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0):
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Normal numbers of the given shape in the dtype under test."""
        values = torch.randn(shape, generator=self._generator, dtype=torch.float64) * scale + shift
        return values.to(self.dtype).to(self.device)

    def ids(self, *shape: int, high: int) -> Tensor:
        """Integers in [0, high)."""
        return torch.randint(0, high, shape, generator=self._generator).to(self.device)

    def mask(self, *shape: int, keep: float = 0.7) -> Tensor:
        """A boolean mask in which about `keep` of the entries are True."""
        return (torch.rand(shape, generator=self._generator) < keep).to(self.device)


@dataclass(frozen=True)
class Verdict:
    """The outcome of one comparison: passed or not, the error, the bound it was held to, and why.

    `eager` is eager's own error relative to the largest exact magnitude, NaN where that was not found.
    """

    ok: bool
    error: float
    bound: float
    why: str = ""
    eager: float = math.nan

    @property
    def failure(self) -> str:
        """Why it failed, whether or not it says so itself; nothing where it passed."""
        return "" if self.ok else self.why or f"error {self.error:.3g} above the bound {self.bound:.3g}"


@dataclass(frozen=True)
class Tolerance:
    """Error against float64 may be `factor` times eager's own plus `ulps` units in the last place.

    The unit is that of the output dtype at the output's scale (its largest finite magnitude). Infinities and
    NaN must stand exactly where the reference has them, so NaN can never pass as "not larger than the bound".
    """

    factor: float = 2.0
    ulps: float = 1.0

    def check(self, got: Tensor, eager: Tensor, exact: Tensor) -> Verdict:
        """Hold `got` to the policy, given eager's result in the same dtype and the float64 reference."""
        return self.check_parts([(got, eager, exact)])

    def check_parts(self, parts: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Verdict:
        """The same of a result that comes part by part, one after the other: float64 of a whole one may need memory."""
        error = eager_error = scale = 0.0
        dtype = None
        for got, eager, exact in parts:
            if got.shape != exact.shape:
                why = f"shape {tuple(got.shape)}, expected {tuple(exact.shape)}"
                return Verdict(False, math.inf, 0.0, why)
            if not got.dtype.is_floating_point:
                if not bool((got == exact.to(got.dtype)).all()):
                    return Verdict(False, math.inf, 0.0, "values differ")
                continue
            if not exact.numel():
                continue
            largest = _largest(exact)
            if not largest <= torch.finfo(got.dtype).max:  # NaN included
                # What overflows the output dtype is an infinity there: the reference is seen through its range.
                exact = torch.where(exact.abs() > torch.finfo(got.dtype).max, exact * math.inf, exact)
                finite = exact.isfinite()
                odd_got, odd_exact = got.double()[~finite], exact[~finite]
                if not bool(((odd_got == odd_exact) | (odd_got.isnan() & odd_exact.isnan())).all()):
                    why = "infinities or NaN stand elsewhere than in the reference"
                    return Verdict(False, math.inf, 0.0, why)
                if not bool(finite.any()):
                    continue
                got, eager, exact = got[finite], eager[finite], exact[finite]
                largest = _largest(exact)
            dtype, scale = got.dtype, max(scale, largest)
            error = _worse(error, _max_error(got, exact))
            eager_error = _worse(eager_error, _max_error(eager, exact, finite=True))
        if dtype is None:  # nothing to hold to a bound
            return Verdict(True, 0.0, 0.0)
        bound = self.factor * eager_error + self.ulps * _unit(dtype, scale)
        ok = error <= bound  # NaN compares false, so it fails
        why = "" if ok else f"error {error:.3g} above the bound {bound:.3g}"
        return Verdict(ok, error, bound, why, eager_error / scale if scale else 0.0)

    def near(self, got: Tensor, eager: Tensor, relative: float) -> Verdict:
        """Hold `got` to the policy without a reference: eager's error is taken for `relative` to the largest magnitude.

        With eager's error e, a distance of at most (factor - 1) e + ulps units from eager's result is an error of at
        most factor e + ulps units. What is further away, or not finite, does not pass here, and may yet be right.
        """
        if got.shape != eager.shape or got.dtype != eager.dtype:
            return Verdict(False, math.inf, 0.0, "another shape or dtype")
        if not got.dtype.is_floating_point or not got.numel():
            same = torch.equal(got, eager)
            return Verdict(same, 0.0 if same else math.inf, 0.0, "" if same else "values differ")
        scale = _largest(eager)
        if not scale <= torch.finfo(got.dtype).max:  # NaN included
            return Verdict(False, math.inf, 0.0, "infinities or NaN")
        error = _max_error(got, eager)
        bound = (self.factor - 1) * relative * scale + self.ulps * _unit(got.dtype, scale)
        return Verdict(error <= bound, error, bound, "" if error <= bound else "too far from eager")


def _unit(dtype: torch.dtype, scale: float) -> float:
    """A unit in the last place of numbers as large as `scale`."""
    info = torch.finfo(dtype)
    return max(info.eps * 2.0 ** math.floor(math.log2(max(scale, 1e-300))), info.tiny)


# Numbers whose differences are computed at a time: they stay in the caches, where differences of a large result at once
# would be memory never touched before, which costs four times what is done with it.
_BLOCK = 1 << 18


def _max_error(got: Tensor, exact: Tensor, finite: bool = False) -> float:
    """The largest difference to a float64 tensor, NaN where one is; or the largest of the `finite` ones."""
    largest = []
    for some, truth in zip(got.flatten().split(_BLOCK), exact.flatten().split(_BLOCK), strict=True):
        difference = (some.double() - truth.double()).abs_()
        largest.append((difference.nan_to_num_(0.0, 0.0, 0.0) if finite else difference).max())
    return float(torch.stack(largest).max())


def _worse(error: float, other: float) -> float:
    """The larger of two errors, NaN where one is."""
    return error if math.isnan(error) or other <= error else other


def _largest(values: Tensor) -> float:
    """The largest magnitude, NaN where one is."""
    low, high = values.aminmax()
    return float(torch.maximum(-low, high))


@dataclass(frozen=True)
class GradientCost:
    """What an operator's gradient costs, in multiples of the operator's own operations and least bytes.

    Of most it is two operations for each of the forward's; the result's gradient and what was kept are read, and one
    gradient is written. The products of a matmul's gradients are counted as they are called.
    """

    flops: float = 2.0
    bytes: float = 1.5


@dataclass(frozen=True)
class MergedCalls:
    """Merges two calls of the operator `of` that differ in the input `over`; `inputs` is what each is called here."""

    of: str
    over: str
    inputs: tuple[str, str]


@dataclass(frozen=True)
class MergedChain:
    """Merges an operator with the one that reads rows of its result as the input `through`.

    Of the first one's inputs, `over` is called `rows` here; all others have the names that they have there.
    """

    first: str
    last: str
    through: str
    over: str
    rows: str


@dataclass(frozen=True)
class Recognition:
    """What the recognizer may do to bring a model's values into the form that an operator takes them in.

    Attributes:
        aligned: inputs that must reach the operator through the same permutation of their axes.
        repeats: inputs that the operator itself repeats over heads, so a copy can be spared.
        rows: inputs of which a row counts for nothing where this mask is filled in over all of the row's scores.
        masks: what is added to scores, with the argument that stands for one that keeps a square's lower triangle.
        layouts: orders in which models keep the first input's axes: permutations to the operator's own order.
        shared: inputs that are the same along this axis of the first input, and that the operator takes without it.
        vectors: inputs that the operator takes as a vector, whose numbers stand along this axis, counted from the last.
        converted: inputs that the operator takes in another form, and what makes it.
        sizes: arguments that are the size of an input's last axis, times a number.
        multiplies: numbers by the input that they multiply, which the model may have multiplied already.
        numbers: arguments that follow from the marked constants of these names, which the operator does not take.
        keeps: "sum": a sum over the last axis is none of a mean times its size; "cast": a narrower type rounds on
            purpose.
    """

    aligned: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()
    rows: Mapping[str, str] = field(default_factory=dict)
    masks: Mapping[str, str] = field(default_factory=dict)
    layouts: tuple[tuple[int, ...], ...] = ()
    shared: Mapping[str, int] = field(default_factory=dict)
    vectors: Mapping[str, int] = field(default_factory=dict)
    converted: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    sizes: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    multiplies: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Callable[..., float]] = field(default_factory=dict)
    keeps: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Pattern:
    """One way models write an operator, as a plain PyTorch function; the recognizer matches its arithmetic.

    `inputs` maps the function's parameters, named as the operator's own, to example shapes (symbols or numbers)
    or to a number: a number marks a constant that the model chooses (an epsilon, a scale) and any value matches.
    `dtypes` says which inputs are "ids" or "bool", `fixed` which arguments this spelling implies (causal=True).
    """

    name: str
    fn: Callable[..., Any]
    inputs: Mapping[str, tuple[int | str, ...] | float]
    dtypes: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    recognition: Recognition = Recognition()


@dataclass
class Operator:
    """The card. See `opsmith.ops` for the operators and `docs/conventions.md` for how one is added.

    Attributes:
        workloads: the sizes models use, to be timed; else large samples.
        epilogue: an activation's name as a matmul's epilogue, given its arguments.
        domain: False for a call whose values the operator does not promise to get right; all calls, where None.
        entries: the cost of an entry of the dispatcher by its own arguments, where `cost` does not take these.
        gradient: what its gradient costs.
        onto: by output, the inputs that `out` may be, element for element; what it may not be is refused.
        merges: which operators' calls it does at once, where the compiler finds them.
        widens: the input that it takes in a narrower dtype too, if it is given its result's as `dtype`.
    """

    name: str
    kind: Kind
    function: Callable[..., Any]
    reference: Callable[..., Any]
    cost: Callable[..., Cost]
    samples: Callable[[Make], Iterator[Sample]]
    implementations: list[Implementation] = field(default_factory=list)
    patterns: Sequence[Pattern] = ()
    schemas: Sequence[str] = ()
    tolerance: Tolerance = field(default_factory=Tolerance)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    differentiable: bool = True
    workloads: Callable[[Make], Iterator[Sample]] | None = None
    epilogue: Callable[..., str | None] | None = None
    domain: Callable[..., bool] | None = None
    entries: Mapping[str, Callable[..., Cost]] = field(default_factory=dict)
    gradient: GradientCost = GradientCost()
    onto: tuple[tuple[str, ...], ...] = ()
    merges: MergedCalls | MergedChain | None = None
    widens: str = ""
    source: str = ""
    # By back ends, by their names.
    added: dict[str, list[Implementation]] = field(default_factory=dict, repr=False)

    def implementation(self, name: str) -> Implementation:
        """The implementation of that name, or a KeyError that lists the names there are."""
        for candidate in self.implementations:
            if candidate.name == name:
                return candidate
        known = ", ".join(i.name for i in self.implementations)
        raise KeyError(f"{self.name} has no implementation {name!r}; it has: {known}")

    @property
    def eager(self) -> Callable[..., Any]:
        """What eager PyTorch runs, whose error is the yardstick: the implementation "eager", or the reference."""
        return next((i.fn for i in self.implementations if i.name == "eager"), self.reference)

    def candidates(self, *args: Any, **kwargs: Any) -> tuple[list[Implementation], dict[str, str]]:
        """The implementations that accept this call, in order, and the refusals with their reasons."""
        accepted: list[Implementation] = []
        refused: dict[str, str] = {}
        for candidate in self.implementations:
            answer = candidate.accepts(*args, **kwargs)
            if answer is True:
                accepted.append(candidate)
            else:
                refused[candidate.name] = str(answer)
        return accepted, refused

    def cost_of(self, sample: Sample) -> Cost:
        """What `cost` says of a sample; a ValueError that names the card where it says no numbers, or raises."""
        try:
            cost = self.cost(*sample.args, **sample.kwargs)
            if math.isfinite(cost.flops + cost.min_bytes):
                return cost
            why = f"is {cost}"
        except Exception as error:
            why = f"raised {type(error).__name__}: {error}"
        raise ValueError(
            f"{self.name}: the cost of {sample.name!r} {why}; correct `cost` in the operator's card"
        )


_REGISTRY: dict[str, Operator] = {}
_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")


def register(card: Operator) -> Operator:
    """Add a card to the registry and its schemas to PyTorch's dispatcher; a taken name is an error."""
    if card.name in _REGISTRY:
        raise ValueError(f"an operator named {card.name!r} is registered already; choose another name")
    for schema in card.schemas:
        name = _LIBRARY.define(schema)
        # The native operators only write into outputs they are given, so under fake tensors there is nothing to do.
        torch.library.register_fake(
            f"opsmith::{name.split('::')[-1]}", lambda *args, **kwargs: None, lib=_LIBRARY
        )
    _REGISTRY[card.name] = card
    return card


def registry() -> dict[str, Operator]:
    """All cards by name, in the order in which they were registered, with what back ends add to them."""
    there = backends.installed()
    for card in _REGISTRY.values():
        for name in [name for name in card.added if name not in there]:
            gone = card.added.pop(name)
            card.implementations = [one for one in card.implementations if one not in gone]
        for name in [name for name in there if name not in card.added]:
            card.added[name] = list(there[name].implementations(card.name))
            names = [one.name for one in card.implementations]
            at = names.index("eager") if "eager" in names else len(names)
            card.implementations[at:at] = card.added[name]
    return dict(_REGISTRY)


# Stands for a number that the model chooses, where a pattern is traced: no sum or product of sizes comes near it.
_ANY_NUMBER = 1.2345e-3


def as_pattern(
    name: str, reference: Callable[..., Any], samples: Callable[[Make], Iterator[Sample]]
) -> Pattern | None:
    """The reference itself as the pattern of an operator that names none, or None where its arguments do not allow one.

    Shapes are taken from the samples: sizes that agree in all of them are one symbol. A number may be any.

    >>> as_pattern("add", lambda x, y: x + y, lambda make: iter([Sample("2x3", (make(2, 3), make(3)))])).inputs
    {'x': ('s0', 's1'), 'y': ('s1',)}
    """
    signature = inspect.signature(reference)
    calls = []
    for sample in samples(Make(torch.float32)):
        bound = signature.bind(*sample.args, **sample.kwargs)
        bound.apply_defaults()
        calls.append(bound.arguments)
    ranks = [{k: v.dim() for k, v in call.items() if isinstance(v, Tensor)} for call in calls]
    alike = [c for c, r in zip(calls, ranks, strict=True) if r == ranks[0] and all(c[n].numel() for n in r)]
    if not alike:
        return None
    symbols: dict[tuple[int, ...], str] = {}
    inputs: dict[str, tuple[int | str, ...] | float] = {}
    dtypes: dict[str, str] = {}
    for key, value in alike[0].items():
        if isinstance(value, Tensor):
            sizes = zip(*(call[key].shape for call in alike), strict=True)
            inputs[key] = tuple(symbols.setdefault(size, f"s{len(symbols)}") for size in sizes)
            if not value.is_floating_point():
                dtypes[key] = "bool" if value.dtype == torch.bool else "ids"
        elif isinstance(value, float):
            inputs[key] = _ANY_NUMBER * (1 + len(inputs))
        elif signature.parameters[key].default is inspect.Parameter.empty:
            return None  # a setting that no spelling implies
    return Pattern(name, reference, inputs, dtypes=dtypes)


def operator(
    *,
    kind: Kind | str,
    cost: Callable[..., Cost],
    samples: Callable[[Make], Iterator[Sample]],
    implementations: Sequence[Implementation] = (),
    patterns: Sequence[Pattern] | None = None,
    **more: Any,
) -> Callable[[Callable[..., Any]], Operator]:
    """Make a card of a plain PyTorch function, which becomes the reference, and the pattern if none is given.

    >>> @operator(kind="activation", cost=lambda x: Cost(2 * x.numel(), 2 * x.nbytes), samples=my_samples)
    ... def squared_relu(x):
    ...     return torch.relu(x).square()
    """

    def decorate(reference: Callable[..., Any]) -> Operator:
        found = as_pattern(reference.__name__, reference, samples) if patterns is None else None
        return register(
            Operator(
                name=reference.__name__,
                kind=Kind(kind),
                function=reference,
                reference=reference,
                cost=cost,
                samples=samples,
                implementations=[*implementations, Implementation("eager", reference)],
                patterns=patterns or ((found,) if found else ()),
                **more,
            )
        )

    return decorate


class _CallableModule(types.ModuleType):
    """`opsmith.operator` is this module and the decorator both: `@opsmith.operator(kind=...)` works."""

    def __call__(self, **card: Any) -> Callable[[Callable[..., Any]], Operator]:
        return operator(**card)


sys.modules[__name__].__class__ = _CallableModule
