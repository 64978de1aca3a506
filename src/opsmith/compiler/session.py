"""What one optimized model holds: its graphs, its choices, and how to give the model back."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from opsmith import measure
from opsmith.call.dispatch import is_sharded, needs_grad
from opsmith.compiler.bypass import Bypass
from opsmith.compiler.capture.mutation import Effects
from opsmith.compiler.capture.parts import by_parts
from opsmith.compiler.capture.shards import Shards, is_gathered
from opsmith.compiler.capture.trace import Declined, NotGeneral, capture
from opsmith.compiler.choose.ranks import Ranks
from opsmith.compiler.choose.select import Selector
from opsmith.compiler.code import Code
from opsmith.compiler.config import Config
from opsmith.compiler.find.products import together
from opsmith.compiler.find.recognize import recognize
from opsmith.compiler.find.site import Site
from opsmith.compiler.modules.adjacent import Adjacent
from opsmith.compiler.modules.calibrate import Calls
from opsmith.compiler.modules.latent import Latent
from opsmith.compiler.modules.mixtures import Mixtures
from opsmith.compiler.modules.paged import Paged
from opsmith.compiler.modules.quantize import Packing
from opsmith.compiler.plan import Plan, ShapePlan
from opsmith.compiler.program.graph import Apart, CompiledGraph
from opsmith.compiler.program.sites import SPENT, GraphReport
from opsmith.compiler.progress import show
from opsmith.compiler.prove.proofs import Proofs
from opsmith.compiler.reasons import broken, raised
from opsmith.compiler.report import Report
from opsmith.installed import load_installed
from opsmith.operator import registry
from opsmith.version import VERSION

_OTHER = (
    "a hook of a module was added or removed, or a method exchanged, after the model was captured: while it is so the "
    "model runs as it was; optimize it again with the hook in place"
)
_LEARNS = "weights that are spread over ranks learn in eager"
_SPREAD = "its weights were spread over ranks after optimize; optimize it again, that they choose alike"
_GATHERED = "fully_shard gathers weights for each call: only training is optimized"
_MUCH = 1 << 26  # bytes of weights that are more than what caches hold


class Capturing(threading.local):
    """How a thread captures; several may generate with one model at a time."""

    general = False  # whether what is captured is to serve sizes of one too
    paged = False  # whether it is a decoder's call with a cache
    ready = False  # whether the settings are those for it

    def __init__(self) -> None:
        self.parts: list[weakref.ref[Part]] = []  # of the call at hand, that have run; a thread outlives them


class Part:
    """What Dynamo calls of an optimized model: all of a call, or what stands between two breaks."""

    def __init__(self, run: Callable[..., Any], graphs: Collection[CompiledGraph]):
        self.run, self._graphs = run, graphs

    @property
    def left(self) -> bool:
        """Whether it runs as it was captured."""
        return all(graph.report.left for graph in self._graphs)


class Session:
    """Everything one optimized model holds: its graphs, its choices, and how to give the model back."""

    def __init__(
        self,
        config: Config,
        plan: Plan | None = None,
        calibration: Calls | None = None,
        ranks: Ranks | None = None,
    ):
        load_installed("operators")
        self.config = config
        self.selector = Selector(config, saved=plan, ranks=ranks)
        self.proofs = Proofs()
        self.graphs: list[CompiledGraph] = []
        self.parts: list[Part] = []
        self.unread: list[GraphReport] = []
        self.packing = Packing()
        self.adjacent = Adjacent()
        self.calibration = calibration
        self.latent = Latent(config)
        self.mixtures = Mixtures()
        self.paged = Paged(config)
        self.before: dict[str, Tensor] | None = None  # tensors as they were before a change of dtype
        self.breaks: dict[str, str] = {}  # by the line at which a graph ends, why
        self.skipped: list[str] = []  # sizes that the budget was too small to warm up
        self.unpacked = 0  # bytes of weights in linear layers that are not packed
        self.dtypes: set[torch.dtype] = set()  # of the weights of linear layers that stay the model's
        self.capturing = Capturing()
        self.bypass = Bypass()
        self.gathered = False  # whether weights are there for the time of a call only
        self.code: Code | None = None  # what captured graphs were of
        self.other = 0  # calls that came when the code was another

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Dynamo's call: one captured graph in, one callable out."""
        run, ended = self._whole(gm, example_inputs), getattr(gm, "compile_subgraph_reason", None)
        if ended is not None and ended.graph_break:
            at = ended.user_stack[-1]
            self.breaks.setdefault(f"{Path(at.filename).name}:{at.lineno}", broken(ended.reason))
        if self.capturing.general:
            # What is captured behind a break could not be captured anew: the model has run up to there.
            self.capturing.general = torch.fx.experimental._config.backed_size_oblivious = False
            torch._dynamo.config.suppress_errors = True
        return run

    def _whole(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not any(map(is_sharded, example_inputs)):
            return by_parts(gm, example_inputs, self._graph)
        if torch.is_grad_enabled() or self.selector.ranks is None:
            self.decline(_LEARNS if self.selector.ranks or self.gathered else _SPREAD, len(gm.graph.nodes))
            return gm.forward
        shards = Shards(gm, example_inputs)
        run = by_parts(shards.graph, shards.added(example_inputs), self._graph)
        return lambda *inputs: run(*shards.added(inputs))

    def changed(self) -> bool:
        """Whether the model has other hooks or methods than were captured, which its graphs know nothing of."""
        if self.config.frozen or self.code is None or not self.code.changed():
            return False
        if not self.other:
            warnings.warn(f"opsmith: {_OTHER}", stacklevel=5)
        self.other += 1
        return True

    def gathers(self, model: nn.Module) -> bool:
        """Whether `fully_shard` gathers weights for each call; once the model is captured, its hooks are a change."""
        if self.code is None and not self.gathered and is_gathered(model):
            self.gathered = True
            self.decline(_GATHERED)
        return self.gathered

    def leave(self, error: Exception, nodes: int = 0) -> None:
        """Say that a graph runs as it was, or, of no nodes, what could not be captured as one."""
        self.unread.append(GraphReport(nodes=nodes))
        self.unread[-1].leave(raised(error))

    def decline(self, why: str, nodes: int = 0) -> None:
        """Say that a graph is none that is optimized."""
        self.unread.append(GraphReport(nodes=nodes, left=why))

    def _graph(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        nodes = len(gm.graph.nodes)
        learns = needs_grad(*(t for t in example_inputs if isinstance(t, Tensor)))
        show(f"looking for operators in a graph of {nodes} calls")
        try:
            if self.selector.spent:
                raise Declined(SPENT)
            if self.gathered and not learns:  # as of frozen layers
                raise Declined(_GATHERED)
            if learns and _has_own_gradients(gm):
                raise Declined("it calls an autograd.Function, whose gradients only eager has")
            traced = capture(gm, example_inputs, self.capturing.general)
            found = recognize(traced.graph, registry().values())

            def make(inputs: Sequence[Any]) -> CompiledGraph:
                more, lay = partial(self._sites, inputs), self.adjacent.lay
                graph = CompiledGraph(traced, found, gm, inputs, self.selector, self.proofs, more, lay)
                self.graphs.append(graph)
                return graph

            ones = self.capturing.general and self.capturing.paged
            return Apart(make, example_inputs, ones)
        except NotGeneral:
            raise
        except Declined as why:
            self.decline(str(why), nodes)
            return gm.forward
        except Exception as error:  # of ours: the model has been read by Dynamo
            self.leave(error, nodes)
            return gm.forward
        finally:
            show()

    def _sites(
        self, inputs: Sequence[Any], gm: fx.GraphModule, effects: Effects, found: Sequence[Site]
    ) -> list[Site]:
        """A graph's sites, with the layers of one input as one call."""
        # Gradients of one product would have to be taken apart again, which costs more than it saves.
        apart = self.gathered or needs_grad(*(t for t in inputs if isinstance(t, nn.Parameter)))
        plain = found if apart else together(found, gm.graph, inputs, self.adjacent.lay, effects)
        self.adjacent.read.give_back()
        return [*plain, *self.packing.join(gm, effects, inputs)]

    @property
    def plan(self) -> Plan:
        """The plan as it stands; shapes seen since are in it."""
        return Plan(
            self._shapes,
            measure.describe().fingerprint(),
            {"torch": torch.__version__, "opsmith": VERSION},
            [*self.latent.lines(), *self.paged.lines()],
            self.packing.lines(),
        )

    @property
    def _shapes(self) -> list[ShapePlan]:
        return [shape for graph in self.graphs for shape in graph.plans.values()]

    @property
    def report(self) -> Report:
        """What was found, proven, rolled back and missed."""
        parts: list[set[int]] = []
        for graph, its in sorted(((g, g.weights.ids) for g in self.graphs), key=lambda pair: -len(pair[1])):
            graph.report.part = next((i for i, part in enumerate(parts) if its <= part), len(parts))
            if graph.report.part == len(parts):
                parts.append(its)
        return Report(
            [*(graph.report for graph in self.graphs), *self.unread],
            self.packing.layers,
            self.latent.reports,
            dict(self.latent.fallbacks + self.paged.fallbacks),
            [
                f"eager runs at {s.sizes or 'fixed sizes'}{', training' * s.training}: {s.note}"
                for graph in self.graphs
                for s in graph.plans.values()
                if not s.used and (s.steps or (s.training and graph.report.sites))
            ],
            self._advice(),
            0 if self.paged.why else len(self.paged.windows),
            self.mixtures.lines(),
            [f"{where}: {why}" for where, why in self.breaks.items()],
        )

    def _advice(self) -> list[str]:
        """What is left to gain."""
        config, lines = self.config, []
        left = sum(s.status == "left" for graph in self.graphs for s in graph.report.sites)
        if left or self.skipped or any(g.left == SPENT for g in self.unread):
            what = [f"{left} sites"] * bool(left) + [f"{len(self.skipped)} warmups"] * bool(self.skipped)
            lines.append(
                f"the budget was spent before {' and '.join(what) or 'a graph'}, which run as they were: "
                "optimize again with a larger one; what was measured and proved is remembered"
            )
        learns = [*{s.training for s in self._shapes}] == [True]
        if self.unpacked >= _MUCH and config.quantize is None and not learns:
            size = f"{self.unpacked / 1e9:.2g} GB of weights in linear layers are read in each call"
            lines.append(f'{size}: quantize="int8" reads a byte a number, opsmith evaluate says what is lost')
        for why in filter(None, map(measure.without_unit, self.dtypes)):
            lines.append(f"{why}, for all that opsmith leaves as it was; float32 or quantize avoids it")
        if self.other:
            lines.append(f"in {self.other} calls {_OTHER}")
        if not config.verify:
            lines.append("nothing was proved: leave out verify=False")
        return lines

    def close(self) -> None:
        """Give modules their own calls back and let go of all weights; a graph that is called again begins anew."""
        self.packing.take_out()
        self.adjacent.take_out()
        self.latent.take_out()
        self.mixtures.take_out()
        for graph in self.graphs:
            graph.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a pickled model is one that was never optimized

    def __repr__(self) -> str:
        sites = sum(len(g.sites) for g in self.graphs)
        return f"<opsmith: {len(self.graphs)} graph(s), {sites} sites, {len(self.plan.shapes)} shape(s)>"


def _has_own_gradients(gm: fx.GraphModule) -> bool:
    """Whether a graph calls an autograd.Function: retraced, it would be its forward alone."""
    apply = torch.ops.higher_order.autograd_function_apply
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    return any(graph.find_nodes(op="call_function", target=apply) for graph in graphs)
