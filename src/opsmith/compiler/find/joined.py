"""Packed linear layers that read one input, as one: queries, keys and values, or a gate and what it multiplies.

Each call of a kernel starts all threads and waits for them, which takes as long as a small layer's weight takes to be
read. So layers that follow each other and read the same input share one packed weight and one call; what each of them
gives are columns of its result. Their own packed weights become parts of the shared one, so that nothing is held twice
and each can still be called by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx import Node

from opsmith.call.dispatch import needs_grad
from opsmith.call.layouts import in_huge_pages
from opsmith.compiler.algebra.canon import op_name, shape_of
from opsmith.compiler.capture.mutation import Effects, filled
from opsmith.compiler.find.operands import Made
from opsmith.compiler.find.recognize import LEFT_OPERAND
from opsmith.compiler.find.site import Site
from opsmith.operator import Implementation, Operator
from opsmith.ops.packed_linear import CARD, format_of, packed_linear
from opsmith.ops.packed_linear.formats import FORMATS
from opsmith.ops.packed_linear.weight import in_parts

# Rows of a weight that its packed form keeps together: a layer whose weight ends within such a panel comes last.
_PANEL = {format: 64 if format == "bf16" else 32 for format in FORMATS}
_PIECE = 1 << 25  # bytes that are copied at a time
_AXIS = {"weight": 0, "scale": -1, "zero": -1, "bias": 0, "outer": -1}
T = TypeVar("T")
Owner = Callable[[Any], Any]  # the layer whose packed weight a graph's input is, or None
Lay = Callable[[Sequence[Any]], bool]  # lays layers' packed weights side by side, where it may


@dataclass(frozen=True)
class Part:
    """The call of one packed layer in a graph."""

    node: Node
    x: Node
    tensors: dict[str, Node | None]  # weight, scale, zero, bias and outer
    layer: Any

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is the same for parts of one call."""
        layer, without_zero = self.layer, self.tensors["zero"] is None
        return (source(self.x), shape_of(self.x), layer.format, layer.group_size, without_zero)

    @property
    def columns(self) -> int:
        """How many numbers it gives for each row."""
        return int(shape_of(self.node)[-1])


def joined(axis: int, *parts: Tensor | int) -> Tensor:
    """Tensors side by side: as one view of the memory that they share where they lie so in it, else as a copy.

    A number stands for so many zeros. Gradients are recorded of a copy only.
    """
    tensors = [p for p in parts if isinstance(p, Tensor)]
    plain = len(tensors) == len(parts) and not needs_grad(*tensors)
    if plain and (view := adjacent(axis, tensors)) is not None:
        return view
    return torch.cat([tensors[0].new_zeros(p) if isinstance(p, int) else p for p in parts], axis)


def adjacent(axis: int, tensors: Sequence[Any]) -> Tensor | None:
    """The view of all tensors where they lie side by side in one memory, else None."""
    first = tensors[0]
    axis %= first.dim()
    end, size = first.storage_offset(), list(first.shape)
    size[axis] = 0
    for t in tensors:
        if t.storage_offset() != end or t.stride() != first.stride():
            return None
        if t.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        end += t.shape[axis] * t.stride(axis)
        size[axis] += t.shape[axis]
    return first.as_strided(size, first.stride(), first.storage_offset())  # type: ignore[no-any-return]


def lay(axis: int, tensors: Sequence[Tensor], read: Callable[[Tensor], None] = lambda _: None) -> None:
    """Lay tensors side by side in one memory, of which they become views; tells by pieces what it has read."""
    size = list(tensors[0].shape)
    size[axis] = sum(t.shape[axis] for t in tensors)
    whole = tensors[0].data.new_empty(size)
    for t, part in zip(tensors, whole.split([t.shape[axis] for t in tensors], axis), strict=True):
        rows = max(1, _PIECE // max(1, t[:1].nbytes))
        for to, piece in zip(part.split(rows), t.data.split(rows), strict=True):
            in_huge_pages(to).copy_(piece)
            read(piece)
        t.data = part


def side_by_side(layers: Sequence[Any]) -> None:
    """Lay the packed weights of layers side by side in one memory, of which their own become views."""
    for name, axis in _AXIS.items():
        own = [getattr(layer, name) for layer in layers]
        # Scales that a format has not, or biases that some have not, are small.
        if all(t is not None for t in own):
            lay(own[0].dim() - 2 if name == "weight" else axis, own)


def join(
    gm: fx.GraphModule, inputs: Sequence[Any], owner: Owner, may_lay: Lay, effects: Effects
) -> list[Site]:
    """The groups of packed layers in a graph that one call can stand for."""
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True))
    sites: list[Site] = []
    for group in runs(gm.graph, lambda n: _part(n, lambda of: owner(values.get(of))), _fits):
        # A layer's columns end where the next one's panel starts.
        panel = _PANEL[group[0].layer.format]
        group = sorted(group, key=lambda p: p.columns % panel != 0)
        site, whole = _site(group), not any(p.columns % panel for p in group[:-1])
        if whole and private(site, gm.graph, effects) and may_lay([p.layer for p in group]):
            sites.append(site)
    return sites


def runs(
    graph: fx.Graph, member: Callable[[Node], T | None], fits: Callable[[T, list[T]], bool]
) -> list[list[T]]:
    """Layers of a graph that fit together, two or more, between which stands no other product."""
    groups: list[list[T]] = [[]]
    for node in graph.nodes:
        one, group = member(node), groups[-1]
        if one is not None and group and fits(one, group):
            group.append(one)
        elif one is not None or op_name(node) in LEFT_OPERAND or node.target is filled:
            groups.append([] if one is None else [one])
    return [group for group in groups if len(group) > 1]


def _fits(part: Part, group: list[Part]) -> bool:
    """Whether one call can stand where the group's first does: nothing that this part reads comes later."""
    if part.kind != group[0].kind:
        return False
    first = group[0].node
    known = all(n is None or n.op == "placeholder" or n < first for n in part.tensors.values())
    return known and all(p.layer is not part.layer for p in group)


def _part(node: Node, owner: Callable[[Node | None], Any]) -> Part | None:
    if node.target is not filled or not isinstance(node.args[4], Node):
        return None
    kernel, _, _, _, x, weight, *rest = node.args
    layer = owner(weight if isinstance(weight, Node) else None)
    if layer is None or not isinstance(x, Node):
        return None
    if kernel is torch.ops.opsmith.packed_linear.default:
        scale, zero, bias, outer = rest[:4]
    elif kernel is torch.ops.opsmith.linear_packed.default and rest[1:] == [None, 0]:
        scale, zero, bias, outer = None, None, rest[0], None
    else:
        return None
    tensors: Any = {"weight": weight, "scale": scale, "zero": zero, "bias": bias, "outer": outer}
    return Part(node, x, tensors, layer)


def source(x: Node) -> Node:
    """What rows are the rows of: each layer may have made its own view of them."""
    while op_name(x) in ("aten::view", "aten::reshape") and isinstance(x.args[0], Node):
        if shape_of(x.args[0])[-1:] != shape_of(x)[-1:]:
            break
        x = x.args[0]
    return x


def private(site: Site, graph: fx.Graph, effects: Effects) -> bool:
    """Whether a site's results can be columns of one: none is returned, changed, disturbed, or read by its strides."""
    memory = {effects.memory[n] for n in site.outputs if n in effects.memory}
    returned = {effects.memory.get(n) for o in graph.nodes if o.op == "output" for n in o.all_input_nodes}
    by_strides = {effects.memory.get(n) for n in graph.nodes if op_name(n) == "aten::as_strided"}
    own = len(memory) == len(site.outputs) and memory.isdisjoint(returned | by_strides)
    still = effects.changing().isdisjoint(site.outputs) and not effects.disturbed(site.region, site.outputs)
    return own and still


def _site(group: list[Part]) -> Site:
    call: dict[str, Any] = {"x": min(p.x for p in group), **dict.fromkeys(_AXIS)}
    for name, axis in _AXIS.items():
        parts = [p.tensors[name] for p in group]
        first = next((t for t in parts if t is not None), None)
        if first is not None:
            own = [p.columns if t is None else t for p, t in zip(group, parts, strict=True)]
            axis = len(shape_of(first)) - 2 if name == "weight" else axis
            call[name] = Made(joined, (axis, *own), ())
    layer, columns = group[0].layer, tuple(p.columns for p in group)
    call |= {"format": layer.format, "group_size": layer.group_size, "columns": columns}
    nodes = tuple(p.node for p in group)
    pattern = f"{len(group)} layers of one input"
    return Site(_CARD, pattern, call, nodes, set(nodes), columns=columns)


def _at_once(fn: Callable[..., Any]) -> Callable[..., Any]:
    """What a function of one layer makes of all of them."""

    def packed_linears(*args: Any, columns: tuple[int, ...], **options: Any) -> Any:
        return fn(*args, **options)

    return packed_linears


def _apart(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    columns: tuple[int, ...],
    outer: Tensor | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """A call for each layer, into its columns of the result."""
    y = x.new_empty((*x.shape[:-1], sum(columns))) if out is None else out
    axis, start = weight.dim() - 2, 0
    for n in columns:
        end = start + n
        *own, over = [None if t is None else t[..., start:end] for t in (scale, zero, bias, outer)]
        rows = weight.narrow(axis, start, weight.shape[axis] - start if end == y.shape[-1] else n)
        _native.fn(x, rows, *own, outer=over, **options, out=y[..., start:end])
        start = end
    return y


def in_float64(node: Node, operand: Callable[[Node], Any]) -> Tensor:
    """The result of a packed layer's call, each weight as it was rounded, all else in float64."""
    kernel, _, _, _, *args = node.args
    values: list[Any] = [operand(a) if isinstance(a, Node) else a for a in args]
    x, weight, *rest = values
    if kernel is torch.ops.opsmith.linear_packed.default:
        scale, zero, bias, outer, format, group_size = None, None, rest[0], None, "bf16", 0
    else:
        scale, zero, bias, outer, bits, group_size, scales = rest
        format = format_of(bits, scales, group_size, zero)
    options = {"format": format, "group_size": group_size}
    parts = in_parts(weight, scale, zero, bias, outer, k=x.shape[-1])
    return torch.cat([CARD.reference(x, *own, outer=over, **options) for _, (*own, over) in parts], -1)


_native = CARD.implementation("native")
_CARD: Operator = replace(
    CARD,
    function=_at_once(packed_linear),
    implementations=[
        Implementation("native", _at_once(_native.fn), "cpu", _at_once(_native.supports), takes_out=True),
        Implementation("eager", _apart, takes_out=True),  # what the model does by itself
    ],
)
