"""Which operators a graph contains: every site found, and every near miss with the node that differed.

A site is a root node whose term equals a card's pattern, with the pattern's variables bound to nodes of the
graph. Later roots come first, so attention is found before the softmax inside it; what a site has explained is
not explained again. Sites then grow by what their operators can take in: a norm the residual addition before
it, a linear layer the activation behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from opsmith.compiler.algebra.canon import BOUNDARIES, Canon, arguments, is_readable, op_name, shape_of
from opsmith.compiler.algebra.pieces import lower
from opsmith.compiler.algebra.rules import unbounded
from opsmith.compiler.algebra.terms import Atom, Poly, Space
from opsmith.compiler.algebra.views import inverse, reshape
from opsmith.compiler.capture.mutation import effects
from opsmith.compiler.find.growth import grow
from opsmith.compiler.find.match import Binding, Matcher, Mismatch, parts
from opsmith.compiler.find.operands import (
    Made,
    is_triangle,
    materialize,
    nodes_in,
    of_wider,
    shape_of_operand,
    vector_of,
    with_rows_kept,
    without_axis,
)
from opsmith.compiler.find.site import After, Site, between, check, cuts, following, where
from opsmith.compiler.find.template import Template
from opsmith.compiler.find.window import MAX_READ, Window, Windows
from opsmith.compiler.kept import Kept, code, directory, ours
from opsmith.kernels.compiler import fingerprint
from opsmith.operator import Kind, Operator, Pattern

MIN_COMPOSITE = 3  # a near miss is something written out by hand, not a lone tanh
LEFT_OPERAND = dict.fromkeys(("aten::linear", "aten::matmul", "aten::mm", "aten::bmm"), 0)
LEFT_OPERAND |= {"aten::addmm": 1, "aten::baddbmm": 1, "aten::cross_entropy_loss": 0, "aten::einsum": 0}
PRODUCTS = ("aten::matmul", "aten::bmm")
SCORES = (*PRODUCTS, "aten::einsum", "aten::scaled_dot_product_attention")


@dataclass(frozen=True)
class Miss:
    """Something that looked like an operator and is not one."""

    operator: str
    node: str
    expected: str
    got: str
    at: str
    where: str

    def __str__(self) -> str:
        found = f"found {self.got} at {self.at} {self.where}".strip()
        return f"{self.operator} at {self.node}: expected {self.expected}, {found}"


@dataclass
class Recognized:
    """What was found in a graph, in graph order, and what came close."""

    sites: list[Site] = field(default_factory=list)
    apart: list[Site] = field(default_factory=list)  # the same before they grew: each operator by itself
    misses: list[Miss] = field(default_factory=list)


def recognize(graph: fx.Graph, cards: Iterable[Operator]) -> Recognized:
    """Find every site of the cards' operators in a traced and tidied graph."""
    return _Finder(graph, list(cards)).run()


class _Finder:
    def __init__(self, graph: fx.Graph, cards: list[Operator]):
        self.graph = graph
        self.space = Space()
        self.cards = {card.name: card for card in cards}
        self.effects = effects(graph)
        self.opaque = self.effects.opaque()
        cards = sorted(cards, key=lambda c: ours(c.reference))
        templates = [Template.trace(self.space, card, p) for card in cards for p in card.patterns]
        # The richest pattern first: attention before softmax, an affine norm before a plain one. Of two alike, that of
        # an operator that somebody has added to ours.
        templates.sort(key=lambda t: (-len(t.term.names), -_size(t.term), -len(t.variables)))
        self.templates = templates
        self.windows = Windows(self.opaque)
        # For the next process too where all are ours: the same names of anyone else's may mean something new.
        where = directory() if all(ours(card.reference) for card in cards) else None
        self.known = _known(tuple((t.card.name, t.pattern) for t in templates), where)
        self.consumed: set[Node] = set()
        # Of a root for which no reading is right, the one that came closest, and how near.
        self.near: dict[Node, tuple[tuple[int, int, int], Reading]] = {}

    def run(self) -> Recognized:
        result = Recognized()
        for node in reversed(list(self.graph.nodes)):
            value = node.meta.get("val")
            floats = isinstance(value, Tensor) and value.is_floating_point()
            if node in self.consumed or not floats or not is_readable(node, root=True):
                continue
            if (site := self._site(node)) is not None and not _is_read_again(site):
                result.sites.append(site)
                # What it makes of its main input; other sites may share the rest, as all layers a rotation's tables.
                main = next(filter(None, (set(nodes_in(v)) for v in site.arguments.values())))
                self.consumed |= following(main, site.region) | {site.root}
        self.known.save()
        result.sites.reverse()
        result.misses = self._misses(result.sites)
        result.apart = [replace(site) for site in result.sites]  # growing changes the sites themselves
        result.sites = grow(result.sites, self.cards, lambda s: self.effects.disturbed(s.region, s.outputs))
        return result

    def _site(self, root: Node) -> Site | None:
        """The site at a root. Where a root that is alike was read before, the reading that was right there is tried.

        So what is known saves a search, and no site rests on it.
        """
        window = self.windows.of(root, self.consumed)
        if window.form in self.known:
            outcome = self.known[window.form]
            if outcome is None:
                return None
            rank, template, cut = outcome
            try:
                reading = Reading(self.templates[template], tuple(window.nodes[i] for i in cut), window)
            except IndexError:  # of a damaged file
                return self._search(root, window)
            if rank is not None:
                self.near[root] = rank, reading
                return None
            site = self._try(root, reading, self._canon(root, reading))
            if isinstance(site, Site):
                return site
        return self._search(root, window)

    def _search(self, root: Node, window: Window) -> Site | None:
        """The site at a root by the first reading that gives one; where none does, the closest is kept in mind."""
        canons: dict[Any, Canon] = {}
        closest, near, site = (-1, -1, 0), None, None
        for reading in self._readings(root, window):
            key = reading.template.pattern.recognition.keeps, reading.cut
            if key not in canons:
                canons[key] = self._canon(root, reading)
            outcome = self._try(root, reading, canons[key])
            if isinstance(outcome, Site):
                near, site = reading, outcome
                break
            if outcome is None:
                continue
            # Attention that failed says more than a matmul that did; of two norms the one that is as long.
            wanted, got = (sum(1 for _ in parts(t)) for t in (reading.template.term, canons[key](root)))
            if (rank := (len(reading.template.term.names), outcome.score, -abs(wanted - got))) > closest:
                closest, near = rank, reading
        known = None
        if near is not None:
            template, cut = self.templates.index(near.template), [window.nodes.index(n) for n in near.cut]
            known = closest if site is None else None, template, cut
            if site is None:
                self.near[root] = closest, near
        if window.form:
            self.known.put(window.form, known)
        return site

    def _canon(self, root: Node, reading: Reading) -> Canon:
        leaves = {n: self.space.leaf(n, shape_of(n)) for n in reading.cut}
        keeps = reading.template.pattern.recognition.keeps
        return Canon(self.space, leaves, root, reading.window.read, keeps)

    def _readings(self, root: Node, window: Window) -> Iterator[Reading]:
        """The ways to read a node: by each template, with every value as its main input that could be that."""
        region = window.apart_from(self.consumed)
        candidates = [(node,) for node in cuts(root, region)]
        for template in self.templates:
            for cut in [()] if template.cut is None else candidates:
                yield Reading(template, cut, window)
        # A norm whose weight the model computes (Nemotron keeps it less one) takes that as it is; so does a rotation a
        # table that is put together for positions of several kinds (Qwen2-VL's in time, height and width).
        # And a gated activation what it multiplies by, which may be a sum, as a layer's with its adapter is.
        joined = {n for n in region if op_name(n) == "aten::cat" and len(n.args[0]) > 2}  # type: ignore[arg-type]
        whole = [n for n in region if n is not root and (len(shape_of(n)) == 1 or n in joined)]
        factors = [[n] for n in root.all_input_nodes if op_name(root) == "aten::mul" and n in region]
        for also in filter(None, (whole, *factors)):
            for template in self.templates:
                for cut in candidates if template.cut is not None else ():
                    yield Reading(template, (*cut, *also), window)
        # Products of operands that are taken as they are: a scale on them belongs to what computed it. Attention has
        # two in its scores, each of which may be a norm; written out, the keys are transposed first.
        products = [n for n in (root, *root.all_input_nodes) if n in region and op_name(n) in LEFT_OPERAND]
        taken = [n.all_input_nodes[LEFT_OPERAND[op_name(n)] :][:1] for n in products]
        for scores in (n for n in region if op_name(n) in SCORES and len(n.all_input_nodes) > 1):
            query, key = scores.all_input_nodes[:2]
            turned = scores is not root and op_name(scores) in PRODUCTS
            taken.append([query, [*key.all_input_nodes, key][0] if turned else key])
        for operands in taken:
            for template in self.templates:
                names = template.term.names
                if names & {"matmul", "nll"} and ({"matmul", "exp"} <= names) == (len(operands) > 1):
                    yield Reading(template, tuple(operands), window)

    def _try(self, root: Node, reading: Reading, canon: Canon) -> Site | Mismatch | None:
        """The site by a reading, or where it fails; None where the two have little in common."""
        template, term = reading.template, canon(root)
        if "join" in template.term.names:
            term = lower(term, shape_of(root))
        if "larger" in term.names - template.term.names:
            term = unbounded(term)
        after: After = ()  # an einsum writes its axes in any order, and several for the last one
        if (atom := term.atom) is not None and op_name(root) == "aten::einsum" and atom.name == "permute":
            term, after = atom.args[0], ((torch.ops.aten.permute.default, (atom.attrs,)),)
        if (atom := term.atom) is not None and atom.name == "reshape" and op_name(root) == "aten::einsum":
            sizes = [n if isinstance(n, int) else -1 for n in atom.shape[len(atom.args[0].shape) - 1 :]]
            if sizes.count(-1) < 2:
                term, after = atom.args[0], ((torch.ops.aten.unflatten.int, (-1, sizes)), *after)
        elif atom is not None and atom.name == "reshape" and op_name(root) in PRODUCTS:
            # Heads that are one axis with the batch outside.
            term, after = atom.args[0], ((torch.ops.aten.flatten.using_ints, (0, -3)),)
        elif op_name(root) == "aten::gather" and shape_of(root)[-1] == 1:  # one number of each row
            term = reshape(term, shape_of(root), shape_of(root)[:-1])
            after = ((torch.ops.aten.unsqueeze.default, (-1,)),)
        if any(coef < 0 and a.name == "nll" for mono, coef in term.terms for a, _ in mono.factors):
            term, after = -term, ((torch.ops.aten.neg.default, ()), *after)  # a loss without its sign
        # A matmul whose operand lacks its transpose is read all the same, so that it can be reported.
        if not template.term.names - {"permute"} <= term.names:
            return None
        matcher = Matcher(self.space, template, next(iter(reading.cut), None))
        binding = matcher.match(term, None if template.cut is None else {template.cut: canon(reading.cut[0])})
        problem = matcher.mismatch
        if binding is not None:
            outcome = self._bind(template, canon, root, binding, after)
            if isinstance(outcome, Site):
                return outcome
            problem = Mismatch(4 * len(binding) + 100, *outcome)
        if problem.score < 0 or template.cut is None:
            return problem if problem.score >= 0 else None
        # What came out otherwise than as the operator takes enough calls from its main input to the root.
        calls = following(reading.cut[:1], between(root, reading.cut[:1], MAX_READ))
        return problem if len(calls) >= MIN_COMPOSITE else None

    def _bind(
        self, template: Template, canon: Canon, root: Node, binding: Binding, moved: After
    ) -> Site | tuple[str, str, Any]:
        """The site, or (expected, got, where) of the reason why the operator can't stand here."""
        how = template.pattern.recognition
        terms = {name: value for name, value in binding.items() if isinstance(value, Poly)}
        call: dict[str, Any] = {**template.pattern.fixed, **binding}
        for mask in terms.keys() & how.masks.keys():
            if is_triangle(terms[mask], template.pattern.dtypes.get(mask) == "bool"):
                del terms[mask], call[mask]
                call[how.masks[mask]] = True
        layouts: dict[str, tuple[int, ...]] = {}
        for name, value in terms.items():
            operand = materialize(value, canon, root, name in how.masks)  # a constant changes no softmax
            if operand is None and name in how.shared:
                operand = of_wider(value, canon, root)
            number = how.multiplies.get(name, "")
            factor = binding.get(number)
            if operand is None and isinstance(factor, float):
                operand, call[number] = materialize(value * factor, canon, root), 1.0
            if operand is None:
                return (f"{name} as a value of the graph", "an expression no node computes", value)
            call[name] = operand
            if name in how.aligned and (layout := _layout(value)) is not None:
                layouts[name] = layout
        for name, mask in how.rows.items():
            call[name] = with_rows_kept(call[name], call.get(mask))
        if len(set(layouts.values())) > 1:
            text = ", ".join(f"{n}: {p}" for n, p in layouts.items())
            return ("inputs in one layout", f"axes permuted as {text}", root)
        used: set[str] = set()
        for name, follows in how.numbers.items():
            of = inspect.signature(follows).parameters
            call[name] = follows(*(binding[n] for n in of))
            used |= set(of)
        call = {name: value for name, value in call.items() if name not in used}
        for name in how.repeats:
            call[name] = _unrepeated(call[name])
        for name, axis in how.vectors.items():
            call[name] = vector_of(operand := call[name], axis)
            if call[name] is None:
                return (f"{name} as a vector", "values that differ along other axes", operand)
        given = template.pattern.inputs.items()
        ranks = {n: len(s) for n, s in given if isinstance(s, tuple) and n not in how.vectors}
        squeezed: After = ()
        main = template.variables[0]
        if len(shape_of_operand(call[main])) == ranks[main] - 1 and how.aligned:
            unsqueeze = torch.ops.aten.unsqueeze.default
            for n in ranks.keys() & call.keys():
                call[n] = Made(unsqueeze, (call[n], 0), (1, *shape_of_operand(call[n])))
            squeezed = ((torch.ops.aten.squeeze.dim, (0,)),)
        for name, convert in how.converted.items():
            call[name] = Made(convert, (call[name],), shape_of_operand(call[name]))
        for name, (source, times) in how.sizes.items():
            call[name] = times * shape_of_operand(call[source])[-1]
        rank = len(shape_of_operand(call[main]))
        refusal = ("inputs that the operator can be called with", "other shapes")
        for layout in [p for p in how.layouts if len(p) == rank] or [tuple(range(rank))]:
            if (arranged := _arranged(call, main, layout, how.shared)) is None:
                continue
            turned = layout != tuple(range(rank))
            back: After = ((torch.ops.aten.permute.default, (inverse(layout),)),) if turned else ()
            after = (*squeezed, *back, *moved)
            region = set(between(root, [n for v in arranged.values() for n in nodes_in(v)]))
            site = Site(template.card, template.pattern.name, arranged, (root,), region, after)
            disturbed = self.effects.disturbed(region, (root,))
            problem = ("values that stay as they are", "one changed in place") if disturbed else check(site)
            if problem is None:
                return site
            refusal = problem
        return (*refusal, root)

    def _misses(self, sites: list[Site]) -> list[Miss]:
        """The near misses that stand outside every site: of what stands together the one that came closest.

        What moves an operator's result about is no second operator, nor is a number it is multiplied by, or a part.
        """
        found = {site.root: site.card for site in sites}
        misses: list[Miss] = []
        covered: set[Node] = set(self.consumed)
        for outermost in sorted(self.near, reverse=True):
            if outermost in covered:
                continue
            region = between(outermost, self.consumed, MAX_READ, BOUNDARIES)
            root = max((n for n in region if n in self.near), key=lambda n: self.near[n][0])
            template, canon = (reading := self.near[root][1]).template, self._canon(root, reading)
            problem = self._try(root, reading, canon)
            if not isinstance(problem, Mismatch):
                continue  # a root that is alike came close by this reading, and this one does not
            at = next(n for n in (_node_at(problem.at, canon), root) if n and n not in reading.cut[:1])
            covered.update(region)
            no_miss = template.cut is not None and len(region) < MIN_COMPOSITE
            tensors = (n for n in region if isinstance(n.meta.get("val"), Tensor))
            no_miss |= all(getattr(n.target, "is_view", False) or op_name(n) in _COPIES for n in tensors)
            no_miss |= at in self.consumed and "matmul" not in template.term.names
            if no_miss or any(found.get(s) is template.card for n in region for s in n.all_input_nodes):
                continue
            said = problem.texts(template.holes)
            misses.append(Miss(template.card.name, root.name, *said, at.name, where(at) or where(root)))
        return misses[::-1]


@dataclass(frozen=True)
class Reading:
    """A way to read a root: by a template, with some nodes taken as they are; the first is the main input."""

    template: Template
    cut: tuple[Node, ...]
    window: Window


# How near a reading came to a root, or None where it was right, and the numbers of its template and nodes.
_Outcome = tuple[tuple[int, int, int] | None, int, list[int]]


@lru_cache(maxsize=4)
def _known(patterns: tuple[tuple[str, Pattern], ...], where: Path | None) -> Kept[_Outcome | None]:
    """What came of roots by the form of their window, in all graphs that are read by the same patterns."""
    names = fingerprint(f"{card} {pattern.name}" for card, pattern in patterns)[:20]
    scope = f"{code()}/{torch.__version__}/{names}"
    path = where and where / f"forms-{scope.replace('/', '-')}.json"
    return Kept(path, 1, scope, _Outcome | None, 1 << 13)


_COPIES = ("aten::clone", "aten::cat", "aten::_unsafe_view", "aten::reshape")


def _is_read_again(site: Site) -> bool:
    """Whether logarithms of all probabilities, which a loss would spare, are there for something else too."""
    logits = site.arguments.get("logits") if site.card.kind is Kind.LOSS else None
    inside = [n for n in site.region if logits is not None and shape_of(n) == shape_of_operand(logits)]
    return any(not site.region.issuperset(n.users) for n in inside)


def _size(term: Poly) -> int:
    return sum(len(m.factors) + (_size(m.expo) if m.expo else 0) for m, _ in term.terms)


def _layout(value: Poly) -> tuple[int, ...] | None:
    """The permutation through which an input reaches the operator; None where it was computed on the way."""
    atom = _before_copies(value).atom
    # One head, or one token: both orders of the axes are the same memory.
    if atom is None or 1 in atom.shape[1:-1]:
        return None
    if atom.name == "permute":
        return tuple(int(i) for i in atom.attrs)
    known = isinstance(atom.leaf, Node) and atom.leaf.op == "placeholder"
    return tuple(range(len(atom.shape))) if known or atom.name == "reshape" else None


def _before_copies(value: Poly) -> Poly:
    """Heads of keys as they were before each was copied for a group of the queries' heads."""
    atom = value.atom
    copies = atom.args[0].atom if atom is not None and atom.name == "reshape" else None
    if copies is None or copies.name != "expand":
        return value
    one_more = copies.args[0].atom  # the axis along which they are copied
    return one_more.args[0] if one_more is not None and one_more.name == "reshape" else copies.args[0]


def _node_at(at: Any, canon: Canon) -> Node | None:
    poly = canon.space.from_atom(at) if isinstance(at, Atom) else at
    if not isinstance(poly, Poly):
        return at if isinstance(at, Node) else None
    parts = [canon.space.from_atom(atom) for mono, _ in poly.terms for atom, _p in mono.factors]
    found = (node for p in (poly, *parts) for node in (*canon.nodes.get(p, ())[:1], p.atom and p.atom.leaf))
    return next((node for node in found if isinstance(node, Node)), None)


def _arranged(
    call: dict[str, Any], main: str, layout: tuple[int, ...], shared: Mapping[str, int]
) -> dict[str, Any] | None:
    """The call with its main input's axes in the operator's order, and the shared inputs without the shared axis."""
    arranged = dict(call)
    rank = len(layout)
    for name, axis in shared.items():
        missing = rank - len(shape_of_operand(call[name]))
        if (value := without_axis(call[name], layout[axis] - missing)) is None:
            return None
        others = [i - (i > layout[axis]) - missing for n, i in enumerate(layout) if n != axis]
        order = [i for i in others if i >= 0]
        if order != sorted(order):
            shape = shape_of_operand(value)
            value = Made(torch.ops.aten.permute.default, (value, order), tuple(shape[i] for i in order))
        arranged[name] = value
    if layout != tuple(range(rank)):
        shape = shape_of_operand(call[main])
        permuted = tuple(shape[i] for i in layout)
        arranged[main] = Made(torch.ops.aten.permute.default, (call[main], list(layout)), permuted)
    return arranged


def _unrepeated(value: Any, axis: int = 1) -> Any:
    """The keys or values before they were copied for every query head, which is this axis, where they were."""
    node = value
    if not isinstance(node, Node):
        return value
    if node.target is torch.ops.aten.to.dtype and len(node.args) == 2:  # of all copies, or of what is copied
        wide, dtype = node.args
        source = _unrepeated(wide, axis)
        return value if source is wide else Made(node.target, (source, dtype), shape_of_operand(source))
    if node.target is torch.ops.aten.permute.default:
        wide, dims = node.args
        order = [int(d) % len(dims) for d in dims]  # type: ignore[arg-type, union-attr]
        source = _unrepeated(wide, order[axis])
        shape = shape_of_operand(source)
        return value if source is wide else Made(node.target, (source, order), tuple(shape[i] for i in order))
    heads = (axis, axis - len(shape_of(node)))
    if op_name(node) == "aten::repeat_interleave" and arguments(node).get("dim") in heads:
        return node.args[0]
    if op_name(node) not in ("aten::reshape", "aten::view", "aten::_unsafe_view"):
        return value
    wide = node.args[0]
    if isinstance(wide, Node) and op_name(wide) in ("aten::clone", "aten::contiguous"):
        wide = wide.args[0]
    if not isinstance(wide, Node) or op_name(wide) != "aten::expand":
        return value
    narrow = wide.args[0]
    assert isinstance(narrow, Node)
    small, many = list(shape_of(narrow)), shape_of(wide)[axis + 1 : axis + 2]
    copied = [*small[: axis + 1], *many, *small[axis + 2 :]]
    if len(small) != 5 or small[axis + 1] != 1 or list(shape_of(wide)) != copied:
        return value
    return without_axis(narrow, axis + 1)
