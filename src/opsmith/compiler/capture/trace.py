"""Dynamo's graph as ATen, before autograd, with symbolic sizes, and tidied of what does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from opsmith.call.run import decompositions
from opsmith.compiler.algebra.canon import arguments, op_name, shape_of
from opsmith.compiler.capture.casts import Recorder, spell_out
from opsmith.compiler.capture.mutation import effects, localize


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any], general: bool = False) -> fx.GraphModule:
    """Retrace Dynamo's graph to ATen operators, keeping linear, attention and embedding whole.

    Runs under the tracing context's fake mode, so sizes stay symbolic and one graph serves every batch and
    sequence length; before autograd, so that one rewrite serves inference and training. `general` graphs are checked.
    """
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None

    def fake(t: Any) -> Any:
        if not isinstance(t, Tensor) or mode is None:
            return t
        if isinstance(t, torch._subclasses.FakeTensor):
            if t.fake_mode is mode:
                return t
            with mode:  # a result from inside Dynamo's graph, which was traced in a mode of its own
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        symbolic = context.tensor_to_context.get(t) if context is not None else None
        source = None if symbolic is None else symbolic.tensor_source
        return mode.from_tensor(t, static_shapes=symbolic is None, symbolic_context=symbolic, source=source)

    with torch.fx.traceback.preserve_node_meta(), mode or contextlib.nullcontext():
        trace = make_fx(Recorder(gm).run, decompositions, pre_dispatch=True, _allow_non_fake_inputs=True)
        traced = trace(*[fake(v) for v in example_inputs])
        spell_out(traced.graph, [isinstance(v, torch.nn.Parameter) for v in example_inputs])
    if general:
        check_general(traced.graph)
    note_constants(traced)
    tidy(traced.graph)
    traced.recompile()
    return traced


class NotGeneral(Exception):
    """A model that has to be captured with sizes of one apart."""


class Declined(Exception):
    """A graph that is to run as it was, and why."""


def check_general(graph: fx.Graph) -> None:
    """Make sure that a graph captured to serve sizes of one too (`backed_size_oblivious`) does.

    PyTorch then takes every size for one like any. Two answers change what a model computes next. `squeeze` decides on
    the number of axes: where it was to drop a size and did not, a guard has the model captured anew at a size of one.
    And a slice with bounds that would have to be compared gets a size of which nothing is known.

    Raises:
        NotGeneral: for such a size.
    """
    for node in graph.nodes:
        if free_unbacked_symbols(node.meta.get("val")):
            raise NotGeneral
        if op_name(node) in ("aten::squeeze", "aten::squeeze_"):
            sizes = node.args[0].meta["val"].shape
            axes = arguments(node).get("dim", range(len(sizes)))
            with torch.fx.experimental._config.patch(backed_size_oblivious=False):  # type: ignore[attr-defined]
                for axis in [axes] if isinstance(axes, int) else axes:
                    bool(sizes[axis] != 1)  # which is what makes a guard


def note_constants(gm: fx.GraphModule) -> None:
    """Give every one-element tensor constant its value, so that a formula can use it as a number."""
    for node in gm.graph.find_nodes(op="get_attr"):
        value = getattr(gm, node.target, None)
        if isinstance(value, torch._subclasses.FakeTensor):
            raise Declined("it calls what PyTorch runs without a record of it, as an associative_scan")
        if isinstance(value, Tensor):
            node.meta.setdefault("val", value)
            if value.numel() == 1 and not value.requires_grad and not isinstance(value, torch.nn.Parameter):
                node.meta["constant"] = float(value)


def tidy(graph: fx.Graph) -> None:
    """Drop what gives its input: dropout out of training, casts and views to what a value is, joins with nothing."""
    localize(graph)
    changing = effects(graph).changing()
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        source = _unchanged(node) or _alone(node)
        if source is not None and not (changing and {node, source} & changing):
            for user in node.users:  # a join lies in one piece, and what is joined may not
                if user.target is torch.ops.aten.view.default:
                    user.target = torch.ops.aten.reshape.default
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    _share_views(graph)
    graph.eliminate_dead_code()
    _vectors_first(graph, changing)


def _share_views(graph: fx.Graph) -> None:
    """Let equal views of one value be one node: so queries and keys, and all layers, read one table of angles."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not op_name(node) or node.target.namespace != "aten" or node.target._schema.is_mutable:
            continue
        views = [r.alias_info is not None for r in node.target._schema.returns]
        if views == [True] and not any(user.op == "output" for user in node.users):
            first = known.setdefault((node.target, str(node.args), str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _vectors_first(graph: fx.Graph, changing: Collection[fx.Node]) -> None:
    """Let vectors made of inputs alone (a norm's weight that is kept less one) stand where weights do, first of all."""
    *_, last = [None, *graph.find_nodes(op="placeholder")]
    for node in list(graph.nodes):
        value, read = node.meta.get("val"), node.all_input_nodes
        vector = isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 1
        if not vector or not op_name(node) or not read or any(n.op != "placeholder" for n in read):
            continue
        if last is not None and not any(n in changing for n in (node, *read)):
            last.append(node)
            last = node


def _unchanged(node: fx.Node) -> fx.Node | None:
    """The first argument of a call that gives just that."""
    name = op_name(node)
    source: Any = node.args[0] if node.args else None
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    if not name or not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    given, same = arguments(node), shape_of(source) == shape_of(node)
    if name == "aten::dropout":
        same = not given["train"] or given["p"] == 0
    elif name in ("aten::to", "aten::type_as"):
        same = (before.dtype, before.device) == (after.dtype, after.device) and not given.get("copy")
    elif name == "aten::slice":
        same = same and given["step"] == 1
    elif name not in ("aten::view", "aten::reshape", "aten::expand", "aten::alias"):
        return None
    return source if same else None


def _alone(node: fx.Node) -> fx.Node | None:
    """The one part of a concatenation that has elements: the features left by a rotation of all features are none."""
    if op_name(node) not in ("aten::cat", "aten::concat", "aten::concatenate"):
        return None
    parts = [p for p in arguments(node)["tensors"] if 0 not in shape_of(p)]
    # An input is its owner's memory, and one that has more elements than another of fewer axes is a cache's first copy.
    if len(parts) != 1 or parts[0].op != "call_function" or shape_of(parts[0]) != shape_of(node):
        return None
    axes = {len(shape_of(p)) for p in arguments(node)["tensors"]}
    same = parts[0].meta["val"].dtype == node.meta["val"].dtype
    return parts[0] if same and len(axes) == 1 else None
