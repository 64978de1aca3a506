"""Scaled dot-product attention: bidirectional, causal, windowed, with masks and grouped heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import check_fit, check_mask, check_number
from opsmith.call.dispatch import compiling
from opsmith.call.layouts import dense_rows, is_dense
from opsmith.call.run import Call, declare
from opsmith.call.signature import (
    Dtype,
    Gradient,
    Input,
    Kept,
    Made,
    Number,
    Output,
    Rows,
    Saved,
    Signature,
    Sizes,
    Slope,
)
from opsmith.operator import GradientCost, Implementation, Kind, Pattern, Recognition
from opsmith.ops.attention.eager import default_scale, definition, eager, has_gpu, sdpa, sdpa_supports
from opsmith.ops.attention.samples import cost, entry_cost, promised, samples, workloads

INTEGERS = (torch.int32, torch.int64)  # that offsets, lengths and tables may be

SIGNATURE = Signature(
    "attention",
    (
        *(
            Input("q", "... D"),
            Input("k", "... D"),
            Input("v", "... Dv"),
            Input("mask", "... S", optional=True),
            Input("cu_seqlens_q", "B", torch.int32, optional=True),
            Input("cu_seqlens_k", "B", torch.int32, optional=True),
            Input("sinks", "H", Dtype.FIRST_OR_FLOAT32, optional=True),
            Input("alibi", "H", Dtype.FIRST_OR_FLOAT32, optional=True),
        ),
        *(Number("scale", float), Number("causal", bool), Number("window", int), Number("softcap", float)),
    ),
    (Output("y", "... Dv", like="q"),),
    kept=(Kept("row_sums", Rows.TWO_EACH),),
    gradient=Gradient(
        "attention_backward",
        (
            *(Slope("y", "dout"), Saved("q"), Saved("k"), Saved("v"), Saved("y", "out"), Saved("row_sums")),
            *(Saved("mask"), Saved("cu_seqlens_q"), Saved("cu_seqlens_k"), Saved("sinks"), Saved("alibi")),
            *(Saved("scale"), Saved("causal"), Saved("window"), Saved("softcap")),
        ),
        (*(Made(name, optional=False) for name in "qkv"), Made("sinks")),
    ),
    strided=True,
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Weigh the values by how well each key fits the query; no L x S matrix in memory.

    `y = softmax(scale * q @ k.T + mask) @ v`, by an online softmax over tiles. A query that may see no key
    gives zeros. With `sinks` each softmax has one term more, `exp(sink)`, without a value.

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
        sinks: [H], in q's dtype or float32: a logit for each query head, compared with its scaled scores. It takes its
            share of the weights and gives no value; -inf takes none.
        alibi: [H], in q's dtype or float32: slopes. The score of query i and key j becomes
            `score + alibi * (j - (i + S - L))`, after the softcap: 0 for the key at the query's own position, less
            for those before it. Slopes that want a gradient get it from plain PyTorch, with L x S in memory.
        out: [B, H, L, Dv] in q's dtype to write into.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device, window or softcap.

    Source: Vaswani et al., 2017; Dao et al., "FlashAttention", 2022; Beltagy et al., 2020 (window);
    Gemma 2, 2024 (softcap); Xiao et al., 2023, and gpt-oss, 2025 (sinks); Press et al., 2022 (ALiBi).
    """
    how = numbers("attention", q, causal, scale, window, softcap)
    call = _CALL.compiled if compiling() else _CALL.fast.call
    return call(q, k, v, mask, None, None, sinks, alibi, *how, out)  # type: ignore[no-any-return]


def check_heads(op: str, heads: int, kv_heads: int, of: str = "k and v") -> None:
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{op}: q's {heads} heads must be a multiple of the {kv_heads} heads of {of}")


def of_heads(sinks: Any, alibi: Any) -> list[tuple[Any, ...]]:
    """Those that are given, as `check_fit` has them: a number for each query head."""
    given = (("sinks", sinks), ("alibi", alibi))
    return [(name, t, "H", None, torch.float32) for name, t in given if t is not None]


def check_limits(op: str, window: Any, softcap: Any) -> None:
    """Refuse a window or a cap of scores that is none."""
    if window is not None:
        check_number(op, "window", window, whole=True)
    if softcap is not None:
        check_number(op, "softcap", softcap)
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be at least 1, got {window}; pass None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap must be positive, got {softcap}; pass None for no cap")


def numbers(
    op: str, q: Any, causal: bool, scale: float | None, window: int | None, softcap: float | None
) -> tuple[float, bool, int, float]:
    """scale, causal, window and softcap as the kernels take them, with 0 for no window and no cap."""
    if not (window is None and softcap is None):
        check_limits(op, window, softcap)
    if scale is None:
        try:
            scale = default_scale(q)
        except (AttributeError, IndexError):  # the checks say why
            scale = 1.0
    return scale, causal, window or 0, softcap or 0.0


# The same of what the function was given.
HOW: dict[str, Callable[..., Any]] = {
    "scale": lambda q, scale: default_scale(q) if scale is None else scale,
    "window": lambda window: window or 0,
    "softcap": lambda softcap: softcap or 0.0,
}


class Attend(Call):
    """Queries, keys and values of which only the rows are contiguous; gradients lie as they do.

    The forward keeps each softmax's maximum and sum, from which the backward makes the weights again. Not the logarithm
    of the sum: added to a mask of -3e38 it would vanish, and every weight feels its rounding.
    """

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        alibi = self.named(values)["alibi"]
        learned = training and alibi is not None and alibi.requires_grad
        return None if learned else super().backend(values, training)

    def made(self, values: Sequence[Any]) -> list[tuple[Output, list[int], torch.dtype]]:
        q, v = values[0], values[2]
        return [(self.signature.results[0], [*q.shape[:-1], v.shape[-1]], q.dtype)]

    def made_gradient(self, name: str, like: Tensor, known: dict[str, Any]) -> Tensor:
        return torch.empty_like(dense_rows(like))

    def fresh(
        self, like: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Laid out as q is: heads inside, if q has them there, so that joining the heads is a view."""
        shape = like.shape if shape is None else shape
        if shape[-1] == like.shape[-1]:
            # Keeps the order of the dimensions, and takes a third of the time of empty.
            y = torch.empty_like(like)
            if is_dense(y):
                return y
        if len(shape) == 4 and like.stride(1) < like.stride(2):
            batch, heads, rows, dim = shape
            inside = torch.empty((batch, rows, heads, dim), dtype=like.dtype, device=like.device)
            return inside.transpose(1, 2)
        return torch.empty(shape, dtype=like.dtype, device=like.device)


_SIZES = {"q": "B H L D", "k": "B H S D", "v": "B H S Dv", "mask": "B H L S", "y": "B H L Dv"}
_SIZES |= dict.fromkeys(("sinks", "alibi"), "H")


class _Attention(Attend):
    """Of dense tensors, with a mask or without."""

    def check(self, values: Sequence[Any]) -> None:
        q, k, v, mask, _, _, sinks, alibi, scale, *_ = values
        check_number("attention", "scale", scale)
        check_fit(
            "attention",
            *(("q", q, "B H L D"), ("k", k, "B Hkv S D"), ("v", v, "B Hkv S Dv")),
            *of_heads(sinks, alibi),
        )
        check_heads("attention", q.shape[1], k.shape[1])
        if mask is not None:
            check_mask("attention", mask, q, (*q.shape[:3], k.shape[2]), "[B, H, L, S]")

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        q, _, _, mask, *_ = values
        by_mask = training and mask is not None and mask.requires_grad
        if super().backend(values, training) is None or by_mask:
            return None
        return None if q.is_cuda and sdpa_supports(values) is True else "opsmith"

    def sizes(self, values: Sequence[Any]) -> Mapping[str, Sizes]:
        return {name: tuple(words.split()) for name, words in _SIZES.items()}

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        return "B", "H"


_CALL = _Attention(SIGNATURE, attention, definition, eager=eager, converted=HOW)


_Q, _KV = ("B", "H", "L", "D"), ("B", "H", "S", "D")


def _written(how: str, fn: Callable[..., Tensor]) -> Pattern:
    """One way to write attention: with a mask or without, its scores capped or not."""
    inputs: dict[str, Any] = {"q": _Q, "k": _KV, "v": _KV}
    if "mask" in how:
        inputs["mask"] = ("B", "H", "L", "S")
    if "sinks" in how:
        inputs["sinks"] = ("B", "H", "L", 1)
    numbers = {"twice": 0.7, "rate": 0.3} if "cap" in how else {"scale": 0.3}
    return Pattern(
        f"attention(q, k, v{how and ', '}{how})",
        fn,
        inputs | numbers,
        dtypes={"mask": "bool"} if "boolean" in how else {},
        recognition=Recognition(
            aligned=("q", "k", "v"),
            repeats=("k", "v"),
            rows={"q": "mask"},
            masks={"mask": "causal"},
            vectors={"sinks": -3} if "sinks" in how else {},
            multiplies={} if "cap" in how else {"q": "scale"},
            numbers=_OF_CAPPED if "cap" in how else {},
        ),
    )


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, twice: float, rate: float) -> Tensor:
    """With `c tanh(s / c)` as `2 c sigmoid(2 s / c)`: the constant between them changes no softmax."""
    s = twice * torch.sigmoid(rate * (q @ k.transpose(-1, -2)))
    return torch.softmax(_hidden(s, mask), -1) @ v


def _sunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    """The sinks as a column of the scores, which the weights lose again."""
    s = _hidden(scale * (q @ k.transpose(-1, -2)), mask)
    return torch.softmax(torch.cat((s, sinks), -1), -1)[..., :-1] @ v


def _hidden(s: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return s
    return s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask


_OF_CAPPED: dict[str, Callable[..., float]] = {
    "softcap": lambda twice: twice / 2,
    "scale": lambda twice, rate: twice * rate / 4,
}

_NATIVE, _TRITON, _EAGER = _CALL.implementations()
_SDPA = Implementation("sdpa", _CALL.form(sdpa), "cuda", _CALL.form(sdpa_supports), has_gpu)

CARD = _CALL.card(
    kind=Kind.ATTENTION,
    cost=cost,
    samples=samples,
    workloads=workloads,
    domain=promised,
    # On a GPU PyTorch's own kernels, written for each generation of them, come first where they do the same.
    implementations=[_NATIVE, _SDPA, _TRITON, _EAGER],
    patterns=(
        _written("", lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale)),
        _written("additive mask", _masked),
        _written("boolean mask", _masked),
        # As many keys as queries: PyTorch aligns other shapes to the start, opsmith to the end.
        replace(
            _written(
                "causal",
                lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale),
            ),
            inputs={"q": _Q, "k": _Q, "v": _Q, "scale": 0.3},
            fixed={"causal": True},
        ),
        _written("soft cap", lambda q, k, v, twice, rate: _capped(q, k, v, None, twice, rate)),
        _written("soft cap, additive mask", _capped),
        _written("soft cap, boolean mask", _capped),
        _written("sinks", lambda q, k, v, sinks, scale: _sunk(q, k, v, None, sinks, scale)),
        _written("additive mask, sinks", _sunk),
        _written("boolean mask, sinks", _sunk),
    ),
    entries=dict.fromkeys(("attention", "attention_backward"), entry_cost),
    gradient=GradientCost(flops=2.5, bytes=2.0),  # the scores once more
    schemas=declare(SIGNATURE, "attention", "attention_backward"),
    source="Vaswani et al., 2017; Dao et al., 2022",
)
