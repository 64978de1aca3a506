"""The sites of one graph: what was found, what was chosen for each, and what failed its proof."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx import Node

from opsmith.compiler.capture.mutation import Effects, effects
from opsmith.compiler.choose.select import Choice, Selector, signature
from opsmith.compiler.choose.settle import settle
from opsmith.compiler.choose.weights import Weights
from opsmith.compiler.find.recognize import Miss, Recognized
from opsmith.compiler.find.site import Site, where

# A graph's sites, those that were recognized given, with what only the model's modules tell.
More = Callable[[fx.GraphModule, Effects, Sequence[Site]], Sequence[Site]]

SPENT = "the budget was spent"


@dataclass
class SiteReport:
    """What became of one site; `error` is against float64, or against eager where a site `like` it was proved."""

    name: str
    operator: str
    pattern: str
    where: str
    composite: bool  # whether the model wrote it as several calls
    status: str = "kept"  # or "rolled back", or "left" where the budget was spent
    error: float = 0.0
    bound: float = 0.0
    why: str = ""
    like: str = ""  # the site with the same arithmetic whose proof in float64 is the yardstick
    layers: int = 1  # how many calls of the model this one is

    def __str__(self) -> str:
        proved = f"as near to eager as {self.like}" if self.like else "against float64"
        error = f"error {self.error:.3g}, bound {self.bound:.3g} {proved}" if self.bound else "not proved"
        return f"{self.name} {self.where}: {self.status}, {error}" + (f"; {self.why}" if self.why else "")


@dataclass
class GraphReport:
    """What was found in one graph, and what was proven of it."""

    sites: list[SiteReport] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    nodes: int = 0
    left: str = ""  # why the graph runs as it was captured, where it was not or could not be studied
    fault: bool = False  # whether that is ours
    part: int = 0  # of the model, where its graph breaks: each has weights of its own

    @property
    def kept(self) -> list[SiteReport]:
        """The sites that no proof has rolled back."""
        return [s for s in self.sites if s.status == "kept"]

    @property
    def what(self) -> str:
        """The graph in words; of one that was never captured nobody knows the size."""
        return f"a graph of {self.nodes} operations" if self.nodes else "a part of the model"

    def leave(self, why: str) -> None:
        """Say that the graph is not optimized: a fault of ours, and not of the model's."""
        self.sites.clear()
        self.misses.clear()
        self.left, self.fault = why, True
        what = f"{self.what} runs as it was, since it could not be {'studied' if self.nodes else 'captured'}"
        warnings.warn(f"opsmith: {what}: {why}", stacklevel=2)


@dataclass
class Known:
    """What is known of one site."""

    site: Site
    report: SiteReport
    unfit: dict[str, str] = field(default_factory=dict)  # why implementations failed its proof, at any sizes
    choices: dict[str, Choice] = field(default_factory=dict)  # by the signature of a call


class Sites(dict[str, Known]):
    """The sites of a captured graph by name, each with its choices."""

    def __init__(
        self, gm: fx.GraphModule, found: Recognized, selector: Selector, weights: Weights, more: More
    ) -> None:
        self.gm, self.selector, self.weights = gm, selector, weights
        self.effects = effects(gm.graph)
        self.studied = False  # whether an example was seen before
        self.report = GraphReport(misses=[*found.misses], nodes=len(gm.graph.nodes))
        results = gm.graph.find_nodes(op="output")[0].all_input_nodes
        # The memory that the caller gets.
        self._given = {self.effects.memory[n] for n in results if n in self.effects.memory}
        self._counts: Counter[str] = Counter()
        for site in more(gm, self.effects, found.sites):
            self._add(site)

    def _add(self, site: Site) -> str:
        """Enter a site under a name of its own."""
        operator = site.card.name
        name = f"{operator}_{self._counts[operator]}"
        self._counts[operator] += 1
        report = SiteReport(name, operator, site.pattern, where(site.root), len(site.region) > 1)
        if site.columns and site.parts:
            report.layers = len(site.parts)
        self[name] = Known(site, report)
        self.report.sites.append(report)
        return name

    def _new(self, site: Site) -> bool:
        """Whether a program has no buffer for the site's result, since the caller gets it."""
        return any(self.effects.memory.get(n) in self._given for n in site.outputs)

    def divided(self, name: str, value: Callable[[Node], Any], learn: Collection[Node]) -> list[str]:
        """The names under which a site runs: its own, or, where they are faster together, those of its parts."""
        known = self[name]
        site = known.site
        if not site.parts or self.studied or self.selector.spent:
            return [name]
        call = site.call(value)
        choice = self.choice(name, call, may_measure=True)
        apart, known.choices[signature(site.card, call)] = settle(site, choice, self._choose, value, learn)
        if not apart:
            return [name]
        del self[name]
        self.report.sites.remove(known.report)
        return [self._add(part) for part in site.parts]

    def _choose(self, part: Site, call: dict[str, Any]) -> Choice:
        card, new = part.card, self._new(part)
        return self.selector.choose(card, card.name, call, self.weights, may_measure=True, new=new)

    def choice(self, name: str, call: dict[str, Any], *, may_measure: bool) -> Choice:
        """The choice for a site and a call; equal calls of one operator choose alike, where both or none is new."""
        known = self[name]
        card, new = known.site.card, self._new(known.site)
        key = signature(card, call)
        if key not in known.choices:
            known.choices[key] = self.selector.choose(
                card, name, call, self.weights, may_measure=may_measure, unfit=known.unfit, new=new
            )
        return known.choices[key]
