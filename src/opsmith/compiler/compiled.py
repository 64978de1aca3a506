"""One captured graph at work: studied on the first real inputs, then run as a program for each set of sizes."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from opsmith.call.common import native
from opsmith.compiler.bind import Form
from opsmith.compiler.mutation import Effects, Rehearsal, effects
from opsmith.compiler.outcome import GraphReport, SiteReport, warn_left
from opsmith.compiler.plan import PlanStep, ShapePlan, microseconds
from opsmith.compiler.program import Program, record
from opsmith.compiler.reasons import raised
from opsmith.compiler.recognize import Recognition, recognize
from opsmith.compiler.rewrite import rewrite
from opsmith.compiler.select import Choice, Packer, Selector, signature
from opsmith.compiler.settle import call_of, settle
from opsmith.compiler.site import Site, where
from opsmith.compiler.sizes import Key, differing, named, span, within
from opsmith.compiler.studies import Studies
from opsmith.compiler.study import Settled, attribute
from opsmith.compiler.worth import Worth, worth
from opsmith.kernels import calls, libraries
from opsmith.operator import Implementation, Operator, Verdict, registry

MAX_PROGRAMS = 64
MAX_STRAYS = 8
Progress = Callable[[str, int, int], None]
_UNSEEN: Any = object()
# Asked of every weight at every call.
_version = torch._C.TensorBase.__dict__["_version"].__get__
_address = torch.Tensor.data_ptr


def _unwatched() -> AbstractContextManager[None]:
    """Whoever counts what is saved for the gradients (a checkpointed layer) does not count a study's."""
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(saved: torch.Tensor) -> torch.Tensor:
    return saved


class CompiledGraph:
    """The callable that Dynamo runs in place of a captured graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        captured: Callable[..., Any],
        examples: Sequence[Any],
        selector: Selector,
        progress: Progress | None = None,
        more: Callable[[fx.GraphModule, Effects], Sequence[Site]] = lambda gm, effects: (),
    ):
        self.original = gm
        self._plain: Callable[..., Any] = gm  # what runs where no program does
        self._captured = captured
        self.selector = selector
        self.packer = Packer()
        found: Recognition = recognize(gm.graph, registry().values())
        self._counts: Counter[str] = Counter()
        self.sites: dict[str, Site] = {}
        self.report = GraphReport(misses=found.misses, nodes=len(gm.graph.nodes))
        self.effects = effects(gm.graph)
        for site in (*found.sites, *more(gm, self.effects)):
            self._add(site)
        self.plans: dict[Key, ShapePlan] = {}
        self._choices: dict[tuple[str, str], Choice] = {}
        self._forms: dict[str, Form] = {}  # by site: how its program will call it, as far as a study can tell
        self._unfit: dict[str, dict[str, str]] = {}  # by site: implementations that failed its proof, and why
        self._programs: dict[Key, Program | None] = {}
        self._spans: dict[Key, int] = {}  # programs that serve many sizes: how many results they allocate
        self._seen: set[Key] = set()  # sizes that such a program has served
        self._varies: set[int] = set()  # the numbers of a key that such a program leaves open
        self._strays = 0
        self._worths: dict[Key, Worth] = {}
        self._studies = Studies()
        self.studied = False  # whether an example was seen before
        self._rewritten: fx.GraphModule | None = None
        self._lock = threading.RLock()
        self.progress = progress
        self._placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._symbols = [
            i for i, n in enumerate(self._placeholders) if not isinstance(n.meta.get("val"), torch.Tensor)
        ]
        self._weights = [
            i for i, e in enumerate(examples) if isinstance(e, torch.nn.Parameter) and not e.is_inference()
        ]
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._packed_from: list[torch.Tensor] = []
        self._watch: Callable[..., bool] | None = None  # what tells soonest that none of these has changed
        self._changed = self.effects.inputs(gm.graph)

    def _add(self, site: Site) -> str:
        """Enter a site under a name of its own."""
        operator = site.card.name
        name = f"{operator}_{self._counts[operator]}"
        self._counts[operator] += 1
        self.sites[name] = site
        self.report.sites.append(SiteReport(name, operator, site.pattern, where(site.root), site.composite))
        return name

    def divided(
        self, name: str, value: Callable[[Node], Any], form: Callable[[Site], Form], learn: Collection[Node]
    ) -> list[str]:
        """The names under which a site runs: its own, or, where they are faster together, those of its parts."""
        site = self.sites[name]
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
        site = self.sites.pop(name)
        self.report.sites = [r for r in self.report.sites if r.name != name]
        return [self._add(part) for part in site.parts]

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return self._training(args)
        key = tuple(args[i] for i in self._symbols)
        program = self._programs.get(key, _UNSEEN)
        if program is _UNSEEN and self._spans:
            program = self._spanning(key)
        if program is _UNSEEN or self._weights_changed(args):
            return self._first(key, args)
        return self._plain(*args) if program is None else program(args)

    def _spanning(self, key: Key) -> Any:
        """The program that serves these sizes among others, until they come again and deserve one of their own."""
        for sizes, fresh in list(self._spans.items()):  # another thread may record meanwhile
            if within(key, sizes):
                if fresh and key in self._seen and len(self._programs) < MAX_PROGRAMS:
                    return _UNSEEN
                if fresh and len(self._seen) < 1 << 16:
                    self._seen.add(key)
                return self._programs.get(sizes, _UNSEEN)
        return _UNSEEN

    def _span(self, key: Key) -> tuple[Key, frozenset[Any]]:
        """The sizes to record a program for: those of an example alone, else with all that has been seen to vary."""
        if self.selector.learning or key in self._seen or not self._programs:
            return key, frozenset()
        new = differing(key, next(reversed(self._programs))) - self._varies
        self._strays += bool(new)
        # What changes now and then (the size of a batch) has programs of its own, what does so all the time has not.
        if not self._varies or self._strays > MAX_STRAYS:
            self._varies, self._strays = self._varies | new, 0
        return span(key, self._varies, [self._placeholders[i] for i in self._symbols])

    def _first(self, key: Key, args: Sequence[Any]) -> Any:
        with self._lock, torch.no_grad():
            if self._weights_changed(args):
                self._repack(args)
            rehearsal = Rehearsal(args, self._changed)
            if not self._changed and not self.effects.random:
                return self._prepare(key, rehearsal)
            # What a run changes, weights and random numbers included, must change once: all this is on copies.
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                self._prepare(key, rehearsal)
            program = self._programs[key] if key in self._programs else self._spanning(key)
            return self._plain(*args) if program is None else program(args)

    def _prepare(self, key: Key, rehearsal: Rehearsal) -> Any:
        tuning = self._rewritten is None or self.selector.learning
        if tuning and not self.report.left:
            try:
                self.study(rehearsal.again())
            except Exception as error:
                self._captured(*rehearsal.again())  # the model's own error is the one to see
                self._leave(error)
        if self.report.left:
            return self._eagerly(key, rehearsal, self.report.left)
        try:
            return self._record(key, rehearsal, tuning)
        except Exception as error:
            return self._eagerly(key, rehearsal, f"{raised(error)}: eager runs")
        finally:
            if tuning:
                self._save()

    def _eagerly(self, key: Key, rehearsal: Rehearsal, why: str) -> Any:
        result = self._plain(*rehearsal.again())
        self._keep(key, None, ShapePlan(self._sizes(key), [], 0, False, why))
        return result

    def _leave(self, error: Exception) -> None:
        """Run the graph as it was captured, from now on: what we cannot study must not stop the model."""
        self._plain = self._captured
        self.report = GraphReport(nodes=self.report.nodes, left=raised(error))
        self.sites = {}
        warn_left(self.report)

    def _weights_changed(self, args: Sequence[Any]) -> bool:
        """True when a packed weight is no longer what was packed: loaded anew, trained, replaced or moved."""
        if self._watch is not None and self._watch(args):
            return False
        weights = [args[i] for i in self._weights]
        return (
            list(map(_version, weights)) != self._versions or list(map(_address, weights)) != self._addresses
        )

    def _repack(self, args: Sequence[Any]) -> None:
        weights = [args[i] for i in self._weights]
        self._versions, self._addresses = list(map(_version, weights)), list(map(_address, weights))
        self._watch = calls.watch(tuple(weights), True)
        # While these are held, no other weight can come to stand at the same address.
        self._packed_from = [w.detach() for w in weights]
        self.packer.forget()
        self.packer.constants = {w.data_ptr(): w for w in weights}
        self._forget_programs()

    def _forget_programs(self) -> None:
        self._programs.clear()
        self._spans.clear()

    def close(self) -> None:
        """Let go of the weights: Dynamo may keep this graph long after its model is gone."""
        with self._lock:
            self.packer.forget()
            self.packer.constants = {}
            self._versions, self._addresses, self._packed_from, self._watch = [], [], [], None
            self._forget_programs()

    def study(self, args: Sequence[Any], training: bool = False) -> None:
        """Run the captured graph on real inputs; at each site choose by measurement, and prove the choice."""
        if not self._versions and self._weights:
            self._repack(args)
        self._load_kernels(args, training)
        before = len(self.report.kept)
        kept = self._studies.run(self, args, training)
        if len(self.report.kept) < before:
            self._forget_programs()  # those of examples seen earlier still have the site
        self._rewritten, self.studied = rewrite(self.original, kept), True

    def _save(self) -> None:
        """Keep for the next process what was found out."""
        self.selector.save()
        self._studies.save()

    def _load_kernels(self, args: Sequence[Any], training: bool) -> None:
        """Build the native kernels of what was found in one run, where they are not there: not one after the other."""
        names = {
            schema.partition("(")[0]
            for site in self.sites.values()
            # The first one is the forward.
            for schema in (site.card.schemas if training else site.card.schemas[:1])
        }
        first = next((a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()), None)
        if first is not None and (known := sorted(names & libraries.kernels().keys())):
            native(first, *known)

    def _record(self, key: Key, rehearsal: Rehearsal, tuning: bool) -> Any:
        assert self._rewritten is not None
        sizes, free = self._span(key)
        steps: list[PlanStep] = []

        def choose(name: str, call: dict[str, Any]) -> tuple[Operator, Choice, Implementation]:
            site = self.sites[name]
            choice = self.choice(name, call, may_measure=False)
            steps.append(
                PlanStep(
                    name,
                    site.card.name,
                    signature(site.card, call),
                    choice.implementation,
                    choice.reason,
                    microseconds(choice.times),
                    dict(choice.refused),
                )
            )
            return site.card, choice, self.selector.implementation(site.card, choice.implementation)

        program, result = record(
            self._rewritten.graph,
            lambda name: attribute(self._rewritten, name),
            rehearsal.again(),
            choose,
            self.packer,
            free,
        )
        slots = {s.site: s.slot for s in program.steps if s.site is not None}
        for step in steps:
            step.slot = slots.get(step.site)
        if tuning:
            self._worths[key] = self._worth(program, rehearsal, steps)
        whole = self._worth_nearby(key)
        plan = ShapePlan(
            self._sizes(sizes), steps, sum(program.slots), whole.used, whole.note, program.source
        )
        if free:
            self._spans[sizes] = program.fresh if whole.used else 0
        self._keep(sizes, program if whole.used else None, plan)
        return result

    def _keep(self, sizes: Key, program: Program | None, plan: ShapePlan) -> None:
        if len(self._programs) >= MAX_PROGRAMS:
            oldest = next(iter(self._programs))
            del self._programs[oldest], self.plans[oldest]
            self._spans.pop(oldest, None)
        self._programs[sizes], self.plans[sizes] = program, plan

    def _sizes(self, key: Key) -> str:
        return named([str(self._placeholders[i].meta.get("val")) for i in self._symbols], key)

    def _worth_nearby(self, key: Key) -> Worth:
        """What was found at the nearest sizes measured: only an example is worth the time of measuring."""

        def distance(other: Key) -> float:
            return sum(abs(math.log(max(a, 1) / max(b, 1))) for a, b in zip(key, other, strict=True))

        nearest = min(self._worths, key=distance, default=None)
        if nearest is None:
            return Worth(bool(self.sites), "not timed as a whole")
        found = self._worths[nearest]
        return found if nearest == key else Worth(found.used, f"as at {self._sizes(nearest)}")

    def _worth(self, program: Program, rehearsal: Rehearsal, steps: Sequence[PlanStep]) -> Worth:
        """Whether the program as a whole runs."""
        if not self.sites:
            return Worth(False, "no operator of ours in this graph")
        if not self.selector.config.tune:
            return Worth(True, "not timed as a whole")
        return worth(
            self.original.code,
            steps,
            self.selector.saved,
            self.selector.cache,
            lambda: program(rehearsal.again(numbers=False)),
            lambda: self.original(*rehearsal.again(numbers=False)),
        )

    def choice(
        self, name: str, call: dict[str, Any], *, may_measure: bool, form: Form | None = None
    ) -> Choice:
        """The choice for a site and a call; equal calls of one operator choose alike, where they have one form."""
        site = self.sites[name]
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

    def reject(self, name: str, implementation: str, why: str) -> None:
        """Never again choose this implementation for this site, at whatever sizes."""
        self._unfit.setdefault(name, {})[implementation] = why
        self._choices = {key: choice for key, choice in self._choices.items() if key[0] != name}

    def _training(self, args: Sequence[Any]) -> Any:
        """With gradients: the rewritten graph on the public functions, which differentiate."""
        with self._lock:
            if self._rewritten is None and not self.report.left:
                try:
                    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), _unwatched():
                        self.study(Rehearsal(args, self._changed).again(), training=True)
                    self._save()
                except Exception as error:
                    result = self._captured(*args)
                    self._leave(error)
                    return result
        return self._plain(*args) if self._rewritten is None else self._rewritten(*args)
