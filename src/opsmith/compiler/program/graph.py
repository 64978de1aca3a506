"""One captured graph at work: studied on the first real inputs, then run as a program for each set of sizes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from opsmith import measure
from opsmith.call.dispatch import native
from opsmith.compiler.capture.mutation import Rehearsal
from opsmith.compiler.choose.select import Selector, device_of, signature
from opsmith.compiler.choose.weights import Weights
from opsmith.compiler.choose.worth import Worth, learning_worth, worth
from opsmith.compiler.find.products import Lay, weights
from opsmith.compiler.find.recognize import Recognized
from opsmith.compiler.plan import PlanStep, ShapePlan
from opsmith.compiler.program.program import Program, Recorder
from opsmith.compiler.program.programs import UNSEEN, Key, Programs
from opsmith.compiler.program.recordings import Recordings, current, gpu_of
from opsmith.compiler.program.rewrite import rewrite
from opsmith.compiler.program.sites import More, Sites
from opsmith.compiler.program.study import Study
from opsmith.compiler.prove.proofs import Proofs
from opsmith.compiler.reasons import raised
from opsmith.kernels import libraries
from opsmith.operator import Implementation, Operator


class CompiledGraph:
    """The callable that runs in place of a captured graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        found: Recognized,
        captured: Callable[..., Any],
        examples: Sequence[Any],
        selector: Selector,
        proofs: Proofs,
        more: More = lambda gm, effects, sites: sites,
        lay: Lay = lambda weights: False,
    ):
        self.original = gm
        self.weights = Weights(examples, self.close)
        self.sites = Sites(gm, found, selector, self.weights, more)
        self.report = self.sites.report
        self.programs = Programs([n for n in gm.graph.nodes if n.op == "placeholder"])
        self.plans = self.programs.plans
        self.rewritten: fx.GraphModule | None = None
        self._plain: Callable[..., Any] = gm  # what runs where no program does
        self._captured = captured
        self._selector, self._proofs = selector, proofs
        self._lay = lay
        self._changed = self.sites.effects.inputs(gm.graph)
        self._learning: Worth | None = None  # once gradients were asked for: whether it runs rewritten then
        self._gpu = gpu_of(examples)
        steady = not (self._changed or self.sites.effects.random)
        self.recordings: Recordings | None = None
        if selector.config.cuda_graphs and steady and self._gpu is not None:
            self.recordings = Recordings(self.weights.others(examples))
        self._lock = threading.RLock()
        weakref.finalize(self, measure.trim_later).atexit = False

    def __call__(self, *args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            return self._training(args)
        key = self.programs.key(args)
        program = self.programs.find(key)
        if program is UNSEEN or self.weights.changed(args):
            return self._first(key, args)
        if self.recordings is not None:
            with current(self._gpu):
                run = (lambda args: self._plain(*args)) if program is None else program.apart
                return self.recordings(key, run, args)
        return self._plain(*args) if program is None else program(args)

    def _forget(self) -> None:
        self.programs.clear()
        if self.recordings is not None:
            self.recordings.clear()

    def _first(self, key: Key, args: Sequence[Any]) -> Any:
        with self._lock, torch.no_grad(), current(self._gpu):
            self._take_weights(args)
            rehearsal = Rehearsal(args, self._changed)
            if not self._changed and not self.sites.effects.random:
                return self._prepare(key, rehearsal)
            # What a run changes, weights and random numbers included, must change once: all this is on copies.
            with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
                self._prepare(key, rehearsal)
            program = self.programs.find(key)
            return self._plain(*args) if program is None else program(args)

    def _prepare(self, key: Key, rehearsal: Rehearsal) -> Any:
        tuning = self.rewritten is None or self._selector.learning
        if tuning and not self.report.left:
            self._study_or_leave(rehearsal)
        if self.report.left:
            return self._eagerly(key, rehearsal, self.report.left)
        try:
            return self._record(key, rehearsal, tuning)
        except Exception as error:
            return self._eagerly(key, rehearsal, f"{raised(error)}: eager runs")
        finally:
            if tuning:
                self._save()
                measure.trim()

    def _eagerly(self, key: Key, rehearsal: Rehearsal, why: str) -> Any:
        result = self._plain(*rehearsal.again())
        self.programs.keep(key, None, ShapePlan(self.programs.named(key), [], 0, False, why))
        return result

    def _take_weights(self, args: Sequence[Any]) -> None:
        """Begin anew where a weight is not what it was."""
        if self.weights.changed(args):
            given = dict(zip(self.original.graph.find_nodes(op="placeholder"), args, strict=True))
            for known in self.sites.values():
                if side_by_side := weights(known.site):  # which other memory than before may have parted
                    self._lay([given[n] for n in side_by_side])
            self.weights.take(args)
            self._forget()

    def close(self) -> None:
        """Let go of the weights, whose model may be gone; called again, the graph begins anew."""
        with self._lock:
            self.weights.clear()
            self._forget()
        measure.trim_later()

    def _study_or_leave(self, rehearsal: Rehearsal, training: bool = False) -> None:
        """Study the graph; what we cannot study must not stop the model, and runs from now on as it was captured."""
        try:
            self._study(rehearsal.again(), training)
        except Exception as error:
            self._captured(*rehearsal.again())  # the model's own error is the one to see
            self._plain = self._captured
            self.sites.clear()
            self.report.leave(raised(error))

    def _study(self, args: Sequence[Any], training: bool) -> None:
        """Run the captured graph on real inputs; at each site choose by measurement, and prove the choice."""
        self._take_weights(args)
        _load_kernels(self.sites, args, training)
        before = len(self.report.kept)
        provable = self._selector.config.verify and not training and not self.sites.effects.random
        proved = self._proofs.of(self.original, args) if provable else None
        with torch.no_grad():
            kept = Study(self.sites, args, training, proved).run()
        if len(self.report.kept) < before:
            self._forget()  # those of examples seen earlier still have the site
        self.rewritten, self.sites.studied = rewrite(self.original, kept), True

    def _save(self) -> None:
        """Keep for the next process what was found out."""
        self._selector.cache.save()
        self._proofs.save()

    def _record(self, key: Key, rehearsal: Rehearsal, tuning: bool) -> Any:
        assert self.rewritten is not None
        sizes, free = self.programs.span(key, self._selector.learning)
        steps: list[PlanStep] = []

        def choose(name: str, call: dict[str, Any]) -> tuple[Operator, Implementation]:
            card = self.sites[name].site.card
            choice = self.sites.choice(name, call, may_measure=False)
            times = {name: round(t * 1e6, 3) for name, t in choice.times.items()}
            found = (choice.implementation, choice.reason, times, dict(choice.refused))
            steps.append(PlanStep(name, card.name, signature(card, call), *found))
            return card, self._selector.implementation(card, choice.implementation)

        known = choose, self.weights, self.programs.buffers, free
        program, result = Recorder(self.rewritten, rehearsal.again(), *known).run()
        for step in steps:
            step.slot = program.taken.get(step.site)
        if tuning:
            self.programs.worths[key] = self._worth(program, rehearsal, steps)
        whole = self.programs.worth(key) or Worth(bool(self.sites), "not timed as a whole")
        name = self.programs.named(sizes)
        plan = ShapePlan(name, steps, sum(program.slots), whole.used, whole.note, program.source)
        self.programs.keep(sizes, program if whole.used else None, plan)
        return result

    def _worth(self, program: Program, rehearsal: Rehearsal, steps: Sequence[PlanStep]) -> Worth:
        """Whether the program as a whole runs."""
        if not self.report.kept:
            return Worth(False, f"no operator of ours {'runs' if self.sites else 'is'} in this graph")
        if not self._selector.config.tune or self._selector.spent:
            return Worth(True, "not timed as a whole")
        return worth(
            self._selector,
            self.original.code,
            steps,
            lambda: program(rehearsal.again(numbers=False)),
            lambda: self.original(*rehearsal.again(numbers=False)),
            device_of(rehearsal.given),
        )

    def _training(self, args: Sequence[Any]) -> Any:
        """With gradients: the rewritten graph on the public functions, which differentiate, where that is faster."""
        with self._lock:
            if self._learning is None:
                # Whoever counts what is saved for gradients (a checkpointed layer) does not count a study's.
                unwatched = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
                forked = torch.random.fork_rng(devices=range(torch.cuda.device_count()))
                with forked, unwatched, current(self._gpu):
                    self._learning = self._begin_learning(Rehearsal(args, self._changed))
                self._save()
                name = self.programs.named(self.programs.key(args))
                worth = self._learning
                self.plans["training",] = ShapePlan(name, [], 0, worth.used, worth.note, training=True)
        rewritten = self.rewritten if self._learning.used else None
        return self._captured(*args) if rewritten is None else rewritten(*args)

    def _begin_learning(self, rehearsal: Rehearsal) -> Worth:
        if self.rewritten is None and not self.report.left:
            self._study_or_leave(rehearsal, training=True)
        if self.rewritten is None or not self.report.kept:
            return Worth(False, self.report.left or "no operator of ours runs in this graph")
        if not self._selector.config.tune or self._selector.spent or self._changed:
            return Worth(True, "forward and backward were not timed")
        given = rehearsal.again()
        return learning_worth(self._selector, self.original.code, given, self.rewritten, self._captured)


class Apart:
    """A captured graph that serves several matters, each studied by itself.

    Layers that are alike, each with weights of its own, where the model's graph breaks in one of them; and a prompt
    and a token, where `ones` says so: which numbers are one decides.
    """

    def __init__(self, make: Callable[[Sequence[Any]], CompiledGraph], examples: Sequence[Any], ones: bool):
        self._make, self._ones = make, ones
        self.graphs: dict[Key, CompiledGraph] = {}  # by matter
        self._lock = threading.Lock()
        self._first = make(examples)  # for whatever comes first
        self._ends = self._first.weights.at[:1] + self._first.weights.at[-1:]  # enough to tell layers apart

    def __call__(self, *args: Any) -> Any:
        ends = [args[i] for i in self._ends]
        # What a checkpointed layer is computed on again are aliases, other ones each time.
        if ends and type(ends[0]) is Tensor:
            return self._first(*args)
        matter = tuple(map(id, ends))
        if self._ones:
            matter += tuple([n == 1 for n in self._first.programs.key(args)])
        return (self.graphs.get(matter) or self._of(matter, args))(*args)

    def _of(self, matter: Key, args: Sequence[Any]) -> CompiledGraph:
        with self._lock:
            if matter not in self.graphs:
                gone = next((m for m, graph in self.graphs.items() if graph.weights.gone), None)
                if gone is None and self.graphs:
                    self.graphs[matter] = self._make(args)
                else:
                    self.graphs[matter] = self._first if gone is None else self.graphs.pop(gone)
            return self.graphs[matter]


def _load_kernels(sites: Sites, args: Sequence[Any], training: bool) -> None:
    """Build the native kernels of what was found in one run, where they are not there: not one after the other."""
    # Of each operator, the first one is the forward.
    schemas = (known.site.card.schemas[: None if training else 1] for known in sites.values())
    names = {schema.partition("(")[0] for own in schemas for schema in own}
    first = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
    if first is not None and (known := sorted(names & libraries.kernels().keys())):
        native(first, *known)
