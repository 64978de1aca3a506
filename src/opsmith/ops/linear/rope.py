"""The projection to queries, keys and values, rotated and laid out for attention as it is written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import check_float, check_number
from opsmith.call.dispatch import compiling, kernels, native, needs_grad
from opsmith.call.layouts import dense_rows, is_dense, nbytes
from opsmith.call.run import Call
from opsmith.call.signature import Input, Number, Output, Signature
from opsmith.kernels import libraries, triton
from opsmith.operator import Cost, Implementation, Kind, Make, Sample, Supports
from opsmith.ops.linear import check_weights, linear, pack_weight
from opsmith.ops.linear.onednn import product
from opsmith.ops.rope import SIGNATURE_QK, Rotation, definition_qk, rope_qk
from opsmith.ops.rope.check import check_table, name_bad_position
from opsmith.ops.rope.table import rope_table

Triple = tuple[Tensor, Tensor, Tensor]
_LONGEST = 512  # least common multiple of a head's size and a panel of the packed weight, for the C++ kernel

# Of the packed weight, which the heads' sizes divide among the results; see `_LinearRope.made`.
SIGNATURE = Signature(
    "linear_rope",
    (
        *(Input("x", "... K"), Input("weight", "P N D"), Input("bias", "N", optional=True)),
        *(Input("cos", "... C"), Input("sin", "... C"), Input("positions", "... L", torch.int64, True)),
        *(Number("dims", int), Number("interleaved", bool)),
    ),
    (Output("q", "..."), Output("k", "..."), Output("v", "...")),
    beside=("heads", "kv_heads", "head_dim"),
)
_ROTATION = Rotation(SIGNATURE_QK, rope_qk, definition_qk, op="linear_rope")


def linear_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    out: Triple | None = None,
) -> Triple:
    """Project to queries, keys and values, rotate the first two, and lay all out as attention reads them.

    `q, k, v = split(x @ weight.T + bias)` by heads; then `rope_qk(q, k, cos, sin)`. With a weight that was packed
    once (`pack_weight`), the rotation and the layout are the product's epilogue: they happen in cache, in float32,
    and no pass over memory is theirs.

    >>> cos, sin = rope_table(64, 512)
    >>> x, weight = torch.randn(2, 128, 256), torch.randn((8 + 2 * 2) * 64, 256)
    >>> q, k, v = linear_rope(x, weight, None, cos, sin, heads=8, kv_heads=2, head_dim=64)
    >>> q.shape, v.shape
    (torch.Size([2, 8, 128, 64]), torch.Size([2, 2, 128, 64]))

    Args:
        x: [B, L, K] or [T, K], float32, bfloat16 or float16 (float64 through PyTorch).
        weight: [(heads + 2 kv_heads) head_dim, K] in x's dtype, the rows of queries, keys, values in this order;
            or `pack_weight` of it, which gives no gradients.
        bias: as many numbers as weight has rows, or None.
        cos, sin, interleaved, positions, rotary_dim: as for `rope`.
        heads, kv_heads: of queries; of keys and values.
        head_dim: D.
        out: tensors (q, k, v) to write into.

    Returns:
        q [B, heads, L, D], k and v [B, kv_heads, L, D]; [T, heads, D] and [T, kv_heads, D] for x [T, K].

    Raises:
        PositionError: a position has no row; nothing is read out of range.
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    dims = head_dim if rotary_dim is None else rotary_dim
    rotation = (cos, sin, positions, dims, interleaved)
    return _CALL.traced(x, weight, bias, *rotation, heads, kv_heads, head_dim, out)  # type: ignore[no-any-return]


def definition(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    dims: int,
    interleaved: bool,
    *sizes: int,
) -> Triple:
    """The definition, in plain PyTorch."""
    q, k, v = _parts(F.linear(x, weight, bias), *sizes)
    q, k = definition_qk(q, k, cos, sin, positions, dims, interleaved)
    plain = torch.contiguous_format
    return q.clone(memory_format=plain), k.clone(memory_format=plain), v.clone(memory_format=plain)


def _parts(y: Tensor, heads: int, kv_heads: int, head_dim: int) -> Triple:
    """Views [B, H, L, D] of the projection [B, L, N], or [T, H, D] of [T, N]."""
    y = y.view(*y.shape[:-1], heads + 2 * kv_heads, head_dim)
    q, k, v = y.split_with_sizes((heads, kv_heads, kv_heads), -2)
    return (q, k, v) if y.dim() == 3 else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _shapes(x: Tensor, heads: int, kv_heads: int, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if x.dim() == 2:
        return (x.shape[0], heads, head_dim), (x.shape[0], kv_heads, head_dim)
    batch, tokens = x.shape[:2]
    return (batch, heads, tokens, head_dim), (batch, kv_heads, tokens, head_dim)


class _LinearRope(Call):
    """With a packed weight one kernel; else the fastest product, and one pass that rotates and lays out.

    Backward turns the gradients back, into the layout of the projection, and multiplies as a linear layer does.
    """

    def check(self, values: Sequence[Any]) -> None:
        x, weight, bias, cos, sin, positions, dims, _, *sizes = values
        check_float(self.op, x, least_dim=2)
        check_float(self.op, weight, "weight", least_dim=2)
        if x.dim() > 3:
            raise ValueError(f"linear_rope: expected x [B, L, K] or [T, K], got shape {tuple(x.shape)}")
        for name, size in zip(self.signature.beside, sizes, strict=True):
            check_number(self.op, name, size, whole=True)
        heads, kv_heads, head_dim = sizes
        if min(sizes) < 1:
            raise ValueError(
                "linear_rope: heads, kv_heads and head_dim must be positive, "
                f"got {heads}, {kv_heads} and {head_dim}"
            )
        n, k = (heads + 2 * kv_heads) * head_dim, x.shape[-1]
        packed = (1, n, k + k % 2 if x.dtype == torch.bfloat16 else k)
        if tuple(weight.shape) not in ((n, k), packed):
            raise ValueError(
                f"linear_rope: weight must have shape ({n}, {k}), {heads} + 2 * {kv_heads} heads of {head_dim}, or be "
                f"packed as {packed}; got {tuple(weight.shape)}"
            )
        check_weights(self.op, x, weight, bias, n)
        batch, tokens = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
        check_table(self.op, x, cos, sin, positions, dims, head_dim, batch, tokens)

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        x, head_dim = values[0], values[-1]
        if x.device.type != triton.DEVICE and math.lcm(head_dim, 64) > _LONGEST:
            return f"the fused kernel has no tile for heads of {head_dim}"
        return native(x, "linear_rope")

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        x, weight, _, cos, sin, *_ = values
        if weight.dim() == 3:
            return "packed"
        return "apart" if native(x, "rope_qk") is True and not needs_grad(cos, sin) else None

    def made(self, values: Sequence[Any]) -> list[tuple[Output, list[int], torch.dtype]]:
        of_q, of_kv = _shapes(values[0], *values[-3:])
        shapes = (of_q, of_kv, of_kv)
        pairs = zip(self.signature.results, shapes, strict=True)
        return [(one, list(shape), values[0].dtype) for one, shape in pairs]

    def recorded(self, backend: str, values: Sequence[Any]) -> Any:
        # A packed weight gives no gradients.
        return self.native(backend, values) if backend == "packed" else super().recorded(backend, values)

    def run(
        self, backend: str, values: Sequence[Any], out: Any = None, keep: bool = False
    ) -> tuple[list[Tensor], dict[str, Any]]:
        if backend == "packed":
            return super().run(backend, values, out)
        x, weight, bias, *rotation = values[:-3]
        q, k, v = _parts(linear(x, weight, bias).to(x.dtype), *values[-3:])  # autocast has it in another
        results = [self.fresh(x, shape) for _, shape, _ in self.made(values)] if out is None else [*out]
        _ROTATION.native("opsmith", (q, k, *rotation, False), tuple(results[:2]))
        if out is None and compiling():  # PyTorch 2.11's compiler loses the gradient of what is copied into
            results[2] = v.clone(memory_format=torch.contiguous_format)
        else:
            results[2].copy_(v)
        return results, self.named(values)

    def gradients(
        self, backend: str, known: dict[str, Any], slopes: Sequence[Tensor], wanted: set[str]
    ) -> dict[str, Tensor]:
        x, weight = known["x"], known["weight"]
        dy = x.new_empty((*x.shape[:-1], weight.shape[0]))
        q, k, v = _parts(dy, *(known[name] for name in self.signature.beside))
        rotation = (known[name] for name in ("cos", "sin", "positions", "dims", "interleaved"))
        _ROTATION.native("opsmith", (*slopes[:2], *rotation, True), (q, k))
        v.copy_(slopes[2])
        rows = dy.flatten(0, -2)
        found = {"x": product(rows, weight.t()).view(x.shape)} if "x" in wanted else {}
        if "weight" in wanted:
            found["weight"] = product(rows.t(), x.flatten(0, -2).t())
        if "bias" in wanted:
            found["bias"] = rows.sum(0)
        return found

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        return dense_rows(t) if t is not None and of.name in ("cos", "sin") else super().taken(of, t)

    def taken_result(self, of: Any, t: Tensor) -> Tensor:
        return t

    def writable(self, t: Tensor) -> bool:
        return is_dense(t)

    def explain(self, values: Sequence[Any]) -> None:
        name_bad_position(values[5], values[3], self.op)


_CALL = _LinearRope(
    SIGNATURE,
    linear_rope,
    definition,
    converted={"dims": lambda head_dim, rotary_dim: head_dim if rotary_dim is None else rotary_dim},
)


def _native(values: tuple[Any, ...], out: Triple | None = None) -> Any:
    """Our product, with the rotation and the layout as its epilogue; the weight plain or packed."""
    x, weight, *rest = values
    return _CALL.native("packed", (x, weight if weight.dim() == 3 else pack_weight(weight), *rest), out)


def _cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    **options: Any,
) -> Cost:
    n, k = (heads + 2 * kv_heads) * head_dim, x.shape[-1]
    rows = x.numel() // k if k else 0
    dims = head_dim if rotary_dim is None else rotary_dim
    turned = rows * (heads + kv_heads) * dims
    tokens = min(x.shape[-2], cos.shape[-2]) * (cos.shape[0] if cos.dim() == 3 else 1)
    table = 2 * tokens * cos.shape[-1] * cos.element_size()
    moved = nbytes(x, weight, bias, positions) + rows * n * x.element_size() + table
    return Cost(2.0 * rows * n * k + 3.0 * turned + (rows * n if bias is not None else 0), moved)


def _entry(x: Tensor, weight: Tensor, q: Tensor, k: Tensor, v: Tensor, **rest: Any) -> Cost:
    """The entry of the dispatcher, which takes rows: of shapes alone, all of a head is turned."""
    rows = x if q.dim() == 3 else x.view(q.shape[0], q.shape[2], x.shape[-1])
    sizes: dict[str, Any] = {"heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[-1]}
    return _cost(rows, weight, rest["bias"], rest["cos"], rest["sin"], positions=rest["positions"], **sizes)


def _samples(make: Make) -> Iterator[Sample]:
    def sample(
        name: str,
        x: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = True,
        width: int | None = None,
        rows: int | None = None,
        **options: Any,
    ) -> Sample:
        n, k = (heads + 2 * kv_heads) * head_dim, x.shape[-1]
        tokens = x.shape[-2] if rows is None else rows
        table = rope_table(width or head_dim, tokens, dtype=make.dtype, device=make.device)
        weight = make(n, k, scale=max(k, 1) ** -0.5).requires_grad_()
        b = make(n).requires_grad_() if bias else None
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        return Sample(name, (x.requires_grad_(), weight, b, *table), {**sizes, **options})

    for batch, tokens, k in ((2, 2, 6), (3, 7, 33), (2, 20, 48)):
        yield sample(f"{batch}x{tokens}x{k}", make(batch, tokens, k), 4, 2, 16)
    yield sample("1x1x1", make(1, 1, 1), 1, 1, 2)
    x = make(2, 9, 40)
    for size in (48, 64, 80, 96, 128):
        yield sample(f"heads of {size}", x, 3, 1, size)
    yield sample("no tile", x, 2, 1, 202)
    yield sample("many rows", make(1, 210, 30), 2, 1, 128)
    yield sample("no bias", x, 4, 2, 16, bias=False)
    yield sample("interleaved", x, 4, 2, 32, interleaved=True)
    at = make.ids(2, 9, high=50)
    yield sample("positions", x, 4, 2, 32, positions=at, rows=50)
    yield sample("partial", x, 3, 3, 40, width=10, rotary_dim=10)
    yield sample("partial, interleaved", x, 3, 3, 80, width=32, rotary_dim=32, interleaved=True)
    yield sample("packed", make(9, 40), 4, 1, 64)
    yield sample("strided", make(40, 9).t(), 4, 2, 16)
    yield sample("empty", make(2, 0, 40), 4, 2, 16, rows=3)


def _workloads(make: Make) -> Iterator[Sample]:
    for tokens, k, heads, kv_heads in ((512, 2048, 32, 8), (1, 2048, 32, 8)):
        n = (heads + 2 * kv_heads) * 64
        table = rope_table(64, tokens, dtype=make.dtype, device=make.device)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 64}
        inputs = (make(1, tokens, k), make(n, k, scale=k**-0.5), make(n))
        yield Sample(f"{tokens}x{k}x{n}", (*(t.requires_grad_() for t in inputs), *table), sizes)


CARD = _CALL.card(
    kind=Kind.MATMUL,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    implementations=[
        *kernels(
            _CALL.form(_native, out=True), _CALL.form(_CALL.supported), prepack=pack_weight, packs_alike=True
        ),
        Implementation(
            "apart",  # the fastest product for a weight as it is, then one pass that rotates and lays out
            _CALL.form(partial(_CALL.native, "apart"), out=True),
            "any",
            lambda x, *args, **options: native(x, "rope_qk"),
            takes_out=True,
        ),
        Implementation("eager", _CALL.reference),
    ],
    entries={"linear_rope": _entry, "linear_pack": lambda weight, packed: Cost(0.0, nbytes(weight, packed))},
    schemas=(*SIGNATURE.schemas(), "linear_pack(Tensor weight, *, Tensor(a!) packed) -> ()"),
    source="Su et al., 2021",
)

libraries.offer("linear_rope", "linear_rope")
