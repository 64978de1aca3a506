"""Operators that a model writes as several PyTorch calls: its graph, and which call belongs to which operator.

The model's call is traced once, on its real inputs, to the very sequence of PyTorch calls that it makes; the
compiler's recognizer reads that graph. What it finds names the calls by their place in the sequence, and the sequence
is what the profiler sees again when it times the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import opsmith.ops  # noqa: F401  the cards register themselves
from opsmith.compiler.algebra.canon import op_name, shape_of
from opsmith.compiler.algebra.terms import Shape
from opsmith.compiler.capture.trace import note_constants, tidy
from opsmith.compiler.find.recognize import recognize
from opsmith.compiler.find.site import Site, hint, where
from opsmith.measure.pool import tensors_of
from opsmith.operator import registry
from opsmith.profiler import entries
from opsmith.profiler.costs import moves_nothing
from opsmith.profiler.data import Unit


@dataclass
class CallSequence:
    """The calls of a model in order, and the operator that each belongs to.

    Attributes:
        grown: operators of ours that take in several calls.
        reads, outputs: for each call, the calls whose results it reads, and the bytes of its own.
        shapes: of what each call takes, where sizes are symbols.
        sites: as `found` has them.
        run: the outermost module's call that made them; None where the whole program did.
    """

    names: list[str]
    owners: list[int | None]
    found: list[Unit]
    grown: list[tuple[str, list[int]]] = field(default_factory=list)
    reads: list[set[int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    shapes: list[list[Shape]] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    run: int | None = None

    def group(self, call: int) -> int:
        """The operator that a call belongs to; of one that belongs to none, its complement."""
        owner = self.owners[call]
        return ~call if owner is None else owner

    def at(self, runs: Iterable[tuple[int, Sequence[Tensor]]]) -> list[Unit]:
        """The operators at the sizes of a run: its calls by their place in the sequence, and what each was given."""
        seen: dict[Any, Counter[int]] = {}
        for place, given in runs if self.shapes else ():
            for tensor, shape in zip(given, self.shapes[place], strict=False):
                for n, d in zip(tensor.shape, shape, strict=True) if tensor.dim() == len(shape) else ():
                    if not isinstance(d, int) and d.is_Symbol:
                        seen.setdefault(d, Counter())[n] += 1
        # A call that was taken for another has other sizes: most are what they are taken for.
        known = {d: sizes.most_common(1)[0][0] for d, sizes in seen.items()}
        if not known:
            return self.found
        return [describe(s, f.row.pieces, known) for s, f in zip(self.sites, self.found, strict=True)]


def trace(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSequence:
    """Run the call once, and read what it did.

    Raises:
        Exception: whatever the call or PyTorch's tracer raises; the caller goes on without.
    """
    leaves, form = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*tensors: Tensor) -> list[Tensor]:
        values = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        again, named = pytree.tree_unflatten(values, form)
        result = pytree.tree_leaves(call(*again, **named))
        return [leaf for leaf in result if isinstance(leaf, Tensor)]

    tracer = make_fx(
        run,
        pre_dispatch=True,
        tracing_mode="real",
        _allow_non_fake_inputs=True,
        _error_on_data_dependent_ops=False,  # tensors are real, so the call takes the way that it takes untraced
    )
    with torch.no_grad(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        traced = tracer(*[leaves[i] for i in places])
    note_constants(traced)
    return read(traced.graph)


def read(graph: fx.Graph) -> CallSequence:
    """The sequence of a traced graph; the graph is tidied on the way."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    names = [op_name(n) for n in calls]
    place = {n: i for i, n in enumerate(calls)}
    reads = [{place[s] for s in n.all_input_nodes if s in place} for n in calls]
    outputs = [sum(int(t.nbytes) for t in tensors_of(n.meta.get("val"))) for n in calls]
    # Weights where a compiled graph has them: a norm can take in the addition before it only if they are there.
    first = next(iter(graph.nodes))
    for node in graph.find_nodes(op="get_attr"):
        first.prepend(node)
    tidy(graph)
    result = recognize(graph, registry().values())
    sequence = CallSequence(names, [None] * len(names), [], reads=reads, outputs=outputs)
    for site in result.apart:
        _enter(sequence, site, place)
    for site in result.sites:
        parts = [p for s in (site.parts or (site,)) for p in _places(s.region, place)]
        if len({*map(sequence.group, parts)}) > 1:
            sequence.grown.append((site.card.name, parts))
    return sequence


def of_sites(graph: fx.Graph, sites: Sequence[Site]) -> CallSequence:
    """The sequence of a graph whose sites are known already: one that the compiler left to PyTorch."""
    calls = [n for n in graph.nodes if n.op == "call_function"]
    place = {n: i for i, n in enumerate(calls)}
    sequence = CallSequence([op_name(n) for n in calls], [None] * len(calls), [])
    for n in calls:
        given = (a for a in pytree.tree_leaves((n.args, n.kwargs)) if isinstance(a, fx.Node))
        sequence.shapes.append([shape_of(a) for a in given if isinstance(a.meta.get("val"), Tensor)])
    for site in sites:
        for part in site.parts or (site,):
            _enter(sequence, part, place)
    return sequence


def _places(region: set[fx.Node], place: dict[fx.Node, int]) -> list[int]:
    return sorted(place[n] for n in region if n in place)


def _enter(sequence: CallSequence, site: Site, place: dict[fx.Node, int]) -> None:
    places = _places(site.region, place)
    index = len(sequence.found)
    sequence.sites.append(site)
    sequence.found.append(describe(site, [sequence.names[p] for p in places]))
    for p in places:
        sequence.owners[p] = index


def describe(site: Site, pieces: list[str], known: Mapping[Any, int] | None = None) -> Unit:
    """A site as the bill names it, at sizes that are known where they are symbols."""
    call = site.call(lambda node: hint(node, known))
    written = [p for p in pieces if not moves_nothing(p)]
    row = entries.described(site.card, call)
    source = where(site.root).strip("()")
    row = replace(row, composite=len(written) > 1, pieces=written, source=source)
    return Unit(row, gradient=site.card.gradient)
