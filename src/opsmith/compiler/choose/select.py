"""Which implementation runs a site: measured on the real inputs, remembered, or the nearest one measured."""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith import measure
from opsmith.compiler.choose import inductor
from opsmith.compiler.choose.ranks import Ranks, SharedTimes
from opsmith.compiler.choose.weights import Weights, rows_of
from opsmith.compiler.config import Config
from opsmith.compiler.kept import TuningCache
from opsmith.compiler.plan import Plan
from opsmith.compiler.reasons import raised
from opsmith.compiler.steps.source import alone
from opsmith.operator import Implementation, Kind, Operator, registry

_BUDGET = 0.12  # seconds of a contest
_IN_A_ROW = 8  # calls that a GPU is shown at once
_LOST, _LOST_S = 10.0, 0.05  # times the best and seconds: more than other work makes of a call


@dataclass(frozen=True)
class Choice:
    """The implementation of a site at given shapes, and why."""

    implementation: str
    reason: str
    times: Mapping[str, float] = field(default_factory=dict)  # seconds a call
    refused: Mapping[str, str] = field(default_factory=dict)


def signature(card: Operator, call: Mapping[str, Any]) -> str:
    """A call as text: operator, dtypes, shapes, layouts and settings; equal calls choose alike."""
    parts = [card.name]
    for name in sorted(call):
        value = call[name]
        if isinstance(value, Tensor):
            layout = "" if value.is_contiguous() else f"@{','.join(map(str, value.stride()))}"
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{name}={value.device.type}:{dtype}[{','.join(map(str, value.shape))}]{layout}")
        elif value is not None:
            text = f"{value:.6g}" if isinstance(value, float) else str(value).replace(" ", "")
            parts.append(f"{name}={text}")
    return " ".join(parts)


def contest(card: Operator, call: Mapping[str, Any], new: bool, among: int = 0) -> str:
    """What a measurement is of: a call, made as a program makes it, whose result is new or in a buffer.

    `among` are the bytes of all weights, of which this call's is one: with about as many it is as cold.
    """
    cold = f" among=2^{among.bit_length()}" if among else ""
    return f"{signature(card, call)} as={'new' if new else 'still'}{cold}"


class Selector:
    """Chooses implementations under a Config, by measurement where it may take the time."""

    def __init__(
        self,
        config: Config,
        cache: TuningCache | None = None,
        saved: Plan | None = None,
        ranks: Ranks | None = None,
    ):
        _check_names(config)
        self.config = config
        self.ranks = ranks
        self.cache = SharedTimes(ranks) if ranks else cache if cache is not None else TuningCache()
        self.saved = saved
        self.fixed = saved.choices() if saved is not None else {}  # implementation by signature
        self.deadline = math.inf  # by the clock of `spent`: then no more is measured, and nothing proved
        self.learning = False  # while `optimize` shows its examples: each one is studied
        self._measured: dict[str, dict[str, float]] = {}
        self.inductor = inductor.Inductor(config.inductor_seconds)

    @property
    def spent(self) -> bool:
        """Whether the time that measuring and proving may take is over."""
        return time.monotonic() > self.deadline

    def choose(
        self,
        card: Operator,
        site: str,
        call: dict[str, Any],
        weights: Weights,
        *,
        may_measure: bool,
        unfit: Mapping[str, str] = MappingProxyType({}),
        new: bool = True,
    ) -> Choice:
        """The implementation for this call of this site; `unfit` ones failed the site's proof, and why.

        `new` is a result that the caller gets: it has no buffer.
        """
        accepted, refused = card.candidates(**call)
        able = {candidate.name: candidate for candidate in accepted}
        among = weights.among(call) if card.kind is Kind.MATMUL else 0
        key, config = contest(card, call, new, among), self.config
        fixed = self.fixed.get(signature(card, call))
        pinned = config.pin.get(site) or config.pin.get(card.name)
        known = self._measured.get(key) or self.cache.get(key) or {}
        forbidden = (*config.forbid.get(card.name, ()), *config.forbid.get(site, ()))
        out = {**unfit, **dict.fromkeys(forbidden, "forbidden by the configuration")}
        forced = "inductor" in (pinned, fixed)
        if (pinned or fixed) in able.keys() - out.keys():
            refused["inductor"] = "not tried: the choice is made already"
        elif not forced and "inductor" in known and min(known, key=known.__getitem__) != "inductor":
            refused["inductor"] = f"slower when it was measured: {known['inductor'] * 1e6:.0f} us"
        elif (config.inductor and config.tune) or forced:
            short = partial(_short, call, able, weights, new)
            # As it was measured: near the limit, this process would compile what the last one left out.
            if able.keys() <= known.keys():
                short = partial(operator.lt, min(known.values()), inductor.CALL)
            entered = self.inductor.enter(card, call, key, may_measure, forced, short)
            if isinstance(entered, str):
                refused["inductor"] = entered
            else:
                able["inductor"] = entered
        for name, candidate in able.items():
            if name not in (pinned, fixed) and weights.refused(candidate, call):
                out[name] = "packs a copy of the weight, and this model's are too large to be held twice"
        for name, why in out.items():
            _refuse(name, why, able, refused)
        if self.ranks and may_measure:
            able, fixed, known = self.ranks.alike(able, fixed, known)
        first = next(iter(able))
        if pinned in able:
            return Choice(pinned, "pinned by the configuration", {}, refused)
        if pinned is not None:
            refused["pin"] = f"{pinned} can't run this call: {refused.get(pinned, 'not available')}"
        if fixed in able:
            return Choice(fixed, "from the saved plan", {}, refused)
        if len(able) > 1 and not config.tune:
            return Choice(first, "first able in the card's order (tuning is off)", {}, refused)
        complete = bool(known) if self.ranks else len(able) == 1 or able.keys() <= known.keys()
        if not complete:  # of ranks, what one of them cannot run has no time
            if not may_measure:
                if not (nearest := self._nearest(key, able)):
                    return Choice(first, "first able in the card's order (nothing measured yet)", {}, refused)
                return Choice(_fastest(able, nearest), "fastest at the nearest shape measured", {}, refused)
            between = weights.between(call) if among else []
            times = self._measure(call, able, refused, weights, new, between)
            known = self._measured[key] = self.cache.settled(key, *times)
            weights.drop(call, _fastest(able, known))
        if len(able) == 1:
            return Choice(next(iter(able)), "the only one able", {}, refused)
        best = _fastest(able, known)
        return Choice(best, _why(best, {n: t for n, t in known.items() if n in able}), known, refused)

    def _measure(
        self,
        call: dict[str, Any],
        able: dict[str, Implementation],
        refused: dict[str, str],
        weights: Weights,
        new: bool,
        between: Sequence[Tensor] = (),
    ) -> tuple[dict[str, float], bool]:
        """Seconds by implementation, as a program calls them, and whether the machine was quiet enough to keep them.

        A weight is as cold as a model has it, which reads those `between` before it comes back to this one, and all
        else as warm: a copy of it was multiplied just before. An implementation that raises leaves the contest.
        """
        contestants, first, device = {}, {}, device_of(call.values())
        cool: dict[str, Callable[[], object]] = {}
        other = call["weight"].clone() if between else None
        for name, candidate in list(able.items()):
            try:
                run = alone(candidate, weights.swapped(candidate, call), new)
                run = measure.as_replayed(run, device, _IN_A_ROW)
                first[name] = measure.once(run, device)
                if other is not None:
                    packed = candidate.prepack and candidate.prepack(other, rows_of(call))
                    copy = call | {"weight": other if packed is None else packed}
                    cool[name] = partial(_cool, between, alone(candidate, copy, new))
            except Exception as error:  # whatever it raises is its reason for not taking part
                _refuse(name, raised(error), able, refused)
            else:
                contestants[name] = run
        # Who takes so long, twice, has lost: PyTorch's products in a dtype without a unit for them take seconds.
        far = max(_LOST_S, _LOST * min(first.values()))
        again = {n: min(t, measure.once(contestants[n], device)) for n, t in first.items() if t > far}
        lost = {n: t for n, t in again.items() if t > far}
        contestants = {n: run for n, run in contestants.items() if n not in lost}
        # Each has just run. Where a call takes long, who loses two rounds by a third as much again has lost. Where it
        # takes longer than the budget, as the output layer of a prompt may do by far, that run is one of two rounds.
        long = min(first.values()) > _BUDGET
        result = measure.quick(
            contestants,
            budget_s=_BUDGET,
            min_rounds=1 if long else 3,
            warmup=0,
            drop=1.33,
            device=device,
            flush=cool or None,
        )
        runs = {name: [*result.samples[name], *[first[name]] * long] for name in contestants}
        steady = all(measure.spread(times) <= measure.CONCLUDES_NOTHING for times in runs.values())
        if steady and not result.disturbed and first.keys() == able.keys():
            return {name: result.median(name) for name in contestants} | lost, True
        # Other work disturbs the machine: the least disturbed sample of each is the best guess.
        return {name: min(result.samples[name]) for name in contestants} | lost, False

    def _nearest(self, contested: str, able: Mapping[str, Implementation]) -> dict[str, float]:
        """Of the calls measured before, the times of the one closest in work and of the same kind."""
        operator, kind, work = contested.partition(" ")[0], _kind(contested), _work(contested)
        measured = {**self.cache, **self._measured}
        alike = [
            key
            for key, times in measured.items()
            if key.startswith(f"{operator} ") and able.keys() & times.keys() and _kind(key) == kind
        ]
        nearest = min(alike, key=lambda key: abs(math.log(_work(key) / work)), default=None)
        return {} if nearest is None else {n: t for n, t in measured[nearest].items() if n in able}

    def implementation(self, card: Operator, name: str) -> Implementation:
        """An implementation by name, Inductor's included."""
        compiled = self.inductor.compiled.get(card.name) if name == "inductor" else None
        return compiled or card.implementation(name)


def _short(call: dict[str, Any], able: Mapping[str, Implementation], weights: Weights, new: bool) -> bool:
    """Whether the first implementation that is able takes less time than calling what Inductor compiled."""
    first = next(iter(able.values()))
    run = alone(first, weights.swapped(first, call), new)
    try:
        run()
    except Exception:  # the contest finds it again, and says so
        return False
    return min(measure.once(run, device_of(call.values())) for _ in range(5)) < inductor.CALL


def _cool(between: Sequence[Tensor], run: Callable[[], object]) -> None:
    """Empty the caches as a model does, and have all in them again but the weight."""
    for t in between:
        if t.dtype.itemsize > 1:  # no sums of float8, of which no weight is that is multiplied unpacked
            t.sum()
    run()


def device_of(values: Iterable[Any]) -> torch.device:
    return next((t.device for t in values if isinstance(t, Tensor)), torch.device("cpu"))


def _check_names(config: Config) -> None:
    """Pins and forbids name sites or operators, and implementations that these have."""
    cards = registry()
    wanted = [("pin", where, [name]) for where, name in config.pin.items()]
    wanted += [("forbid", where, names) for where, names in config.forbid.items()]
    for what, where, names in wanted:
        card = cards.get(where) or cards.get(where.rpartition("_")[0])
        if card is None or (where not in cards and not where.rpartition("_")[2].isdigit()):
            raise ValueError(
                f"config: {what}: there is no operator {where!r}; the operators are {', '.join(cards)}, "
                f"and a site is an operator with a number, as in attention_0"
            )
        known = [i.name for i in card.implementations] + ["inductor"]
        for name in names:
            if name not in known:
                raise ValueError(
                    f"config: {what}: {card.name} has no implementation {name!r}; it has {', '.join(known)}"
                )


def _refuse(name: str, why: str, able: dict[str, Implementation], refused: dict[str, str]) -> None:
    """Take an implementation out of the contest; eager, which can't fail where the model does not, stays."""
    if name != "eager" and able.pop(name, None) is not None:
        refused[name] = why


def _fastest(able: Mapping[str, Implementation], times: Mapping[str, float]) -> str:
    return min(able.keys() & times.keys(), key=lambda name: times[name] * able[name].margin)


def _why(best: str, times: Mapping[str, float]) -> str:
    others = {n: t for n, t in times.items() if n != best and math.isfinite(t)}
    if not others:
        return "the only one measured"
    second = min(others, key=lambda n: others[n])
    return f"{others[second] / times[best]:.2f}x as fast as {second}"


_SIZES = re.compile(r"\[([\d,]*)\](@[\d,]*)?")  # of a tensor, and its layout, in the text of a call


def _work(key: str) -> int:
    """The elements of all tensors of a call."""
    sizes = (found[1].split(",") for found in _SIZES.finditer(key))
    return max(1, sum(math.prod(int(size) for size in own if size) for own in sizes))


def _kind(key: str) -> str:
    """What must agree for a measurement to speak for another shape: tensors present, dtypes, ranks, settings.

    Layouts need not: what stands before a site may give it another one than the model did when it was measured.
    """
    return _SIZES.sub(lambda found: f"[{found[1].count(',')}]", key)
