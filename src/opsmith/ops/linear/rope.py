"""The projection to queries, keys and values, rotated and laid out for attention as it is written."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call.arguments import check_float, check_number, check_out, earlier
from opsmith.call.dispatch import compiling, kernels, native, needs_grad, recorded
from opsmith.call.fast import direct
from opsmith.call.layouts import as_rows, dense
from opsmith.kernels import libraries, triton
from opsmith.operator import Implementation, Kind, Operator, register
from opsmith.ops.linear import FEW_ROWS, check_weights, entries, linear, pack_weight
from opsmith.ops.linear.rope_samples import cost, samples, workloads
from opsmith.ops.rope import SIGNATURE_QK, Rotation, definition_qk, dense_rows, reference_qk
from opsmith.ops.rope import native_qk as rotate
from opsmith.ops.rope.check import check_table, name_bad_position

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_LONGEST = 512  # least common multiple of a head's size and a panel of the packed weight, for the C++ kernel

_ONE_ROW = direct.Ready(FEW_ROWS, most_rows=1)


def linear_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
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
    if out is None and not compiling():
        dims = head_dim if rotary_dim is None else rotary_dim
        sizes = heads, kv_heads, head_dim
        try:
            usual = dims and heads > 0 < kv_heads and (positions is None or cos.dim() == 2)
            if usual and not needs_grad(x, weight, bias, cos, sin):
                soon = _packed if weight.dim() == 3 else _token
                made = soon(x, weight, bias, cos, sin, sizes, positions, dims, interleaved)
                if made is not None:
                    return made
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):  # the checks say why
            pass
    dims = _check(x, weight, bias, cos, sin, heads, kv_heads, head_dim, positions, rotary_dim, out)
    options: dict[str, Any] = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "interleaved": interleaved,
        "positions": positions,
        "rotary_dim": dims,
    }
    if weight.dim() == 3:
        return _native(x, weight, bias, cos, sin, **options, out=out)
    if native(x, "rope_qk") is not True or needs_grad(cos, sin):
        y = reference(x, weight, bias, cos, sin, **options)
    elif needs_grad(x, weight, bias):
        y = recorded(_LinearRope, x, weight, bias, cos, sin, options)
    else:
        return _apart(x, weight, bias, cos, sin, **options, out=out)
    return y if out is None else _copy(y, out)


def _token(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sizes: tuple[int, int, int],
    positions: torch.Tensor | None,
    dims: int,
    interleaved: bool,
) -> Triple | None:
    """One token, whose projection is laid out as it should be: rotated where it stands. None for other calls."""
    heads, kv_heads, head_dim = sizes
    y = _ONE_ROW.call(x, weight, bias, None, 0)
    if y is None:
        return None
    row = (head_dim,) if x.dim() == 2 else (1, head_dim)
    of_kv = (1, kv_heads, *row)
    q, k, v = direct.pieces(y, (1, heads, *row), of_kv, of_kv)
    direct.rope_qk(q, k, cos, sin, positions, dims, interleaved, False, yq=q, yk=k)
    return q, k, v


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    **options: Any,
) -> Triple:
    """The definition, in plain PyTorch."""
    q, k, v = _parts(F.linear(x, weight, bias), heads, kv_heads, head_dim)
    q, k = reference_qk(q, k, cos, sin, **options)
    plain = torch.contiguous_format
    return q.clone(memory_format=plain), k.clone(memory_format=plain), v.clone(memory_format=plain)


def _parts(y: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> Triple:
    """Views [B, H, L, D] of the projection [B, L, N], or [T, H, D] of [T, N]."""
    y = y.view(*y.shape[:-1], heads + 2 * kv_heads, head_dim)
    q, k, v = y.split_with_sizes((heads, kv_heads, kv_heads), -2)
    return (q, k, v) if y.dim() == 3 else (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def _shapes(
    x: torch.Tensor, heads: int, kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if x.dim() == 2:
        return (x.shape[0], heads, head_dim), (x.shape[0], kv_heads, head_dim)
    batch, tokens = x.shape[:2]
    return (batch, heads, tokens, head_dim), (batch, kv_heads, tokens, head_dim)


def _fresh(x: torch.Tensor, heads: int, kv_heads: int, head_dim: int) -> Triple:
    of_q, of_kv = _shapes(x, heads, kv_heads, head_dim)
    return x.new_empty(*of_q), x.new_empty(*of_kv), x.new_empty(*of_kv)


def _check(
    x: Any,
    weight: Any,
    bias: Any,
    cos: Any,
    sin: Any,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positions: Any,
    rotary_dim: int | None,
    out: Any,
) -> int:
    """Refuse wrong arguments; the number of rotated dimensions."""
    check_float("linear_rope", x, least_dim=2)
    check_float("linear_rope", weight, "weight", least_dim=2)
    if x.dim() > 3:
        raise ValueError(f"linear_rope: expected x [B, L, K] or [T, K], got shape {tuple(x.shape)}")
    for name, size in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim)):
        check_number("linear_rope", name, size, whole=True)
    if min(heads, kv_heads, head_dim) < 1:
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
    check_weights("linear_rope", x, weight, bias, n)
    batch, tokens = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
    dims = check_table("linear_rope", x, cos, sin, positions, rotary_dim, head_dim, batch, tokens)
    if out is not None:
        if not isinstance(out, tuple) or len(out) != 3:
            raise TypeError(f"linear_rope: out must be a triple of tensors, got {type(out).__name__}")
        of_q, of_kv = _shapes(x, heads, kv_heads, head_dim)
        memory = {"x": x, "weight": weight, "bias": bias, "cos": cos, "sin": sin, "positions": positions}
        for i, (t, shape) in enumerate(zip(out, (of_q, of_kv, of_kv), strict=True)):
            check_out("linear_rope", t, x, torch.Size(shape), **memory, **earlier(out, i))
    return dims


def _copy(values: Triple, out: Triple) -> Triple:
    for value, target in zip(values, out, strict=True):
        target.copy_(value)
    return out


_ROTATION = Rotation(SIGNATURE_QK, definition_qk, op="linear_rope")


def _apart(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    out: Triple | None = None,
    **options: Any,
) -> Triple:
    """The fastest product for a weight as it is, then one pass that rotates and lays out."""
    q, k, v = _parts(linear(x, weight, bias), heads, kv_heads, head_dim)
    out = _fresh(x, heads, kv_heads, head_dim) if out is None else out
    rotate(q, k, cos, sin, **options, out=out[:2], call=_ROTATION)
    out[2].copy_(v)
    return out


def _native(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    interleaved: bool = False,
    positions: torch.Tensor | None = None,
    rotary_dim: int | None = None,
    out: Triple | None = None,
) -> Triple:
    """Our product, with the rotation and the layout as its epilogue; the weight plain or packed."""
    packed = weight if weight.dim() == 3 else pack_weight(weight)
    q, k, v = _fresh(x, heads, kv_heads, head_dim) if out is None else out
    targets = dense_rows(q), dense_rows(k), dense_rows(v)
    dims = head_dim if rotary_dim is None else rotary_dim
    tables = dense_rows(cos), dense_rows(sin)
    try:
        torch.ops.opsmith.linear_rope.default(
            as_rows(x),
            packed,
            dense(bias),
            *tables,
            positions,
            dims,
            interleaved,
            q=targets[0],
            k=targets[1],
            v=targets[2],
        )
    except RuntimeError:
        name_bad_position(positions, cos, "linear_rope")
        raise
    for target, t in zip(targets, (q, k, v), strict=True):
        if target is not t:
            t.copy_(target)
    return q, k, v


def _packed(
    x: torch.Tensor,
    packed: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sizes: tuple[int, int, int],
    positions: torch.Tensor | None,
    dims: int,
    interleaved: bool,
) -> Triple | None:
    """The kernel at once, for what it takes as it is; it refuses what does not fit. None for other calls."""
    made = _fresh(x, *sizes)
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    done = direct.new_linear_rope(rows, packed, bias, cos, sin, positions, dims, interleaved, *made)
    return made if done else None


def _supports_native(
    x: torch.Tensor, weight: torch.Tensor, *args: Any, head_dim: int, **options: Any
) -> bool | str:
    if x.device.type != triton.DEVICE and math.lcm(head_dim, 64) > _LONGEST:
        return f"the fused kernel has no tile for heads of {head_dim}"
    return native(x, "linear_rope")


class _LinearRope(torch.autograd.Function):
    """Backward turns the gradients back, into the layout of the projection, and multiplies as a linear layer does."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        options: dict[str, Any],
    ) -> Triple:
        ctx.save_for_backward(x, weight, cos, sin, options["positions"])
        ctx.options = {name: value for name, value in options.items() if name != "positions"}
        return _apart(x, weight, bias, cos, sin, **options)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight, cos, sin, positions = ctx.saved_tensors
        heads, kv_heads, head_dim = (ctx.options[name] for name in ("heads", "kv_heads", "head_dim"))
        dy = x.new_empty((*x.shape[:-1], weight.shape[0]))
        q, k, v = _parts(dy, heads, kv_heads, head_dim)
        torch.ops.opsmith.rope_qk.default(
            dense_rows(dq),
            dense_rows(dk),
            dense_rows(cos),
            dense_rows(sin),
            positions,
            ctx.options["rotary_dim"],
            ctx.options["interleaved"],
            True,
            yq=q,
            yk=k,
        )
        v.copy_(dv)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dy @ weight if need_x else None
        dw = rows.t() @ x.reshape(-1, x.shape[-1]) if need_w else None
        db = rows.sum(0) if need_b else None
        return dx, dw, db, None, None, None


CARD = register(
    Operator(
        name="linear_rope",
        kind=Kind.MATMUL,
        function=linear_rope,
        reference=reference,
        cost=cost,
        samples=samples,
        workloads=workloads,
        implementations=[
            *kernels(_native, _supports_native, prepack=lambda w, rows: pack_weight(w)),
            Implementation("apart", _apart, "any", lambda x, *a, **k: native(x, "rope_qk"), takes_out=True),
            Implementation("eager", reference),
        ],
        entries={"linear_rope": entries.rope_entry},
        schemas=(
            "linear_rope(Tensor x, Tensor packed, Tensor? bias, Tensor cos, Tensor sin, Tensor? positions, "
            "int dims, bool interleaved, *, Tensor(a!) q, Tensor(b!) k, Tensor(c!) v) -> ()",
        ),
        outputs=3,
        source="Su et al., 2021",
    )
)

libraries.offer("linear_rope", "linear_rope")
