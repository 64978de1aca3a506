"""The study of a captured graph: one run on real inputs, in which each site is chosen and proved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from opsmith.compiler.capture.filled import filled
from opsmith.compiler.choose.select import Choice, signature
from opsmith.compiler.choose.settle import call_of, learning
from opsmith.compiler.find.joined import joined
from opsmith.compiler.find.operands import Made, evaluate, nodes_in
from opsmith.compiler.find.site import Site
from opsmith.compiler.program.outcome import SiteReport
from opsmith.compiler.program.sites import Settled, Sites
from opsmith.compiler.prove import proofs
from opsmith.compiler.prove.site import prove, run_wide
from opsmith.compiler.reasons import raised
from opsmith.compiler.steps.bind import Form
from opsmith.compiler.steps.slots import memory
from opsmith.operator import Verdict

# A model that computes something under no_grad turns recording on again behind it: not while its values are studied.
_SET_GRAD = torch._C._set_grad_enabled


class Study:
    """One run of the captured graph that stops at every site."""

    def __init__(self, sites: Sites, args: Sequence[Any], training: bool, proved: proofs.Proved | None):
        self.sites = sites
        self.args = args
        self.nodes = list(sites.original.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.training = training
        self.proved = proved
        self.repeatable = True  # whether the same study would find the same
        self.apart: list[str] = []
        self.settled: dict[str, Settled] = {}
        self._wide: dict[int, Mapping[Node, torch.Tensor]] = {}  # of the sites that end at one node
        self.learn = learning(self.nodes, args) if training else set()
        self.env: dict[Node, Any] = {}
        self.at: dict[Node, list[str]] = {}
        self.weights = {memory(w) for w in sites.packer.constants.values()}
        self.shared = sites.effects.memory
        self.buffers: set[int] = set()  # the memory, as `shared` numbers it, for which a program has a buffer
        results = [n for o in self.nodes if o.op == "output" for n in o.all_input_nodes]
        self.given = {self.shared[n] for n in results if n in self.shared}  # the caller's
        self.last: dict[Node, int] = {
            n: max((self.order[u] for u in n.users), default=self.order[n]) for n in self.nodes
        }
        for name, site in sites.named.items():
            end = max(site.outputs, key=self.order.__getitem__)
            self.at.setdefault(end, []).append(name)
            for node in (*site.region, *(n for r in site.region for n in r.all_input_nodes)):
                self.last[node] = max(self.last[node], self.order[end])
            for value in site.arguments.values():
                for node in nodes_in(value):
                    self.last[node] = max(self.last[node], self.order[end])

    def run(self) -> list[tuple[str, Site]]:
        """Choose and prove; the sites that are kept."""
        sites = self.sites
        kept: list[tuple[str, Site]] = []
        names = (n for ending in self._walk() for m in ending for n in self._divided(m))
        for done, name in enumerate(names, 1):
            if sites.progress is not None:
                sites.progress(name, done, len(sites.named))
            # What failed at other sizes stays out: one rewritten graph serves all.
            report = next(r for r in sites.report.sites if r.name == name)
            if report.status == "kept" and self._site(name, report):
                kept.append((name, sites.named[name]))
        return kept

    def foresee(self, while_: Callable[[], bool]) -> None:
        """Prove what each card would take first, most of which is chosen later: work for a time in which nothing
        can be timed.
        """
        if self.proved is None:
            return
        for name in (n for ending in self._walk() for n in ending):
            if not while_():
                return
            site = self.sites.named[name]
            call = call_of(site, self.value)
            self._prove(site, site.card.candidates(**call)[0][0].name, call)

    def _walk(self) -> Iterator[list[str]]:
        """Run the graph, node by node; at each one the sites that end there, whose values are all at hand."""
        ending: dict[int, list[Node]] = {}
        for node, index in self.last.items():
            ending.setdefault(index, []).append(node)
        inputs = iter(self.args)
        for i, node in enumerate(self.nodes):
            if node.op == "placeholder":
                self.env[node] = next(inputs)
            elif node.op == "get_attr":
                self.env[node] = attribute(self.sites.original, str(node.target))
            elif node.op == "call_function" and node.target is not _SET_GRAD:
                self._call(node)
            yield self.at.get(node, [])
            self._wide.clear()
            for finished in ending.get(i, ()):
                self.env.pop(finished, None)

    def _call(self, node: Node) -> None:
        packer = self.sites.packer
        args, kwargs = map_arg(node.args, self.value), map_arg(node.kwargs, self.value)
        cast = None if self.training else packer.cast(node, args)
        self.env[node] = node.target(*args, **kwargs) if cast is None else cast  # type: ignore[operator]
        if cast is not None:
            self.weights.add(memory(cast))
        if node.target is filled:
            self._in_buffers([node])

    def value(self, node: Node) -> Any:
        return self.env[node]

    def _divided(self, name: str) -> list[str]:
        names = self.sites.divided(name, self.value, self._form, self.learn)
        self.apart += [name] if names != [name] else []
        return names

    def _form(self, site: Site) -> Form:
        """How a program calls the site, if what was chosen for the sites before it remains."""
        if any(self.shared.get(n) in self.given for n in site.outputs):
            return Form.NEW
        return Form.STILL if all(map(self._stays, site.arguments.values())) else Form.BUFFER

    def _stays(self, operand: Any) -> bool:
        """True for what is at the same place at every call: a weight, a buffer, a view of one, and any number."""
        if isinstance(operand, Made) and operand.target is joined:
            return True
        value = evaluate(operand, self.value)
        if not isinstance(value, torch.Tensor) or memory(value) in self.weights:
            return True
        return any(
            self.shared.get(n) in self.buffers and memory(value) == memory(self.env[n])
            for n in nodes_in(operand)
        )

    def _in_buffers(self, outputs: Sequence[Node]) -> None:
        self.buffers |= {self.shared[n] for n in outputs if n in self.shared} - self.given

    def _site(self, name: str, report: SiteReport) -> bool:
        """Choose and prove one site: what is not accurate enough gives way to the next fastest that is.

        False rolls the site back to the model's own nodes.
        """
        sites = self.sites
        site = sites.named[name]
        call = call_of(site, self.value)
        choice = sites.choice(name, call, may_measure=True, form=self._form(site))
        kept, choice = self._proved(name, report, call, choice)
        if not kept:
            return False
        implementation = sites.selector.implementation(site.card, choice.implementation)
        if implementation.takes_out:
            self._in_buffers(site.outputs)
        proof = proofs.name(site, implementation)
        self.settled[name] = sites.settled(report, signature(site.card, call), choice, proof)
        return True

    def _proved(
        self, name: str, report: SiteReport, call: dict[str, Any], choice: Choice
    ) -> tuple[bool, Choice]:
        sites = self.sites
        site = sites.named[name]
        if not sites.selector.config.verify:
            return True, choice
        failures = [report.why] if report.why else []  # of examples before this one
        while True:
            verdict = self._prove(site, choice.implementation, call)
            report.error, report.bound = verdict.error, verdict.bound
            if not verdict.ok:
                failures.append(f"{choice.implementation}: {verdict.why}")
            report.why = "; ".join(failures)
            if verdict.ok:
                return True, choice
            if choice.implementation == "eager":
                report.status = "rolled back"
                self.repeatable = False
                return False, choice
            sites.reject(name, choice.implementation, verdict.why)
            choice = sites.choice(name, call, may_measure=True)

    def _exactly(self, site: Site, value: Callable[[Node], Any]) -> Mapping[Node, torch.Tensor]:
        """The site in float64, for all implementations that are tried on it."""
        if id(site) not in self._wide:
            self._wide[id(site)] = run_wide(site, value)
        return self._wide[id(site)]

    def _prove(self, site: Site, candidate: str, call: dict[str, Any]) -> Verdict:
        sites = self.sites
        implementation = sites.selector.implementation(site.card, candidate)
        known = None if self.proved is None else self.proved.get(proofs.name(site, implementation))
        if known is not None:
            return known
        try:
            result = implementation.fn(**sites.packer(implementation, call))
        except Exception as error:  # the model itself has run: an implementation that can't is refused
            self.repeatable = False
            return Verdict(False, math.inf, 0.0, raised(error))
        verdict = prove(site, self.value, site.results(result), self._exactly)
        if self.proved is not None and not self.proved.put(site, implementation, verdict):
            self.repeatable = False
        return verdict


def attribute(gm: Any, name: str) -> Any:
    """The attribute of a dotted name."""
    for part in name.split("."):
        gm = getattr(gm, part)
    return gm
