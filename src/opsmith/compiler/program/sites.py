"""The sites of one graph: what was found, what runs each of them, and what is known not to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx import Node

from opsmith.compiler.capture.mutation import Effects
from opsmith.compiler.choose.select import Choice, Packer, Selector, signature
from opsmith.compiler.choose.settle import call_of, settle
from opsmith.compiler.find.recognize import Recognized
from opsmith.compiler.find.site import Site, where
from opsmith.compiler.program.outcome import GraphReport, SiteReport
from opsmith.compiler.steps.bind import Form
from opsmith.operator import Verdict

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settled:
    """A site that was kept: its call, what runs it, and the name of the proof."""

    signature: str
    form: Form
    choice: Choice
    proof: str
    unfit: dict[str, str]
    why: str


class Sites:
    """The sites of a captured graph by name, with the choices for them."""

    def __init__(
        self,
        gm: fx.GraphModule,
        effects: Effects,
        found: Recognized,
        more: Sequence[Site],
        selector: Selector,
        progress: Progress | None = None,
    ):
        self.original, self.effects, self.selector, self.progress = gm, effects, selector, progress
        self.packer = Packer()
        self.report = GraphReport(misses=found.misses, nodes=len(gm.graph.nodes))
        self.named: dict[str, Site] = {}
        self.studied = False  # whether an example was seen before
        self._counts: Counter[str] = Counter()
        self._choices: dict[tuple[str, str], Choice] = {}
        self._forms: dict[str, Form] = {}  # by site: how its program will call it, as far as a study can tell
        self._unfit: dict[str, dict[str, str]] = {}  # by site: implementations that failed its proof, and why
        for site in (*found.sites, *more):
            self._add(site)

    def _add(self, site: Site) -> str:
        """Enter a site under a name of its own."""
        operator = site.card.name
        name = f"{operator}_{self._counts[operator]}"
        self._counts[operator] += 1
        self.named[name] = site
        self.report.sites.append(SiteReport(name, operator, site.pattern, where(site.root), site.composite))
        return name

    def divided(
        self, name: str, value: Callable[[Node], Any], form: Callable[[Site], Form], learn: Collection[Node]
    ) -> list[str]:
        """The names under which a site runs: its own, or, where they are faster together, those of its parts."""
        site = self.named[name]
        if not site.parts or self.studied:
            return [name]

        def choose(part: Site, call: dict[str, Any]) -> Choice:
            return self.selector.choose(
                part.card, part.card.name, call, self.packer, may_measure=True, form=form(part)
            )

        call = call_of(site, value)
        choice = self.choice(name, call, may_measure=True, form=form(site))
        apart, self._choices[name, signature(site.card, call)] = settle(site, choice, choose, value, learn)
        return self.divide(name) if apart else [name]

    def divide(self, name: str) -> list[str]:
        """Put the parts of a site in its place."""
        site = self.named.pop(name)
        self.report.sites = [r for r in self.report.sites if r.name != name]
        return [self._add(part) for part in site.parts]

    def choice(
        self, name: str, call: dict[str, Any], *, may_measure: bool, form: Form | None = None
    ) -> Choice:
        """The choice for a site and a call; equal calls of one operator choose alike, where they have one form."""
        site = self.named[name]
        form = self._forms[name] = form or self._forms.get(name, Form.NEW)
        key = (name, signature(site.card, call))
        if key not in self._choices:
            self._choices[key] = self.selector.choose(
                site.card,
                name,
                call,
                self.packer,
                may_measure=may_measure,
                unfit=self._unfit.get(name, {}),
                form=form,
            )
        return self._choices[key]

    def reject(self, name: str, implementation: str, why: str) -> None:
        """Never again choose this implementation for this site, at whatever sizes."""
        self._unfit.setdefault(name, {})[implementation] = why
        self._choices = {key: choice for key, choice in self._choices.items() if key[0] != name}

    def settled(self, report: SiteReport, call: str, choice: Choice, proof: str) -> Settled:
        """What a study found out about a site."""
        unfit = dict(self._unfit.get(report.name, {}))
        return Settled(call, self._forms[report.name], choice, proof, unfit, report.why)

    def recall(self, name: str, found: Settled, verdict: Verdict) -> None:
        """Take over what the same study found out about a site before."""
        report = next(r for r in self.report.sites if r.name == name)
        report.error, report.bound, report.why = verdict.error, verdict.bound, found.why
        self._forms[name], self._unfit[name] = found.form, found.unfit
        self._choices[name, found.signature] = found.choice

    def leave(self, why: str) -> None:
        """Have no sites: the graph runs as it was captured."""
        self.report = GraphReport(nodes=self.report.nodes, left=why)
        self.named = {}
