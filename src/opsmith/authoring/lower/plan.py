"""How a kernel computes a formula: which reductions share a pass over a row, and what is written in the last one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from opsmith.authoring.formula.nodes import ELEMENTWISE, REDUCTIONS, ROTATIONS, Formula, Graph, Node, walk
from opsmith.authoring.formula.shapes import Shape, broadcast, shown

FULL, ROW, COLUMN = "full", "row", "column"  # an element for each of the whole, for each row, for each column


@dataclass
class Statistic:
    """What one pass gathers along a row, and the reductions that it answers."""

    kind: str  # Sum, Max, Min, Moments or Online
    arg: Node
    answers: dict[str, Node] = field(default_factory=dict)  # sum, mean, max, min, var -> the reduction


@dataclass(frozen=True)
class Output:
    """One tensor that the kernel writes."""

    name: str
    node: Node
    extent: str  # FULL, ROW or COLUMN
    optional: bool = False


@dataclass(frozen=True)
class Plan:
    """One kernel: passes over each row, the last of which writes."""

    inputs: Mapping[str, Shape]
    attributes: Mapping[str, float | int | bool | None]
    outputs: tuple[Output, ...]
    space: Shape  # the whole: what all inputs broadcast to
    stages: tuple[tuple[Statistic, ...], ...]  # one pass each
    rotation: str | None
    truths: frozenset[str]

    @property
    def rowwise(self) -> bool:
        """Whether it matters where a row begins."""
        return bool(self.stages or self.rotation) or any(s != self.space for s in self.inputs.values())

    def extent(self, name: str) -> str:
        """How far an input extends: FULL or ROW. What all rows share is FULL: it has an element in each lane."""
        return ROW if self.inputs[name][-1] == 1 and self.space[-1] != 1 else FULL

    def lane(self, node: Node) -> bool:
        """Whether a node has a value for each element of a row."""
        return node.shape is not None and node.shape[-1] == self.space[-1] and self.space[-1] != 1


def plan(
    formula: Formula, outputs: Iterable[Output] | None = None, inputs: Mapping[str, Shape] | None = None
) -> Plan:
    """The passes of the kernel that computes a formula, or other outputs over its graph.

    Raises:
        ValueError: no tensor has the shape to which all of them broadcast.
    """
    graph = formula.graph
    memo: dict[int, Node] = {}
    if outputs is None:
        outputs = [Output(n, node, FULL) for n, node in formula.outputs.items()]
    outputs = [replace(o, node=_expand(graph, o.node, memo)) for o in outputs]
    inputs = dict(formula.inputs if inputs is None else inputs)
    space: Shape = ()
    for shape in (*inputs.values(), *(o.node.shape or () for o in outputs)):
        both = broadcast(space, shape) if space else shape
        if both is None:
            raise ValueError(f"shapes {shown(space)} and {shown(shape)} do not broadcast")
        space = both
    if space[-1] != 1:
        narrow = {o.name for o in outputs if o.extent == FULL and (o.node.shape or (0,))[-1] == 1}
        outputs = [replace(o, extent=ROW) if o.name in narrow else o for o in outputs]
    nodes = list(walk(o.node for o in outputs))
    rotation = next((n.kind for n in nodes if n.kind in ROTATIONS), None)
    stages = _stages(nodes, [o.node for o in outputs])
    return Plan(inputs, dict(formula.attributes), tuple(outputs), space, stages, rotation, formula.truths)


def _stages(nodes: list[Node], results: Sequence[Node]) -> tuple[tuple[Statistic, ...], ...]:
    statistics: dict[tuple[int, str], Statistic] = {}
    level: dict[int, int] = {}  # passes that a node waits for; a statistic waits for those of its argument
    for node in nodes:
        if node.reduces:
            arg, kind, answer = _gathered(node)
            statistics.setdefault((id(arg), kind), Statistic(kind, arg)).answers[answer] = node
            level[id(node)] = level[id(arg)] + 1
        else:
            level[id(node)] = max((level[id(a)] for a in node.args), default=0)
    # One look at a row is enough for the mean beside the variance, and for the maximum beside the sum of powers.
    # But a mean that is a result has its sum, which is rounded less than a mean that goes along.
    for (arg_id, kind), statistic in list(statistics.items()):
        for whole, part in (("Moments", "mean"), ("Online", "max")):
            if kind == ("Sum" if part == "mean" else "Max") and (arg_id, whole) in statistics:
                larger = statistics[arg_id, whole]
                if part in statistic.answers and statistic.answers[part] not in results:
                    larger.answers[part] = statistic.answers.pop(part)
                if not statistic.answers:
                    del statistics[arg_id, kind]
    count = max((level[id(s.arg)] for s in statistics.values()), default=-1) + 1
    return tuple(tuple(s for s in statistics.values() if level[id(s.arg)] == i) for i in range(count))


def _gathered(node: Node) -> tuple[Node, str, str]:
    """(of what, in which way, under which name) a reduction is gathered."""
    arg = node.args[0]
    if node.kind == "sum" and arg.kind == "exp" and arg.args[0].kind == "sub":
        x, top = arg.args[0].args
        if top.kind == "max" and top.args == (x,):
            return x, "Online", "sum"
    kind = {"sum": "Sum", "mean": "Sum", "max": "Max", "min": "Min", "var": "Moments"}[node.kind]
    return arg, kind, node.kind


def _expand(graph: Graph, root: Node, memo: dict[int, Node]) -> Node:
    """The same value without softmax, and with variances that are spelled out recognized."""
    for node in walk([root]):
        if id(node) in memo:
            continue
        args = () if node.kind == "matmul" else tuple(memo[id(a)] for a in node.args)
        if node.kind == "softmax":
            power = graph.make("exp", graph.make("sub", args[0], graph.make("max", args[0])))
            memo[id(node)] = graph.make(
                "mul", power, graph.make("div", graph.constant(1), graph.make("sum", power))
            )
        elif node.kind == "mean" and (of := _deviation(args[0])) is not None:
            memo[id(node)] = graph.make("var", of)
        elif node.kind in (*ELEMENTWISE, *REDUCTIONS, *ROTATIONS):
            memo[id(node)] = graph.make(node.kind, *args, value=node.value)
        elif node.kind == "matmul":  # the library's: a kernel starts from its result
            memo[id(node)] = graph.leaf("input", "product", node.shape)
        else:
            memo[id(node)] = node
    return memo[id(root)]


def _deviation(square: Node) -> Node | None:
    """x, where this is (x - mean(x)) * (x - mean(x))."""
    if square.kind == "mul" and square.args[0] is square.args[1] and square.args[0].kind == "sub":
        x, center = square.args[0].args
        if center.kind == "mean" and center.args == (x,):
            return x
    return None
