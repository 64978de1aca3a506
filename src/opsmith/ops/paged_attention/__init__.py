"""Attention of a few new tokens a sequence on keys and values that lie in the blocks of a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import Maybe, check_fit, check_number
from opsmith.call.dispatch import compiling
from opsmith.call.layouts import dense_rows
from opsmith.call.run import declare
from opsmith.call.signature import Dtype, Input, Number, Output, Signature
from opsmith.implementation import Supports
from opsmith.operator import Kind
from opsmith.ops.attention import HOW, INTEGERS, Attend, check_heads, check_limits, of_heads
from opsmith.ops.attention.eager import biased, default_scale, definition, eager
from opsmith.ops.paged_attention.samples import cost, promised, samples, step_cost, workloads
from opsmith.ops.pages import caches, check_pages

_OP = "paged_attention"

SIGNATURE = Signature(
    "paged_attention",
    (
        *(Input("q", "... D"), Input("k_cache", "... D"), Input("v_cache", "... Dv")),
        *(Input("block_tables", "B T", torch.int32), Input("seq_lens", "B", torch.int32)),
        *(Input("k_scale", "... H", torch.float32, True), Input("v_scale", "... H", torch.float32, True)),
        *(Input(name, "H", Dtype.FIRST_OR_FLOAT32, True) for name in ("sinks", "alibi")),
        *(Number("scale", float, optional=True), Number("window", int), Number("softcap", float)),
    ),
    (Output("y", "... Dv"),),
    strided=True,
)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from the last token of each sequence, or its last few, to all keys that a cache in blocks holds of it.

    `y = softmax(scale * q @ k.T) @ v`, key j of a sequence being row `j % block_size` of the block
    `block_tables[b, j // block_size]`. Each key and value is read once, for all the query heads that share it.

    >>> k_cache, v_cache = torch.randn(2, 10, 16, 2, 64)         # 10 blocks of 16 tokens, 2 key heads
    >>> tables = torch.tensor([[3, 0, 7], [5, 9, 9]], dtype=torch.int32)
    >>> paged_attention(torch.randn(2, 8, 64), k_cache, v_cache, tables, torch.tensor([40, 5])).shape
    torch.Size([2, 8, 64])

    Args:
        q: [B, H, D], or [B, L, H, D] for the last L tokens of each sequence, causal among themselves; float32,
            bfloat16 or float16 (float64 through PyTorch).
        k_cache: [blocks, block_size, Hkv, D] in q's dtype, or int8; H is a multiple of Hkv. May be a slice of a pool.
        v_cache: [blocks, block_size, Hkv, Dv], as k_cache.
        block_tables: [B, most blocks], int32 or int64. Entries that no query sees are not looked at.
        seq_lens: [B], int32 or int64: keys of each sequence, those of q's own tokens included; 0 gives zeros.
        scale: of the scores; `D ** -0.5` by default.
        window: a query sees only the keys less than `window` positions before its own.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [H], in q's dtype or float32: a logit for each query head, compared with its scaled scores. It takes its
            share of the weights and gives no value.
        alibi: [H], in q's dtype or float32: slopes. The score of a query at position i of its sequence and of key j
            becomes `score + alibi * (j - i)`, after the softcap.
        k_scale, v_scale: [blocks, block_size, Hkv] float32, of int8 caches: what their rows are multiplied by.
        out: [B, H, Dv] or [B, L, H, Dv] in q's dtype to write into.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device, window or softcap, for a length that the tables cannot
            hold, and for a block that is not there. On a GPU the values of tables and lengths are not looked at, which
            would wait for the device; nothing is read out of bounds.

    Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023; Dao et al.,
    "Flash-Decoding", 2023; Xiao et al., 2023, and gpt-oss, 2025 (sinks); Press et al., 2022 (ALiBi).
    """
    if not (window is None and softcap is None):
        check_limits(_OP, window, softcap)
    how = k_scale, v_scale, sinks, alibi, scale, window or 0, softcap or 0.0
    call = _CALL.compiled if compiling() else _CALL.fast.call
    return call(q, k_cache, v_cache, block_tables, seq_lens, *how, out)  # type: ignore[no-any-return]


def _padded(
    attend: Callable[..., Tensor],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: Maybe,
    v_scale: Maybe,
    sinks: Maybe,
    alibi: Maybe,
    scale: float | None,
    window: int,
    softcap: float,
) -> Tensor:
    """Attention on the blocks gathered to padded keys and values, under a mask: what PyTorch offers."""
    new = q.unsqueeze(1) if q.dim() == 3 else q  # [B, L, H, D]
    here = seq_lens.long()[:, None] - new.shape[1] + torch.arange(new.shape[1], device=q.device)  # [B, L]
    keys = torch.arange(block_tables.shape[1] * k_cache.shape[1], device=q.device)
    distances = keys - here[:, :, None]  # [B, L, S]: how far behind a query's position a key stands
    seen = distances <= 0
    if window:
        seen &= distances > -window
    k, v = _gathered(q.dtype, k_cache, v_cache, block_tables, k_scale, v_scale, seen)  # [B, S, Hkv, D]
    new, k, v = (t.transpose(1, 2) for t in (new, k, v))
    scale = default_scale(q) if scale is None else scale
    mask = seen[:, None]
    if alibi is not None:  # positions are those in each sequence, which may end before the padding does
        mask = biased(mask, alibi, distances[:, None])
    y = attend(new, k, v, mask, None, None, sinks, None, scale, False, 0, softcap).transpose(1, 2)
    y = y.masked_fill(~seen.any(-1)[:, :, None, None], 0.0).contiguous()
    return y.squeeze(1) if q.dim() == 3 else y


def _gathered(
    dtype: torch.dtype,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    k_scale: Maybe,
    v_scale: Maybe,
    seen: Tensor,
) -> tuple[Tensor, Tensor]:
    """Keys and values [B, S, Hkv, D] in q's dtype, zeros where nobody sees them."""
    used = seen.any(1)  # [B, S]
    size = k_cache.shape[1]
    blocks = block_tables.long()
    if size:
        entry = used.unflatten(1, (-1, size)).any(-1) if used.shape[1] else used
        blocks = blocks.where(entry, 0)
    found = []
    for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
        rows = cache[blocks] if cache.shape[0] else cache.new_zeros((*blocks.shape, *cache.shape[1:]))
        if scale is not None:
            factors = scale[blocks] if scale.shape[0] else scale.new_zeros(rows.shape[:-1])
            rows = (rows.to(scale.dtype) * factors.unsqueeze(-1)).to(dtype)
        found.append(rows.flatten(1, 2).masked_fill(~used[:, :, None, None], 0))
    return found[0], found[1]


class _Paged(Attend):
    """On caches; a gradient passes through none."""

    def check(self, values: Sequence[Any]) -> None:
        q, k_cache, v_cache, block_tables, seq_lens, k_scale, v_scale, sinks, alibi, scale, window, _ = values
        check_fit(
            _OP,
            ("q", q, "B H D" if getattr(q, "ndim", 4) == 3 else "B L H D"),
            *caches(_OP, k_cache, v_cache, k_scale, v_scale),
            ("block_tables", block_tables, "B blocks_each", *INTEGERS),
            ("seq_lens", seq_lens, "B", *INTEGERS),
            *of_heads(sinks, alibi),
        )
        check_heads(_OP, q.shape[-2], k_cache.shape[2], "the caches")
        if scale is not None:
            check_number(_OP, "scale", scale)
        if not (q.is_cuda or compiling()):
            (blocks, size), queries = k_cache.shape[:2], q.shape[1] if q.dim() == 4 else 1
            seen = queries + window - 1 if window else None
            check_pages(_OP, block_tables, seq_lens, blocks, size, seen)

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        k_scale = values[5]
        if k_scale is not None and k_scale.dtype == torch.float64:
            return "the kernels take scales in float32"
        return super().supported(values, *more)

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        return dense_rows(t) if t is not None and of.name in ("q", "k_cache", "v_cache") else t


_CALL = _Paged(
    SIGNATURE,
    paged_attention,
    partial(_padded, definition),
    eager=partial(_padded, eager),
    converted={"window": HOW["window"], "softcap": HOW["softcap"]},
)

CARD = _CALL.card(
    kind=Kind.ATTENTION,
    cost=cost,
    samples=samples,
    workloads=workloads,
    domain=promised,
    # Models do not write this as plain PyTorch: whoever has a cache in blocks calls it by name.
    patterns=(),
    entries={"paged_attention": cost, "paged_step": step_cost},
    # The latter is a layer's step of decoding: new rows [B, Hkv, L, D] into the cache, then attention on all there.
    schemas=(
        *declare(SIGNATURE),
        "paged_step(Tensor q, Tensor k, Tensor v, Tensor slot_mapping, Tensor block_tables, Tensor seq_lens, "
        "Tensor? sinks, float scale, int window, float softcap, *, Tensor(y!) y, Tensor(a!) k_cache, "
        "Tensor(b!) v_cache, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()",
    ),
    differentiable=False,
    source="Kwon et al., 2023; Dao et al., 2023",
)
