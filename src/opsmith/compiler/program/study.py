"""The study of a captured graph: one run on real inputs, in which each site is chosen and proved."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith import measure
from opsmith.compiler.capture.casts import Regions
from opsmith.compiler.choose.ranks import agreed
from opsmith.compiler.choose.settle import learning
from opsmith.compiler.find.site import Site
from opsmith.compiler.program.sites import SPENT, Known, Sites
from opsmith.compiler.progress import show
from opsmith.compiler.prove.alike import Alike, form
from opsmith.compiler.prove.proofs import Proved
from opsmith.compiler.prove.site import Exact, prove, run_wide, worst
from opsmith.compiler.reasons import raised
from opsmith.compiler.steps.slots import entering
from opsmith.operator import Verdict

# A model that computes something under no_grad turns recording on again behind it: not while its values are studied.
_SET_GRAD = torch._C._set_grad_enabled


class Study:
    """One run of the captured graph that stops at every site."""

    def __init__(self, sites: Sites, args: Sequence[Any], training: bool, proved: Proved | None):
        self.sites = sites
        self.nodes = list(sites.gm.graph.nodes)
        self.training = training
        self.proved = proved
        self.alike = Alike()
        self.learn = learning(self.nodes, args) if training else set()
        self.env = entering(sites.gm, args)
        self.value = self.env.__getitem__
        self.regions = Regions()
        self.at: dict[Node, list[str]] = {}
        self.last: dict[Node, Node] = {n: max(n.users, default=n) for n in self.nodes}
        for name, known in sites.items():
            site, end = known.site, max(known.site.outputs)
            self.at.setdefault(end, []).append(name)
            for node in (*site.region, *(n for r in site.region for n in r.all_input_nodes), *site.inputs):
                self.last[node] = max(self.last[node], end)

    def run(self) -> list[tuple[str, Site]]:
        """Choose and prove; the sites that are kept."""
        kept: list[tuple[str, Site]] = []
        walk = (name for ending in self._walk() for name in ending)
        names = (n for name in walk for n in self.sites.divided(name, self.value, self.learn))
        with self.regions:
            for done, name in enumerate(names, 1):
                show(f"measuring and proving {name} ({done}/{len(self.sites.report.sites)})")
                known = self.sites[name]
                if known.report.status == "kept" and self.sites.selector.spent:
                    known.report.status, known.report.why = "left", SPENT
                # What failed at other sizes stays out: one rewritten graph serves all.
                if known.report.status == "kept" and self._settled(name, known):
                    kept.append((name, known.site))
        show()
        return kept

    def _walk(self) -> Iterator[list[str]]:
        """Run the graph, node by node; at each one the sites that end there, whose values are all at hand."""
        ending: dict[Node, list[Node]] = {}
        for node, end in self.last.items():
            ending.setdefault(end, []).append(node)
        for node in self.nodes:
            call = node.op == "call_function" and node.target is not _SET_GRAD
            if call and not self.regions.follow(node.target, node.args):
                self._call(node)
            yield self.at.get(node, [])
            for finished in ending.get(node, ()):
                self.env.pop(finished, None)

    def _call(self, node: Node) -> None:
        args, kwargs = map_arg(node.args, self.value), map_arg(node.kwargs, self.value)
        made = None if self.training else self.sites.weights.made(node, args)
        if made is None:
            with measure.Widened():
                made = node.target(*args, **kwargs)  # type: ignore[operator]
        self.env[node] = made

    def _settled(self, name: str, known: Known) -> bool:
        """Choose and prove one site: what is not accurate enough gives way to the next fastest that is.

        False rolls the site back to the model's own nodes.
        """
        site, report = known.site, known.report
        call = site.call(self.value)
        exact = functools.cache(partial(run_wide, site, self.value))
        failures = [report.why] if report.why else []  # of examples before this one
        while True:
            choice = self.sites.choice(name, call, may_measure=True)
            if not self.sites.selector.config.verify:
                return True
            verdict = self._prove(known, choice.implementation, call, exact)
            report.error, report.bound = verdict.error, verdict.bound
            if not (why := agreed(self.sites.selector.ranks, verdict.failure)):
                return True
            failures.append(f"{choice.implementation}: {why}")
            report.why = "; ".join(failures)
            if choice.implementation == "eager":
                report.status = "rolled back"
                return False
            known.unfit[choice.implementation] = why
            known.choices.clear()

    def _prove(self, of: Known, candidate: str, call: dict[str, Any], exact: Exact) -> Verdict:
        site, report = of.site, of.report
        implementation = self.sites.selector.implementation(site.card, candidate)
        known = None if self.proved is None else self.proved.get(site, implementation)
        if known is not None:
            verdict, report.like = known
            return verdict
        try:
            results = site.results(implementation.fn(**self.sites.weights.swapped(implementation, call)))
            written = form(site, self.value)
            found = self.alike.check(written, candidate, site, self.value, results)
            if found is None:
                verdicts = prove(site, self.value, results, exact)
                self.alike.put(written, candidate, report.name, verdicts)
                found = "", worst(verdicts)
        except Exception as error:  # the model itself has run: what can't run, or be proved, is refused
            return Verdict(False, math.inf, 0.0, raised(error))
        report.like, verdict = found
        if self.proved is not None:
            self.proved.put(site, implementation, verdict, report.like)
        return verdict
