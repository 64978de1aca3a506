"""From a tree of PyTorch calls to operators: which calls make up which, and what each cost.

One pass over a repetition that knows shapes decides; the others repeat the same calls in the same order, so that a
call's place in the tree says what it belongs to.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from opsmith.operator import Cost
from opsmith.profiler import costs, entries
from opsmith.profiler.collect import Op, Watched, align, preorder
from opsmith.profiler.composites import CallSequence
from opsmith.profiler.costs import moves_nothing, transparent
from opsmith.profiler.data import FRAMEWORK, MATMUL, OTHER, Event, Row, Unit
from opsmith.profiler.entries import card_of, kind_of
from opsmith.profiler.marks import Mark

GAP = "between operators"
VIEWS = "views"


@dataclass
class Attribution:
    """What a repetition's calls belong to."""

    units: list[Unit]

    def rows(self, runs: Sequence[Watched]) -> tuple[list[Row], list[dict[str, float]]]:
        """The rows of these repetitions, on average, with the gap; and by class for each repetition."""
        merged: dict[tuple[object, ...], Row] = {}
        series: list[dict[str, float]] = [defaultdict(float) for _ in runs]
        flats = [list(preorder(run.ops)) for run in runs]
        for unit in self.units:
            row = unit.row
            times = [sum(flat[p].nanoseconds for p in unit.places) * 1e-9 for flat in flats]
            for kinds, seconds in zip(series, times, strict=True):
                kinds[row.kind] += seconds
            key = (row.kind, row.operator, row.shape, row.layer, row.implementation, row.composite, row.known)
            into = merged.setdefault(key, replace(row, flops=0.0, int8_ops=0.0, bytes=0.0))
            into.seconds += sum(times) / len(times)
            into.calls += 1
            into.charge(Cost(row.flops, row.bytes, row.int8_ops))
        gaps = [max(run.seconds - sum(s.values()), 0.0) for run, s in zip(runs, series, strict=True)]
        for kinds, gap in zip(series, gaps, strict=True):
            kinds[FRAMEWORK] += gap
        gap_row = Row(FRAMEWORK, GAP, "", implementation="", seconds=sum(gaps) / len(gaps), bound="overhead")
        return [*merged.values(), gap_row], series

    def events(self, run: Watched) -> list[Event]:
        """The timeline of one repetition, in order."""
        flat = list(preorder(run.ops))
        found = []
        for unit in self.units:
            row, n = unit.row, max(len(unit.places), 1)
            for place in unit.places:
                op = flat[place]
                began, seconds = (op.began - run.start) * 1e-9, op.nanoseconds * 1e-9
                each = (row.flops / n, row.bytes / n)
                found.append(Event(row.operator, row.kind, began, seconds, row.layer, row.shape, *each))
        return sorted(found, key=lambda e: e.start)


def attribute(run: Watched, guides: Sequence[CallSequence]) -> Attribution:
    """What every call of a repetition that knows shapes belongs to."""
    return _Reader(run, guides).read()


def layer_of(module: str) -> str:
    """`model.layers.3.mlp.up_proj` as `model.layers.3`; a module outside the layers by its first two names.

    >>> layer_of("encoder.layer.11.attention.self")
    'encoder.layer.11'
    """
    match = re.match(r"^(.*?\.)?\d+(?=\.|$)", module)
    return match[0] if match else ".".join(module.split(".")[:2])


class _Reader:
    def __init__(self, run: Watched, guides: Sequence[CallSequence]):
        self.run = run
        self.units: list[Unit] = []
        self.sites: dict[tuple[int, int], Unit] = {}
        self.backs: dict[int, Unit] = {}
        self.made: dict[int, Unit] = {}  # by autograd's number: what the node is the gradient of
        self.place = {id(op): i for i, op in enumerate(preorder(run.ops))}
        self.owner: dict[int, tuple[int, int]] = {}
        self.found: list[list[Unit]] = []  # by guide: its operators, at the sizes of this run
        # Of several graphs of one model, the one whose calls these are matches most of them.
        aligned = [(g, self._align(guide)) for g, guide in enumerate(guides)]
        for g, owners in sorted(aligned, key=lambda item: -len(item[1])):
            for op, owner in owners.items():
                self.owner.setdefault(op, (g, owner))

    def read(self) -> Attribution:
        for op in self.run.before:  # a forward pass that is not counted, but whose gradients are
            self._top(op)
        self.units.clear()
        for op in self.run.ops:
            self._top(op)
        return Attribution([u for u in self.units if u.places])

    def _align(self, guide: CallSequence) -> dict[int, int]:
        """The operators of the guide's sequence that calls belong to, by the calls' ids."""
        everything = [*self.run.before, *self.run.ops]
        tops = [op for op in _unwrapped(everything) if not op.backward and guide.run in (None, op.run)]
        places = align([op.name for op in tops], guide.names)
        matched = [(op, p) for op, p in zip(tops, places, strict=True) if p is not None]
        self.found.append(guide.at((p, costs.tensors(op.inputs)) for op, p in matched))
        owners = guide.owners
        # Part of an operator is not that operator: the rest of it runs in another way, and what it costs is with that.
        missing = {p for p, owner in enumerate(owners) if owner is not None} - {p for _, p in matched}
        broken = {owners[p] for p in missing if not moves_nothing(guide.names[p])}
        return {id(op): o for op, p in matched if (o := owners[p]) is not None and o not in broken}

    def _top(self, op: Op) -> None:
        site = self.owner.get(id(op))
        if op.mark is not None:
            self._add(op, self._marked(op.mark, op))
        elif op.backward:
            self._gradient(op)
        elif site is not None:
            self._site(op, site)
        elif _wrapper(op):
            for child in op.children:
                self._top(child)
        else:
            self._leaf(op)

    def _add(self, op: Op, unit: Unit) -> None:
        place = self.place.get(id(op))
        if place is not None:
            unit.places.append(place)
        if not op.backward:
            for inner in preorder([op]):
                if inner.sequence >= 0:
                    self.made[inner.sequence] = unit

    def _new(self, unit: Unit) -> Unit:
        self.units.append(unit)
        return unit

    def _site(self, op: Op, site: tuple[int, int]) -> None:
        unit = self.sites.get(site)
        if unit is None:
            found = self.found[site[0]][site[1]]
            row = replace(found.row, layer=layer_of(op.module))
            unit = self.sites[site] = self._new(Unit(row, gradient=found.gradient))
        self._add(op, unit)

    def _marked(self, mark: Mark, op: Op) -> Unit:
        step = mark.step
        row = replace(
            entries.described(mark.card, mark.call),
            layer=layer_of(mark.module or op.module),
            implementation=mark.implementation,
            pieces=[inner.name for inner in op.children] or [op.name],
            reason=step.reason if step is not None else "",
            refused=dict(step.refused) if step is not None else {},
            source=step.site if step is not None else "",
        )
        return self._new(Unit(row, gradient=mark.card.gradient))

    def _leaf(self, op: Op, layer: str | None = None) -> None:
        for leaf, kind in _leaves(op):
            row = self._row(leaf, kind, layer_of(leaf.module) if layer is None else layer)
            self._add(leaf, self._new(Unit(row)))

    def _row(self, op: Op, kind: str | None, layer: str) -> Row:
        if moves_nothing(op.name) or kind == FRAMEWORK or (transparent(op.name) and not op.children):
            return Row(FRAMEWORK, VIEWS, "", layer, "", bound="overhead")
        parts = costs.tensors(op.inputs)
        ours = card_of(op.name) is not None
        estimate, fault = entries.cost_of(op.name, op.inputs)
        row = Row(
            kind or OTHER,
            op.name.removeprefix("aten::").rstrip("_"),
            ", ".join(map(costs.sizes, parts[:4]))
            + (f" and {len(parts) - 4} more" if len(parts) > 4 else ""),
            layer,
            "native" if ours else "eager",
            pieces=[op.name],
            dtype=next((str(p.dtype).removeprefix("torch.") for p in parts if p.dtype.is_floating_point), ""),
            classified=kind is not None,
            fault=fault,
        )
        row.charge(estimate)
        return row

    def _gradient(self, op: Op) -> None:
        forward = self.made.get(op.sequence)
        if forward is None or forward.row.kind == FRAMEWORK:
            self._inner(op, forward.row.layer if forward is not None else "")
            return
        back = self.backs.get(id(forward))
        if back is None:
            row = forward.row
            name = f"{row.operator} backward"
            alone = replace(row, operator=name, pieces=[], known=True, refused={}, reason="", fault="")
            alone.flops = alone.int8_ops = alone.bytes = 0.0
            gradient = forward.gradient if row.kind != MATMUL else None
            if gradient is not None:
                alone.flops, alone.bytes = gradient.flops * row.flops, gradient.bytes * row.bytes
                alone.known = row.known
            back = self.backs[id(forward)] = self._new(Unit(alone, gradient=gradient))
        self._add(op, back)
        if back.gradient is None:
            for child in op.children:
                for leaf, kind in _leaves(child):
                    if kind is not None and not moves_nothing(leaf.name):
                        back.row.charge(entries.cost_of(leaf.name, leaf.inputs)[0])

    def _inner(self, op: Op, layer: str) -> None:
        """Inside a gradient of nobody known: the node's own event is a wrapper."""
        if _wrapper(op) or op.backward:
            for child in op.children:
                self._inner(child, layer)
        else:
            self._leaf(op, layer)


def _leaves(op: Op) -> Iterator[tuple[Op, str | None]]:
    """The operators of a class that a call consists of, with these: of composites their parts."""
    kind = None if transparent(op.name) and op.children else kind_of(op.name)
    if kind is None and op.children:
        for child in op.children:
            yield from _leaves(child)
    else:
        yield op, kind


def _unwrapped(ops: Iterable[Op]) -> Iterator[Op]:
    for op in ops:
        if _wrapper(op) and not op.backward:
            yield from _unwrapped(op.children)
        else:
            yield op


def _wrapper(op: Op) -> bool:
    """True for what only encloses operators: annotations, autograd functions, compiled regions."""
    return "::" not in op.name or op.name.startswith(("torch::", "autograd::"))
