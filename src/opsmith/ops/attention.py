"""Scaled dot-product attention: bidirectional, causal, windowed, with masks and grouped heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Pattern, Sample, register
from opsmith.ops.common import (
    alike,
    check_float,
    check_mask,
    check_out,
    kernels,
    native,
    nbytes,
    needs_grad,
    recorded,
    short,
    small,
    spread,
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
    _check(q, k, v, mask, window, softcap, out)
    wants_grad = needs_grad(q, k, v, mask)
    if (
        small(q.numel() + k.numel())
        or native(q, "attention") is not True
        or (wants_grad and mask is not None and mask.requires_grad)
    ):
        y = eager(q, k, v, mask=mask, causal=causal, scale=scale, window=window, softcap=softcap)
    elif (
        q.is_cuda
        and _sdpa_supports(q, k, v, mask=mask, causal=causal, window=window, softcap=softcap) is True
    ):
        y = _sdpa(q, k, v, causal=causal, scale=scale)
    elif wants_grad:
        y = recorded(_Attention, q, k, v, mask, *settings(q, causal, scale, window, softcap))
    else:
        return _native(
            q, k, v, mask=mask, causal=causal, scale=scale, window=window, softcap=softcap, out=out
        )
    return y if out is None else out.copy_(y)


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    groups = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = (q @ k.mT) * (_default_scale(q) if scale is None else scale)  # [B, H, L, S]
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    seen = _visible(q, k, causal, window)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    # A query that sees nothing is set to zeros before and after, so that no NaN reaches the gradient either.
    dead = (s == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return p.to(v.dtype) @ v


def _visible(q: torch.Tensor, k: torch.Tensor, causal: bool, window: int | None) -> torch.Tensor | None:
    """[L, S], True where causal rule and window let a query see a key; None when neither is asked for."""
    rows, columns = q.shape[-2], k.shape[-2]
    if not causal and window is None:
        return None
    seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(columns - rows)
    if window is not None:
        seen = seen.triu(columns - rows - window + 1)
        seen = seen if causal else seen.tril(columns - rows + window - 1)
    return seen


def _default_scale(q: torch.Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1] or 1)


def settings(
    q: torch.Tensor, causal: bool, scale: float | None, window: int | None, softcap: float | None
) -> tuple[float, bool, int, float]:
    """scale, causal, window and softcap as the kernels take them, with 0 for none."""
    return _default_scale(q) if scale is None else scale, causal, window or 0, softcap or 0.0


def _check(q: Any, k: Any, v: Any, mask: Any, window: Any, softcap: Any, out: Any) -> None:
    if mask is None and window is None and softcap is None and out is None and _fits(q, k, v):
        return  # the usual call, found out in a third of the time
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_float("attention", t, name, least_dim=4)
        if t.dim() != 4:
            raise ValueError(
                f"attention: {name} must have 4 dimensions [B, heads, length, D], got {tuple(t.shape)}"
            )
    check_alike("attention", q, k, v)
    batch, heads, rows, dim = q.shape
    kv_heads, columns = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(
            f"attention: k must have shape [{batch}, Hkv, S, {dim}] to fit q, got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"attention: v must have shape [{batch}, {kv_heads}, {columns}, Dv] like k, got {tuple(v.shape)}"
        )
    check_options("attention", heads, kv_heads, window, softcap)
    if mask is not None:
        check_mask("attention", mask, q, (batch, heads, rows, columns), "[B, H, L, S]")
    if out is not None:
        check_out("attention", out, q, (batch, heads, rows, v.shape[3]))


def _fits(q: Any, k: Any, v: Any) -> bool:
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    shape, keys, values, dtype = q.shape, k.shape, v.shape, q.dtype
    return (
        len(shape) == len(keys) == len(values) == 4
        and (keys == values or keys[:3] == values[:3])
        and shape[0] == keys[0]
        and shape[3] == keys[3]
        and (shape[1] == keys[1] or (keys[1] > 0 and shape[1] % keys[1] == 0))
        and dtype.is_floating_point
        and k.dtype is dtype
        and v.dtype is dtype
        and q.device == k.device == v.device
    )


def check_alike(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse keys and values in another dtype or on another device than the queries."""
    if alike(k, q, k.shape) and alike(v, q, v.shape):
        return
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(
                f"{op}: {name} must be {short(q.dtype)} like q, got {short(t.dtype)}; cast it first"
            )
        if t.device != q.device:
            raise ValueError(f"{op}: {name} is on {t.device}, q on {q.device}; move one of them")


def check_options(op: str, heads: int, kv_heads: int, window: Any, softcap: Any) -> None:
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{op}: q's {heads} heads must be a multiple of the {kv_heads} heads of k and v")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be at least 1, got {window}; pass None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap must be positive, got {softcap}; pass None for no cap")


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """PyTorch's fused attention where it can express the call, else the definition."""
    if mask is None and softcap is None and window is None and not causal and q.shape[1] == k.shape[1]:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)  # each argument more takes time to parse
    if softcap is not None:
        return reference(q, k, v, mask=mask, causal=causal, scale=scale, window=window, softcap=softcap)
    plain_causal = causal and window is None and mask is None and q.shape[2] == k.shape[2]
    seen = None if plain_causal else _visible(q, k, causal, window)
    if mask is None or seen is None:
        both = seen if mask is None else mask
    else:
        both = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=both, is_causal=plain_causal, scale=scale, enable_gqa=grouped
    )


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> torch.Tensor:
    """PyTorch's fused attention on a GPU, for the calls that `_sdpa_supports`."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal and q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _sdpa_supports(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> bool | str:
    """True where PyTorch's flash, cuDNN or memory-efficient kernel computes this very call on a GPU."""
    if mask is not None:
        return "PyTorch does not promise zeros for a row that a mask hides wholly"
    if window is not None or softcap is not None:
        return "PyTorch's fused kernels know neither window nor softcap"
    if causal and q.shape[2] not in (1, k.shape[2]):
        return "PyTorch aligns the causal rule to the first key, opsmith to the last"
    grouped = q.shape[1] != k.shape[1]
    if torch.compiler.is_dynamo_compiling():  # which cannot ask PyTorch's kernels: what flash attention takes
        flash = q.dtype != torch.float32 and q.shape[3] == v.shape[3] and q.shape[3] <= 256
        return flash or "a compiled graph takes PyTorch's kernel for 16 bits and heads up to 256 only"
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal and q.shape[2] > 1, grouped)
    fused = (
        torch.backends.cuda.can_use_flash_attention(asked)
        or torch.backends.cuda.can_use_cudnn_attention(asked)
        or torch.backends.cuda.can_use_efficient_attention(asked)
    )
    return (
        fused
        or "none of PyTorch's fused kernels takes this call, and the unfused one builds the L x S matrix"
    )


def _has_gpu() -> bool | str:
    return torch.cuda.is_available() or "there is no GPU here"


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
    y = out if out is not None and is_last_dense(out) else _like_q(q, v)
    torch.ops.opsmith.attention.default(
        last_dense(q),
        last_dense(k),
        last_dense(v),
        _full(mask, q, k),
        *settings(q, causal, scale, window, softcap),
        y=y,
    )
    return y if out is None or out is y else out.copy_(y)


def is_last_dense(t: torch.Tensor) -> bool:
    return t.is_contiguous() or t.stride()[-1] == 1 or t.shape[-1] <= 1


def last_dense(t: torch.Tensor) -> torch.Tensor:
    """`t` with a contiguous last dimension."""
    return t if is_last_dense(t) else t.contiguous()


def _full(mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    return None if mask is None else spread(mask, (*q.shape[:3], k.shape[2]))


def _like_q(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """An output laid out as q is: heads inside, if q has them there, so that joining the heads is a view."""
    if q.is_contiguous() and v.shape[3] == q.shape[3]:
        return torch.empty_like(q)
    batch, heads, rows, dim = q.shape
    if v.shape[3] == dim:
        y = torch.empty_like(q)  # keeps the order of the dimensions, and takes a third of the time of empty
        if is_last_dense(y):
            return y
    if q.stride(1) < q.stride(2):
        return torch.empty((batch, rows, heads, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)
    return torch.empty((batch, heads, rows, v.shape[3]), dtype=q.dtype, device=q.device)


class _Attention(torch.autograd.Function):
    """Forward keeps each softmax's maximum and sum; backward makes the weights again from them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        causal: bool,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        y = _like_q(q, v)
        # Not the logarithm of the sum: added to a mask of -3e38 it would vanish, and every weight feels its rounding.
        row_sums = torch.empty((*q.shape[:3], 2), dtype=torch.float32, device=q.device)
        ctx.settings = (scale, causal, window, softcap)
        torch.ops.opsmith.attention.default(
            last_dense(q),
            last_dense(k),
            last_dense(v),
            _full(mask, q, k),
            *ctx.settings,
            y=y,
            row_sums=row_sums,
        )
        ctx.save_for_backward(q, k, v, mask, y, row_sums)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, y, row_sums = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(last_dense(t)) for t in (q, k, v))
        torch.ops.opsmith.attention_backward.default(
            last_dense(dy),
            last_dense(q),
            last_dense(k),
            last_dense(v),
            y,
            row_sums,
            _full(mask, q, k),
            *ctx.settings,
            dq=dq,
            dk=dk,
            dv=dv,
        )
        wanted = ctx.needs_input_grad
        grads = (g if want else None for g, want in zip((dq, dk, dv), wanted, strict=False))
        return (*grads, None, None, None, None, None)


def visible_pairs(rows: int, columns: int, causal: bool, window: int | None) -> int:
    """How many (query, key) pairs are visible, exactly, for any L and S."""

    def ramp(m: int) -> int:  # the sum over n <= m of n held to [0, columns]
        return (
            0
            if m <= 0
            else m * (m + 1) // 2
            if m <= columns
            else columns * (columns + 1) // 2 + (m - columns) * columns
        )

    def keys_before(first: int) -> int:  # the keys before position first + i, summed over the queries i
        return ramp(first + rows - 1) - ramp(first - 1)

    here = columns - rows  # the first query's own position
    if window is None:
        return keys_before(here + 1) if causal else rows * columns
    return keys_before(here + (1 if causal else window)) - keys_before(here - window + 1)


def _cost(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Cost:
    batch, heads, rows, dim = q.shape
    pairs = batch * heads * visible_pairs(rows, k.shape[2], causal, window)
    result = batch * heads * rows * v.shape[3] * q.element_size()
    return Cost(2.0 * pairs * (dim + v.shape[3]), nbytes(q, k, v, mask) + result)


def promised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> bool:
    """What a mask hides is not looked at, while in the reference its NaN or infinity shows through the mask."""
    hides = options.get("causal") or any(options.get(name) is not None for name in ("mask", "window"))
    return not hides or all(bool(t.isfinite().all()) for t in (k, v))


def _samples(make: Make) -> Iterator[Sample]:
    def qkv(
        b: int, h: int, hkv: int, l: int, s: int, d: int, dv: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        return make(b, h, l, d), make(b, hkv, s, d), make(b, hkv, s, dv or d)

    sizes = ((1, 1, 1, 1, 1), (2, 2, 1, 77, 64), (2, 2, 17, 17, 32), (2, 2, 130, 67, 40), (3, 2, 9, 20, 32))
    for b, h, l, s, d in sizes:
        yield Sample(f"{b}x{h}x{l}x{s}x{d}", qkv(b, h, h, l, s, d))
        yield Sample(f"{b}x{h}x{l}x{s}x{d} causal", qkv(b, h, h, l, s, d), {"causal": True})
    yield Sample("grouped heads", qkv(1, 4, 2, 33, 33, 64), {"causal": True})
    yield Sample("one key head", qkv(1, 4, 1, 9, 40, 16))
    yield Sample("wider values", qkv(1, 2, 2, 33, 20, 24, 56))
    yield Sample("scale", qkv(1, 2, 2, 12, 12, 16), {"scale": 0.7})
    x = qkv(2, 2, 1, 33, 50, 32)
    yield Sample("padding mask", x, {"mask": make.mask(2, 1, 1, 50)})
    yield Sample("boolean mask", x, {"mask": make.mask(2, 2, 33, 50)})
    yield Sample("additive mask", x, {"mask": make(1, 1, 33, 50)})
    yield Sample(
        "ALiBi",
        x,
        {"mask": make(2, 1, 1) * torch.arange(50, dtype=make.dtype).to(make.device) / 8, "causal": True},
    )
    learned = tuple(make(1, 2, 20, 16).requires_grad_() for _ in range(3))
    yield Sample("additive mask, not learned", learned, {"mask": make(20, 20)})
    yield Sample("all masked", qkv(1, 2, 2, 5, 70, 16), {"mask": make.mask(1, 1, 5, 70, keep=0.0)})
    yield Sample("mask and causal", x, {"mask": make.mask(2, 1, 33, 50), "causal": True})
    yield Sample("window", qkv(1, 2, 2, 70, 70, 16), {"window": 9})
    yield Sample("causal window", qkv(1, 2, 1, 70, 90, 16), {"window": 9, "causal": True})
    yield Sample("softcap", qkv(1, 2, 2, 20, 20, 32), {"softcap": 2.0, "causal": True})
    yield Sample("softcap and mask", x, {"softcap": 5.0, "mask": make.mask(2, 1, 33, 50)})
    yield Sample("sharp", (make(1, 2, 33, 64, scale=8.0), make(1, 2, 80, 64, scale=4.0), make(1, 2, 80, 64)))
    yield Sample(
        "heads inside", tuple(make(2, 19, 3, 32).transpose(1, 2) for _ in range(3)), {"causal": True}
    )
    packed = make(2, 19, 3, 4, 16)
    yield Sample("packed qkv", tuple(packed[:, :, i].transpose(1, 2) for i in range(3)))
    yield Sample("strided", tuple(make(1, 2, 16, 9).mT for _ in range(3)))
    yield Sample("no queries", qkv(1, 2, 2, 0, 7, 16))
    yield Sample("no keys", qkv(1, 2, 2, 5, 0, 16))


def _workloads(make: Make) -> Iterator[Sample]:
    def qkv(b: int, h: int, hkv: int, l: int, s: int, d: int) -> tuple[torch.Tensor, ...]:
        return make(b, h, l, d), make(b, hkv, s, d), make(b, hkv, s, d)

    yield Sample("1x12x2048x64", qkv(1, 12, 12, 2048, 2048, 64))
    yield Sample("1x12x2048x64 causal", qkv(1, 12, 12, 2048, 2048, 64), {"causal": True})
    yield Sample(
        "32x12x128x32 padding mask",
        qkv(32, 12, 12, 128, 128, 32),
        {"mask": make.mask(32, 1, 1, 128, keep=0.9)},
    )
    yield Sample("1x32/8x1x2048x128 decode", qkv(1, 32, 8, 1, 2048, 128))


_Q, _KV = ("B", "H", "L", "D"), ("B", "H", "S", "D")

_CPU, _TRITON = kernels(_native, lambda q, *a, **k: native(q, "attention"))

CARD = register(
    Operator(
        name="attention",
        kind=Kind.ATTENTION,
        function=attention,
        reference=reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        domain=promised,
        # On a GPU PyTorch's own kernels, written for each generation of them, come first where they do the same.
        implementations=[
            _CPU,
            Implementation("sdpa", _sdpa, "cuda", _sdpa_supports, _has_gpu),
            _TRITON,
            Implementation("eager", eager),
        ],
        patterns=(
            Pattern(
                "attention(q, k, v)",
                lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, scale=scale),
                {"q": _Q, "k": _KV, "v": _KV, "scale": 0.3},
                aligned=("q", "k", "v"),
                repeats=("k", "v"),
            ),
            Pattern(
                "attention(q, k, v, additive mask)",
                lambda q, k, v, mask, scale: F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scale
                ),
                {"q": _Q, "k": _KV, "v": _KV, "mask": ("B", "H", "L", "S"), "scale": 0.3},
                aligned=("q", "k", "v"),
                repeats=("k", "v"),
            ),
            Pattern(
                "attention(q, k, v, boolean mask)",
                lambda q, k, v, mask, scale: F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=scale
                ),
                {"q": _Q, "k": _KV, "v": _KV, "mask": ("B", "H", "L", "S"), "scale": 0.3},
                dtypes={"mask": "bool"},
                aligned=("q", "k", "v"),
                repeats=("k", "v"),
            ),
            Pattern(
                # As many keys as queries: PyTorch aligns other shapes to the start, opsmith to the end.
                "attention(q, k, v, causal)",
                lambda q, k, v, scale: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale),
                {"q": _Q, "k": _Q, "v": _Q, "scale": 0.3},
                fixed={"causal": True},
                aligned=("q", "k", "v"),
                repeats=("k", "v"),
            ),
        ),
        schemas=(
            "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool causal, int window, "
            "float softcap, *, Tensor(a!) y, Tensor(b!)? row_sums=None) -> ()",
            "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor row_sums, "
            "Tensor? mask, float scale, bool causal, int window, float softcap, *, "
            "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv) -> ()",
        ),
        source="Vaswani et al., 2017; Dao et al., 2022",
    )
)
