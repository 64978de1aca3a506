"""Which implementation runs a site: measured on the real inputs, remembered, or the nearest one measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from opsmith import measure
from opsmith.compiler.choose import inductor
from opsmith.compiler.choose.weights import Weights
from opsmith.compiler.config import Config
from opsmith.compiler.kept import TuningCache
from opsmith.compiler.plan import Plan
from opsmith.compiler.reasons import raised
from opsmith.compiler.steps.source import alone
from opsmith.operator import Implementation, Operator, registry


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
        if isinstance(value, torch.Tensor):
            layout = "" if value.is_contiguous() else f"@{','.join(map(str, value.stride()))}"
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{name}={value.device.type}:{dtype}[{','.join(map(str, value.shape))}]{layout}")
        elif value is not None:
            parts.append(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}")
    return " ".join(parts)


def contest(card: Operator, call: Mapping[str, Any], new: bool) -> str:
    """What a measurement is of: a call, made as a program makes it, whose result is new or in a buffer."""
    return f"{signature(card, call)} as={'new' if new else 'still'}"


class Selector:
    """Chooses implementations under a Config, by measurement where it may take the time."""

    def __init__(self, config: Config, cache: TuningCache | None = None, saved: Plan | None = None):
        _check_names(config)
        self.config = config
        self.cache = cache if cache is not None else TuningCache()
        self.saved = saved
        self.fixed = saved.choices() if saved is not None else {}  # implementation by signature
        self.learning = False  # while `optimize` shows its examples: each one is studied
        self._measured: dict[str, dict[str, float]] = {}
        self.inductor = inductor.Inductor(config.inductor_seconds)

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
        key, config = contest(card, call, new), self.config
        fixed = self.fixed.get(signature(card, call))
        pinned = config.pin.get(site) or config.pin.get(card.name)
        known = self._measured.get(key) or self.cache.get(key) or {}
        forbidden = (*config.forbid.get(card.name, ()), *config.forbid.get(site, ()))
        forced = "inductor" in (pinned, fixed)
        if (pinned or fixed) in {c.name for c in accepted}.difference(forbidden, unfit):
            refused["inductor"] = "not tried: the choice is made already"
        elif not forced and "inductor" in known and min(known, key=known.__getitem__) != "inductor":
            refused["inductor"] = f"slower when it was measured: {known['inductor'] * 1e6:.0f} us"
        elif config.inductor or forced:
            entered = self.inductor.enter(card, call, key, may_measure, forced)
            if isinstance(entered, str):
                refused["inductor"] = entered
            else:
                accepted.append(entered)
        for name in forbidden:
            _refuse(name, "forbidden by the configuration", accepted, refused)
        for name, why in unfit.items():
            _refuse(name, why, accepted, refused)
        names = [c.name for c in accepted]
        if pinned in names:
            return Choice(pinned, "pinned by the configuration", {}, refused)
        if pinned is not None:
            refused["pin"] = f"{pinned} can't run this call: {refused.get(pinned, 'not available')}"
        if fixed in names:
            return Choice(fixed, "from the saved plan", {}, refused)
        if len(accepted) > 1 and not config.tune:
            return Choice(names[0], "first able in the card's order (tuning is off)", {}, refused)
        times: Mapping[str, float] | None = known or None
        if len(accepted) > 1 and (times is None or not set(names) <= set(times)):
            if not may_measure:
                return self._nearest(card, call, key, accepted, refused)
            times, steady = self._measure(call, accepted, refused, weights, new)
            times = self._measured[key] = self.cache.settled(key, times, steady)
        if len(accepted) == 1 or times is None:
            return Choice(accepted[0].name, "the only one able", {}, refused)
        best = min((c.name for c in accepted), key=lambda n: times[n])
        return Choice(best, _why(best, {c.name: times[c.name] for c in accepted}), times, refused)

    def _measure(
        self,
        call: dict[str, Any],
        accepted: list[Implementation],
        refused: dict[str, str],
        weights: Weights,
        new: bool,
    ) -> tuple[dict[str, float], bool]:
        """Seconds by implementation, as a program calls them, and whether the machine was quiet enough to keep them.

        An implementation that raises leaves the contest.
        """
        contestants = {}
        for candidate in list(accepted):
            try:
                contestants[candidate.name] = alone(candidate, weights.swapped(candidate, call), new)
                contestants[candidate.name]()
            except Exception as error:  # whatever it raises is its reason for not taking part
                contestants.pop(candidate.name, None)
                _refuse(candidate.name, raised(error), accepted, refused)
        # Each has just run. Where a call takes long, who loses two rounds by a third as much again has lost.
        result = measure.quick(contestants, budget_s=0.12, warmup=0, drop=1.33)
        steady = all(result.spread(name) <= measure.CONCLUDES_NOTHING for name in contestants)
        if steady and set(contestants) == {c.name for c in accepted}:
            return {name: result.median(name) for name in contestants}, True
        # Other work disturbs the machine: the least disturbed sample of each is the best guess.
        return {name: min(result.samples[name]) for name in contestants}, False

    def _nearest(
        self,
        card: Operator,
        call: dict[str, Any],
        contested: str,
        accepted: list[Implementation],
        refused: dict[str, str],
    ) -> Choice:
        """Of the calls measured before, the one closest in work and of the same kind decides."""
        names, kind = {c.name for c in accepted}, _kind(contested)
        work = sum(v.numel() for v in call.values() if isinstance(v, torch.Tensor))
        nearest: tuple[float, dict[str, float]] | None = None
        for key, times in {**dict(self.cache.items()), **self._measured}.items():
            if not key.startswith(card.name + " ") or not names & set(times) or _kind(key) != kind:
                continue
            distance = abs(math.log(max(_numel(key), 1)) - math.log(max(work, 1)))
            if nearest is None or distance < nearest[0]:
                nearest = (distance, {n: t for n, t in times.items() if n in names})
        if nearest is None:
            why = "first able in the card's order (nothing measured yet)"
            return Choice(accepted[0].name, why, {}, refused)
        best = min(nearest[1], key=nearest[1].__getitem__)
        return Choice(best, "fastest at the nearest shape measured", {}, refused)

    def implementation(self, card: Operator, name: str) -> Implementation:
        """An implementation by name, Inductor's included."""
        compiled = self.inductor.compiled(card) if name == "inductor" else None
        return compiled or card.implementation(name)


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


def _refuse(name: str, why: str, accepted: list[Implementation], refused: dict[str, str]) -> None:
    """Take an implementation out of the contest; eager, which can't fail where the model does not, stays."""
    found = next((c for c in accepted if c.name == name != "eager"), None)
    if found is not None:
        accepted.remove(found)
        refused[name] = why


def _why(best: str, times: Mapping[str, float]) -> str:
    others = {n: t for n, t in times.items() if n != best and math.isfinite(t)}
    if not others:
        return "the only one measured"
    second = min(others, key=lambda n: others[n])
    return f"{others[second] / times[best]:.2f}x as fast as {second}"


def _numel(key: str) -> int:
    total = 0
    for part in key.split(" "):
        if "[" in part:
            sizes = part.split("[")[1].split("]")[0]
            total += math.prod(int(d) for d in sizes.split(",") if d) if sizes else 1
    return total


def _kind(key: str) -> tuple[tuple[str, ...], ...]:
    """What must agree for a measurement to speak for another shape: tensors present, dtypes, ranks, settings.

    Layouts need not: what stands before a site may give it another one than the model did when it was measured.
    """
    kinds = []
    for part in key.split(" "):
        head, _, sizes = part.partition("@")[0].partition("[")
        kinds.append((head, str(sizes.count(","))) if sizes else (head,))
    return tuple(kinds)
