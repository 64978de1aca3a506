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
from opsmith.compiler.program.sites import Known, Settled, Sites
from opsmith.compiler.prove import proofs
from opsmith.compiler.prove.site import prove, run_wide
from opsmith.compiler.reasons import raised
from opsmith.compiler.steps.bind import Form
from opsmith.compiler.steps.slots import entering, memory
from opsmith.operator import Verdict

Progress = Callable[[str, int, int], None]
# A model that computes something under no_grad turns recording on again behind it: not while its values are studied.
_SET_GRAD = torch._C._set_grad_enabled


class Study:
    """One run of the captured graph that stops at every site."""

    def __init__(
        self,
        sites: Sites,
        args: Sequence[Any],
        training: bool,
        proved: proofs.Proved | None,
        progress: Progress | None = None,
    ):
        self.sites, self.progress = sites, progress
        self.nodes = list(sites.gm.graph.nodes)
        self.training = training
        self.proved = proved
        self.repeatable = True  # whether the same study would find the same
        self.apart: list[str] = []
        self.settled: dict[str, Settled] = {}
        self._wide: dict[int, Mapping[Node, torch.Tensor]] = {}  # of the sites that end at one node
        self.learn = learning(self.nodes, args) if training else set()
        self.env = entering(sites.gm, args)
        self.at: dict[Node, list[str]] = {}
        self.still = sites.weights.places
        self.shared = sites.effects.memory
        self.buffers: set[int] = set()  # the memory, as `shared` numbers it, for which a program has a buffer
        results = sites.gm.graph.find_nodes(op="output")[0].all_input_nodes
        self.given = {self.shared[n] for n in results if n in self.shared}  # the caller's
        self.last: dict[Node, Node] = {n: max(n.users, default=n) for n in self.nodes}
        for name, site in sites.named.items():
            end = max(site.outputs)
            self.at.setdefault(end, []).append(name)
            for node in (*site.region, *(n for r in site.region for n in r.all_input_nodes), *site.inputs):
                self.last[node] = max(self.last[node], end)

    def run(self) -> list[tuple[str, Site]]:
        """Choose and prove; the sites that are kept."""
        kept: list[tuple[str, Site]] = []
        names = (n for ending in self._walk() for m in ending for n in self._divided(m))
        for done, name in enumerate(names, 1):
            if self.progress is not None:
                self.progress(name, done, len(self.sites.report.sites))
            known = self.sites[name]
            # What failed at other sizes stays out: one rewritten graph serves all.
            if known.report.status == "kept" and self._site(name, known):
                kept.append((name, known.site))
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
            site = self.sites[name].site
            call = call_of(site, self.value)
            self._prove(site, site.card.candidates(**call)[0][0].name, call)

    def _walk(self) -> Iterator[list[str]]:
        """Run the graph, node by node; at each one the sites that end there, whose values are all at hand."""
        ending: dict[Node, list[Node]] = {}
        for node, end in self.last.items():
            ending.setdefault(end, []).append(node)
        for node in self.nodes:
            if node.op == "call_function" and node.target is not _SET_GRAD:
                self._call(node)
            yield self.at.get(node, [])
            self._wide.clear()
            for finished in ending.get(node, ()):
                self.env.pop(finished, None)

    def _call(self, node: Node) -> None:
        args, kwargs = map_arg(node.args, self.value), map_arg(node.kwargs, self.value)
        cast = None if self.training else self.sites.weights.cast(node, args)
        self.env[node] = node.target(*args, **kwargs) if cast is None else cast  # type: ignore[operator]
        if cast is not None:
            self.still.add(memory(cast))
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
        if not isinstance(value, torch.Tensor) or memory(value) in self.still:
            return True
        return any(
            self.shared.get(n) in self.buffers and memory(value) == memory(self.env[n])
            for n in nodes_in(operand)
        )

    def _in_buffers(self, outputs: Sequence[Node]) -> None:
        self.buffers |= {self.shared[n] for n in outputs if n in self.shared} - self.given

    def _site(self, name: str, known: Known) -> bool:
        """Choose and prove one site: what is not accurate enough gives way to the next fastest that is.

        False rolls the site back to the model's own nodes.
        """
        site, selector = known.site, self.sites.selector
        call = call_of(site, self.value)
        choice = self.sites.choice(name, call, may_measure=True, form=self._form(site))
        if selector.config.verify:
            kept = self._proved(name, known, call, choice)
            if kept is None:
                return False
            choice = kept
        implementation = selector.implementation(site.card, choice.implementation)
        if implementation.takes_out:
            self._in_buffers(site.outputs)
        proof = proofs.name(site, implementation)
        self.settled[name] = Settled(
            signature(site.card, call), known.form, choice, proof, dict(known.unfit), known.report.why
        )
        return True

    def _proved(self, name: str, known: Known, call: dict[str, Any], choice: Choice) -> Choice | None:
        report = known.report
        failures = [report.why] if report.why else []  # of examples before this one
        while True:
            verdict = self._prove(known.site, choice.implementation, call)
            report.error, report.bound = verdict.error, verdict.bound
            if not verdict.ok:
                failures.append(f"{choice.implementation}: {verdict.why}")
            report.why = "; ".join(failures)
            if verdict.ok:
                return choice
            if choice.implementation == "eager":
                report.status = "rolled back"
                self.repeatable = False
                return None
            self.sites.reject(name, choice.implementation, verdict.why)
            choice = self.sites.choice(name, call, may_measure=True)

    def _exactly(self, site: Site, value: Callable[[Node], Any]) -> Mapping[Node, torch.Tensor]:
        """The site in float64, for all implementations that are tried on it."""
        if id(site) not in self._wide:
            self._wide[id(site)] = run_wide(site, value)
        return self._wide[id(site)]

    def _prove(self, site: Site, candidate: str, call: dict[str, Any]) -> Verdict:
        implementation = self.sites.selector.implementation(site.card, candidate)
        known = None if self.proved is None else self.proved.get(proofs.name(site, implementation))
        if known is not None:
            return known
        try:
            result = implementation.fn(**self.sites.weights.swapped(implementation, call))
        except Exception as error:  # the model itself has run: an implementation that can't is refused
            self.repeatable = False
            return Verdict(False, math.inf, 0.0, raised(error))
        verdict = prove(site, self.value, site.results(result), self._exactly)
        if self.proved is not None and not self.proved.put(site, implementation, verdict):
            self.repeatable = False
        return verdict
