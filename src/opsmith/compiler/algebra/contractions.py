"""What matmuls, attention and table look-ups mean in the algebra; see `canon`."""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from opsmith.compiler.algebra import views
from opsmith.compiler.algebra.canon import Canon, Unreadable, op_name, rule, shape_of
from opsmith.compiler.algebra.choices import boolean_mask
from opsmith.compiler.algebra.reductions import softmax
from opsmith.compiler.algebra.terms import Poly, Shape


@rule("matmul", "mm", "bmm")
def _matmul(c: Canon, node: Node, self: Any = None, other: Any = None, mat2: Any = None) -> Poly:
    a, b = self, other if other is not None else mat2
    if len(shape_of(a)) < 2 or len(shape_of(b)) < 2:
        raise Unreadable
    return product(c, a, b, shape_of(node))


def product(c: Canon, a: Any, b: Any, shape: Shape) -> Poly:
    """a @ b. A left operand whose leading dimensions are folded, and can't be unfolded inside, is unfolded outside."""
    s, left, right = c.space, c(a), c(b)
    atom = left.atom
    if atom is not None and atom.name == "reshape" and len(atom.args[0].terms) and atom.args[0].atom is None:
        inner = atom.args[0]
        full = inner.shape
        if len(full) > len(atom.shape) and full[-1] == atom.shape[-1]:
            old = shape_of(b)
            unfolded = views.reshape(s, right, old, (*full[:-2], *old[-2:]))
            wide = (*full[:-1], shape[-1])
            return views.reshape(s, s.matmul(inner, unfolded, wide), wide, shape)
    return s.matmul(left, right, shape)


@rule("addmm", "baddbmm")
def _addmm(
    c: Canon,
    node: Node,
    self: Any,
    mat1: Any = None,
    mat2: Any = None,
    batch1: Any = None,
    batch2: Any = None,
    beta: Any = 1,
    alpha: Any = 1,
) -> Poly:
    if not isinstance(alpha, int | float) or not isinstance(beta, int | float):
        raise Unreadable
    a, b = (mat1, mat2) if mat1 is not None else (batch1, batch2)
    result = c.space.scale(product(c, a, b, shape_of(node)), float(alpha))
    return result if beta == 0 else c.space.add(result, c(self), float(beta))


@rule("linear")
def _linear(c: Canon, node: Node, input: Any, weight: Any, bias: Any = None) -> Poly:
    s = c.space
    result = s.matmul(c(input), views.permute(s, c(weight), (1, 0)), shape_of(node))
    return result if bias is None else s.add(result, c(bias))


@rule("einsum")
def _einsum(c: Canon, node: Node, equation: str, tensors: Any, path: Any = None) -> Poly:
    """A contraction of two operands over one index: permuted to a batched matmul, and back."""
    inputs, _, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if len(parts) != 2 or len(tensors) != 2 or not output:
        raise Unreadable
    ranks = [len(shape_of(t)) for t in tensors]
    left, right, output = _name_ellipsis(parts[0], parts[1], output, ranks)
    if any(len(set(p)) != len(p) for p in (left, right, output)):
        raise Unreadable
    batch = [i for i in left if i in right and i in output]
    inner = [i for i in left if i in right and i not in output]
    rows = [i for i in left if i not in right and i in output]
    cols = [i for i in right if i not in left and i in output]
    order = batch + rows + cols
    if (
        len(inner) != 1
        or len(cols) != 1
        or not rows
        or (len(rows) > 1 and batch)
        or len(output) != len(order)
    ):
        raise Unreadable
    s = c.space
    a = views.permute(s, c(tensors[0]), tuple(left.index(i) for i in batch + rows + inner))
    b = views.permute(s, c(tensors[1]), tuple(right.index(i) for i in batch + inner + cols))
    sizes = dict(zip(output, shape_of(node), strict=True))
    product_ = s.matmul(a, b, tuple(sizes[i] for i in order))
    return views.permute(s, product_, tuple(order.index(i) for i in output))


def _name_ellipsis(left: str, right: str, output: str, ranks: list[int]) -> tuple[str, str, str]:
    """Each `...` spelled out with capital letters, aligned to the right as broadcasting does."""
    first, second = (
        rank - len(p.replace("...", "")) if "..." in p else 0
        for p, rank in zip((left, right), ranks, strict=True)
    )
    parts = ((left, first), (right, second), (output, max(first, second)))
    left, right, output = (p.replace("...", "ABCDEFGH"[8 - n :]) for p, n in parts)
    return left, right, output


@rule("scaled_dot_product_attention")
def _sdpa(
    c: Canon,
    node: Node,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Any = None,
    enable_gqa: bool = False,
) -> Poly:
    q, k, v = shape_of(query), shape_of(key), shape_of(value)
    if dropout_p != 0 or len(q) != len(k):
        raise Unreadable
    if scale is None:
        if not isinstance(q[-1], int):
            raise Unreadable
        scale = q[-1] ** -0.5
    s, rank = c.space, len(q)
    swap = (*range(rank - 2), rank - 1, rank - 2)
    scores_shape = (*q[:-1], k[-2])
    # Fewer heads of keys serve groups of queries where that is asked for; a single one is broadcast anyway.
    if rank > 3 and q[-3] != k[-3] and k[-3] != 1 and not enable_gqa:
        raise Unreadable
    scores = s.scale(s.matmul(c(query), views.permute(s, c(key), swap), scores_shape), float(scale))
    if is_causal:
        # PyTorch aligns a rectangle to its upper left corner; only a square means what `causal` means here.
        square = (q[-2], k[-2])
        causal = s.fn("causal" if q[-2] == k[-2] else "upper_left", (), square)
        scores = s.add(scores, s.fn("keep", (causal,), square))
    if attn_mask is not None:
        boolean = not attn_mask.meta["val"].is_floating_point()
        scores = s.add(scores, boolean_mask(c, attn_mask, False, -math.inf) if boolean else c(attn_mask))
    return s.matmul(softmax(s, scores, k[-2]), c(value), (*q[:-1], v[-1]))


@rule("tril", "triu")
def _triangle(c: Canon, node: Node, self: Any, diagonal: int = 0) -> Poly:
    """A square of ones, or above the diagonal of minus infinity, as what a causal mask keeps or hides."""
    upper, square = op_name(node) == "aten::triu", shape_of(node)[-2:]
    if diagonal != upper or len(square) < 2 or square[0] != square[1] or not isinstance(self, Node):
        raise Unreadable
    fill = self.args[1] if op_name(self) == "aten::full" else None
    causal = c.space.fn("causal", (), square)
    if fill == 1 or op_name(self) in ("aten::ones", "aten::ones_like", "aten::new_ones"):
        return c.space.fn("not", (causal,), square) if upper else causal
    if upper and fill == -math.inf:
        return c.space.fn("keep", (causal,), square)
    raise Unreadable


@rule("embedding")
def _embedding(c: Canon, node: Node, weight: Any, indices: Any, **_: Any) -> Poly:
    return c.space.fn("gather", (c(weight), c(indices)), shape_of(node))


@rule("index")
def _index(c: Canon, node: Node, self: Any, indices: Any) -> Poly:
    integral = len(indices) == 1 and isinstance(indices[0], Node) and not _is_boolean(indices[0])
    if not integral or len(shape_of(self)) != 2:
        raise Unreadable
    return c.space.fn("gather", (c(self), c(indices[0])), shape_of(node))


@rule("index_select")
def _index_select(c: Canon, node: Node, self: Any, dim: int, index: Any) -> Poly:
    if dim != 0 or len(shape_of(self)) != 2 or len(shape_of(index)) != 1:
        raise Unreadable
    source = index
    while op_name(source) in ("aten::view", "aten::reshape", "aten::flatten"):
        source = source.args[0]
    ids = views.reshape(c.space, c(source), shape_of(source), shape_of(index))
    c.nodes.setdefault(ids, []).append(index)
    return c.space.fn("gather", (c(self), ids), shape_of(node))


def _is_boolean(node: Node) -> bool:
    return str(node.meta["val"].dtype) in ("torch.bool", "torch.uint8")
