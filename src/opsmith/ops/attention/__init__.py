"""Scaled dot-product attention: bidirectional, causal, windowed, with masks and grouped heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call.dispatch import compiling, kernels, native, recording, small_node
from opsmith.call.fast import direct
from opsmith.call.layouts import spread
from opsmith.call.run import Call, declare
from opsmith.call.signature import Gradient, Input, Kept, Made, Number, Output, Rows, Saved, Signature, Slope
from opsmith.operator import GradientCost, Implementation, Kind, Operator, Pattern, Recognition, register
from opsmith.ops.attention import entries
from opsmith.ops.attention.check import check, check_limits
from opsmith.ops.attention.eager import default_scale, eager, has_gpu, reference, sdpa, sdpa_supports
from opsmith.ops.attention.samples import cost, promised, samples, workloads
from opsmith.ops.nonzero_rows import among_zeros, nonzero_rows

# Numbers of q from which the gradients of all keys are worth a search for tokens that have none: a Function in Python.
_SEARCHED = 1 << 16

SIGNATURE = Signature(
    "attention",
    (
        *(
            Input("q", "... D"),
            Input("k", "... D"),
            Input("v", "... D"),
            Input("mask", "... S", optional=True),
        ),
        *(Number("scale", float), Number("causal", bool), Number("window", int), Number("softcap", float)),
    ),
    (Output("y", "... D", like="q"),),
    kept=(Kept("row_sums", Rows.TWO_EACH),),
    gradient=Gradient(
        "attention_backward",
        (
            *(Slope("y", "dout"), Saved("q"), Saved("k"), Saved("v"), Saved("y", "out"), Saved("row_sums")),
            *(Saved("mask"), Saved("scale"), Saved("causal"), Saved("window"), Saved("softcap")),
        ),
        tuple(Made(name, optional=False) for name in "qkv"),
        strided=True,
    ),
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weigh the values by how well each key fits the query; no L x S matrix in memory.

    `y = softmax(scale * q @ k.T + mask) @ v`, by an online softmax over tiles. A query that may see no key
    gives zeros.

    >>> q, kv = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64)  # 4 query heads share each key head
    >>> attention(q, kv, kv, causal=True).shape
    torch.Size([2, 8, 128, 64])

    Args:
        q: [B, H, L, D], float32, bfloat16 or float16 (float64 through PyTorch).
        k: [B, Hkv, S, D]; H is a multiple of Hkv, and each key head serves H / Hkv query heads.
        v: [B, Hkv, S, Dv].
        mask: broadcastable to [B, H, L, S]; boolean (True = attend), or added to the scaled scores.
        causal: query i sees key j only where `j <= i + S - L`, so the last query sees every key.
        scale: of the scores; `D ** -0.5` by default.
        window: query i sees only the keys less than `window` positions from its own, i + S - L.
        softcap: scores become `softcap * tanh(score / softcap)`, before the mask.
        out: [B, H, L, Dv] in q's dtype to write into.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device, window or softcap.

    Source: Vaswani et al., 2017; Dao et al., "FlashAttention", 2022; Beltagy et al., 2020 (window);
    Gemma 2, 2024 (softcap).
    """
    how = numbers("attention", q, causal, scale, window, softcap)
    soon = not compiling() and (causal or not recording() or not _searched(q, mask, window))
    return (_CALL.fast.call if soon else _CALL.traced)(q, k, v, mask, *how, out)  # type: ignore[no-any-return]


def _searched(q: Any, mask: torch.Tensor | None, window: int | None) -> bool:
    """Whether the gradients of this call without causal rule are those that `_of_some_queries` may make."""
    return mask is None and window is None and isinstance(q, torch.Tensor) and q.numel() > _SEARCHED


def numbers(
    op: str, q: Any, causal: bool, scale: float | None, window: int | None, softcap: float | None
) -> tuple[float, bool, int, float]:
    """scale, causal, window and softcap as the kernels take them, with 0 for no window and no cap."""
    if not (window is None and softcap is None):
        check_limits(op, window, softcap)
    if scale is None:
        try:
            scale = default_scale(q) if compiling() else 1.0 / math.sqrt(direct.sizes(q)[-1] or 1)
        except (AttributeError, IndexError):  # the checks say why
            scale = 1.0
    return scale, causal, window or 0, softcap or 0.0


def _native(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel, without autograd."""
    how = numbers("attention", q, causal, scale, window, softcap)
    return _CALL.native("opsmith", (q, k, v, mask, *how), out)  # type: ignore[no-any-return]


def is_last_dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() or t.stride()[-1] == 1 or t.shape[-1] <= 1


def last_dense(t: torch.Tensor) -> torch.Tensor:
    """`t` with a contiguous last dimension."""
    return t if is_last_dense(t) else t.contiguous()


class Attend(Call):
    """Queries, keys and values of which only the rows are contiguous; gradients lie as they do.

    The forward keeps each softmax's maximum and sum, from which the backward makes the weights again. Not the logarithm
    of the sum: added to a mask of -3e38 it would vanish, and every weight feels its rounding.
    """

    def made(self, values: Sequence[Any]) -> list[tuple[Output, list[int], torch.dtype]]:
        q, v = values[0], values[2]
        return [(self.signature.results[0], [*q.shape[:-1], v.shape[-1]], q.dtype)]

    def writable(self, t: torch.Tensor) -> bool:
        return is_last_dense(t)

    def taken(self, of: Any, t: torch.Tensor | None) -> torch.Tensor | None:
        return t if t is None or t.dim() < 3 else last_dense(t)

    def taken_result(self, of: Any, t: torch.Tensor) -> torch.Tensor:
        return t

    def made_gradient(self, name: str, like: torch.Tensor, known: dict[str, Any]) -> torch.Tensor:
        return torch.empty_like(last_dense(like))


class _Attention(Attend):
    """With a mask that broadcasts, on the whole of it."""

    def check(self, values: Sequence[Any]) -> None:
        check(*values[:5])

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        q, k, _, mask, *_ = values
        by_mask = training and mask is not None and mask.requires_grad
        if super().backend(values, training) is None or by_mask:
            return None
        if training and small_node(q.numel() + k.numel()):
            return None
        return None if q.is_cuda and _is_sdpas(*values) else "opsmith"

    def native(self, backend: str, values: Sequence[Any], out: Any = None) -> Any:
        return super().native(backend, _whole(values), out)

    def recorded(self, backend: str, values: Sequence[Any]) -> Any:
        return super().recorded(backend, _whole(values))

    def gradients(
        self, backend: str, known: dict[str, Any], slopes: Sequence[torch.Tensor], wanted: set[str]
    ) -> dict[str, torch.Tensor]:
        how = known["scale"], known["causal"], known["window"], known["softcap"]
        q, k, v, y, row_sums = (known[name] for name in ("q", "k", "v", "y", "row_sums"))
        if known["mask"] is None and (some := _of_some_queries(slopes[0], q, k, v, y, row_sums, how)):
            return dict(zip("qkv", some, strict=True))
        return super().gradients(backend, known, slopes, wanted)

    def fresh(
        self, like: torch.Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Laid out as q is: heads inside, if q has them there, so that joining the heads is a view."""
        batch, heads, rows, dim = shape or like.shape
        if dim == like.shape[3]:
            y = torch.empty_like(
                like
            )  # keeps the order of the dimensions, and takes a third of the time of empty
            if is_last_dense(y):
                return y
        if like.stride(1) < like.stride(2):
            return torch.empty((batch, rows, heads, dim), dtype=like.dtype, device=like.device).transpose(
                1, 2
            )
        return torch.empty((batch, heads, rows, dim), dtype=like.dtype, device=like.device)


def _whole(values: Sequence[Any]) -> Sequence[Any]:
    """The mask in the shape of the scores."""
    q, k, v, mask, *how = values
    return q, k, v, None if mask is None else spread(mask, (*q.shape[:3], k.shape[2])), *how


def _is_sdpas(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> bool:
    """Whether PyTorch's own kernels do this."""
    options: dict[str, Any] = {"causal": causal, "window": window or None, "softcap": softcap or None}
    return sdpa_supports(q, k, v, mask=mask, **options) is True


def _definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> torch.Tensor:
    if (
        q.is_cuda
        and native(q, "attention") is True
        and _is_sdpas(q, k, v, mask, scale, causal, window, softcap)
    ):
        return sdpa(q, k, v, causal=causal, scale=scale)
    options: dict[str, Any] = {"window": window or None, "softcap": softcap or None}
    return eager(q, k, v, mask=mask, causal=causal, scale=scale, **options)


_CALL = _Attention(SIGNATURE, attention, _definition)


def _of_some_queries(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    y: torch.Tensor,
    row_sums: torch.Tensor,
    settings: tuple[float, bool, int, float],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The gradients where dy is zero for many tokens: the other queries, as packed sequences.

    None where there are not enough such tokens, where a query's position counts, or a layout is not [B, L, H, D].
    """
    _, causal, window, _ = settings
    if causal or window:
        return None
    (batch, heads, length, _), keys = q.shape, k.shape[2]
    tokens = [t.transpose(1, 2) for t in (dy, q, k, v, y, row_sums)]
    if any(t.stride(0) != t.shape[1] * t.stride(1) or t.stride(3) != 1 for t in tokens[:4]):
        return None
    if (
        tokens[0].stride(2) != dy.shape[3]
        or (rows := nonzero_rows(tokens[0].flatten(0, 1).flatten(1))) is None
    ):
        return None
    few_dy, few_q, few_y, few_sums = (tokens[i].flatten(0, 1).index_select(0, rows) for i in (0, 1, 4, 5))
    all_k, all_v = tokens[2].flatten(0, 1), tokens[3].flatten(0, 1)
    few_dq, dk, dv = (torch.empty(t.shape, dtype=q.dtype) for t in (few_q, all_k, all_v))
    torch.ops.opsmith.attention_varlen_backward.default(
        few_dy,
        few_q,
        all_k,
        all_v,
        few_y,
        few_sums,
        torch.searchsorted(rows, torch.arange(0, (batch + 1) * length, length)),
        torch.arange(0, (batch + 1) * keys, keys),
        *settings,
        dq=few_dq,
        dk=dk,
        dv=dv,
    )
    dq = among_zeros(few_dq.flatten(1), rows, batch * length)
    shapes = ((length, heads), (keys, k.shape[1]), (keys, k.shape[1]))
    dq, dk, dv = (t.view(batch, *n, -1).transpose(1, 2) for t, n in zip((dq, dk, dv), shapes, strict=True))
    return dq, dk, dv


_Q, _KV = ("B", "H", "L", "D"), ("B", "H", "S", "D")


def _written(how: str, fn: Callable[..., torch.Tensor]) -> Pattern:
    """One way to write attention: with a mask or without, its scores capped or not."""
    inputs: dict[str, Any] = {"q": _Q, "k": _KV, "v": _KV}
    if "mask" in how:
        inputs["mask"] = ("B", "H", "L", "S")
    numbers = {"twice": 0.7, "rate": 0.3} if "cap" in how else {"scale": 0.3}
    return Pattern(
        f"attention(q, k, v{how and ', '}{how})",
        fn,
        inputs | numbers,
        dtypes={"mask": "bool"} if "boolean" in how else {},
        recognition=Recognition(
            aligned=("q", "k", "v"),
            repeats=("k", "v"),
            multiplies={} if "cap" in how else {"q": "scale"},
            numbers=_OF_CAPPED if "cap" in how else {},
        ),
    )


def _masked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _capped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, twice: float, rate: float
) -> torch.Tensor:
    """With `c tanh(s / c)` as `2 c sigmoid(2 s / c)`: the constant between them changes no softmax."""
    s = twice * torch.sigmoid(rate * (q @ k.transpose(-1, -2)))
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    return torch.softmax(s, -1) @ v


_OF_CAPPED: dict[str, Callable[..., float]] = {
    "softcap": lambda twice: twice / 2,
    "scale": lambda twice, rate: twice * rate / 4,
}

_CPU, _TRITON = kernels(_native, lambda q, *a, **k: native(q, "attention"))

CARD = register(
    Operator(
        name="attention",
        kind=Kind.ATTENTION,
        function=attention,
        reference=reference,
        cost=cost,
        samples=samples,
        workloads=workloads,
        domain=promised,
        # On a GPU PyTorch's own kernels, written for each generation of them, come first where they do the same.
        implementations=[
            _CPU,
            Implementation("sdpa", sdpa, "cuda", sdpa_supports, has_gpu),
            _TRITON,
            Implementation("eager", eager),
        ],
        patterns=(
            _written("", lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale)),
            _written("additive mask", _masked),
            _written("boolean mask", _masked),
            # As many keys as queries: PyTorch aligns other shapes to the start, opsmith to the end.
            replace(
                _written(
                    "causal",
                    lambda q, k, v, scale: F.scaled_dot_product_attention(
                        q, k, v, is_causal=True, scale=scale
                    ),
                ),
                inputs={"q": _Q, "k": _Q, "v": _Q, "scale": 0.3},
                fixed={"causal": True},
            ),
            _written("soft cap", lambda q, k, v, twice, rate: _capped(q, k, v, None, twice, rate)),
            _written("soft cap, additive mask", _capped),
            _written("soft cap, boolean mask", _capped),
        ),
        entries=dict.fromkeys(("attention", "attention_backward"), entries.attention_entry),
        gradient=GradientCost(flops=2.5, bytes=2.0),  # the scores once more
        schemas=declare(SIGNATURE, "attention", "attention_backward"),
        source="Vaswani et al., 2017; Dao et al., 2022",
    )
)
