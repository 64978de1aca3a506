"""Attention over sequences that lie packed one after the other, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from opsmith.call.arguments import check_fit, check_number
from opsmith.call.dispatch import compiling
from opsmith.operator import Cost, GradientCost, Kind, Make, Sample
from opsmith.ops.attention import HOW, INTEGERS, SIGNATURE, Attend, check_heads, numbers, of_heads
from opsmith.ops.attention.eager import definition, eager
from opsmith.ops.attention.samples import cost_of, promised, visible_pairs

_OP = "attention_varlen"
Lengths = tuple[int, ...]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend within each of several sequences packed into one tensor; no padding, no L x S matrix in memory.

    `y[q0:q1] = softmax(scale * q[q0:q1] @ k[k0:k1].T) @ v[k0:k1]` for every sequence, whose tokens are q0 to q1
    and k0 to k1. A query that may see no key gives zeros.

    >>> q, kv = torch.randn(100, 8, 64), torch.randn(100, 2, 64)  # three sequences of 60, 0 and 40 tokens
    >>> starts = torch.tensor([0, 60, 60, 100])
    >>> attention_varlen(q, kv, kv, starts, starts, causal=True).shape
    torch.Size([100, 8, 64])

    Args:
        q: [T, H, D], float32, bfloat16 or float16 (float64 through PyTorch).
        k: [S, Hkv, D]; H is a multiple of Hkv, and each key head serves H / Hkv query heads.
        v: [S, Hkv, Dv].
        cu_seqlens_q: [sequences + 1], int32 or int64: where each sequence's queries begin, from 0, and last T.
        cu_seqlens_k: the same for keys and values, last S.
        causal: query i of a sequence of l queries and s keys sees its key j only where `j <= i + s - l`.
        scale: of the scores; `D ** -0.5` by default.
        window: a query sees only the keys less than `window` positions from its own, i + s - l.
        softcap: scores become `softcap * tanh(score / softcap)`.
        sinks: [H], in q's dtype or float32: a logit for each query head that takes its share of the weights and gives
            no value, as in `attention`.
        alibi: [H], in q's dtype or float32: slopes, by which a score grows with `j - (i + s - l)`. Slopes that want
            a gradient get it from plain PyTorch, one sequence after the other.
        out: [T, H, Dv] in q's dtype to write into.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device, window or softcap, and for offsets that do not
            start at 0, decrease, or end elsewhere than at T and S. On a GPU the offsets' values are not looked
            at, which would wait for the device; what they name outside the tensors is not read there.

    Source: Dao et al., "FlashAttention", 2022 (the packed layout is that of its varlen interface).
    """
    how = numbers(_OP, q, causal, scale, window, softcap)
    call = _CALL.compiled if compiling() else _CALL.fast.call
    given = q, k, v, None, cu_seqlens_q, cu_seqlens_k, sinks, alibi
    return call(*given, *how, out)  # type: ignore[no-any-return]


class _Varlen(Attend):
    """Of sequences that lie packed one after the other."""

    def check(self, values: Sequence[Any]) -> None:
        q, k, v, _, at, keys_at, sinks, alibi, scale, *_ = values
        check_fit(
            _OP,
            *(("q", q, "T H D"), ("k", k, "S Hkv D"), ("v", v, "S Hkv Dv")),
            ("cu_seqlens_q", at, "sequences+1", *INTEGERS),
            ("cu_seqlens_k", keys_at, "sequences+1", *INTEGERS),
            *of_heads(sinks, alibi),
        )
        check_heads(_OP, q.shape[1], k.shape[1])
        _check_starts("cu_seqlens_q", at, q.shape[0])
        _check_starts("cu_seqlens_k", keys_at, k.shape[0])
        check_number(_OP, "scale", scale)


def _each(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: None,
    at: Tensor,
    keys_at: Tensor,
    *how: Any,
) -> Tensor:
    """Attention, sequence by sequence."""
    if q.is_meta:
        return q.new_empty((*q.shape[:2], v.shape[2]))
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))  # [1, H, T, D]
    spans = [*zip(pairwise(at.tolist()), pairwise(keys_at.tolist()), strict=True)] or [((0, 0), (0, 0))]
    parts = [
        attend(q[:, :, q0:q1], k[:, :, k0:k1], v[:, :, k0:k1], None, None, None, *how)
        for (q0, q1), (k0, k1) in spans
    ]
    return torch.cat(parts, 2)[0].transpose(0, 1)


_CALL = _Varlen(
    SIGNATURE, attention_varlen, partial(_each, definition), eager=partial(_each, eager), converted=HOW
)


def _check_starts(name: str, starts: Tensor, length: int) -> None:
    # In a compiled graph there are no values yet: the kernel looks at them.
    if torch.compiler.is_compiling() or not starts.is_cpu or type(starts) is not Tensor:
        return
    values = starts.tolist()
    if values[0] != 0:
        raise ValueError(f"{_OP}: {name} must start at 0, got {values[0]}")
    if values[-1] != length:
        raise ValueError(f"{_OP}: {name} must end at {length}, the tokens there are, got {values[-1]}")
    if sorted(values) != values:
        first = next(i for i, (a, b) in enumerate(pairwise(values)) if a > b)
        raise ValueError(
            f"{_OP}: {name} must not decrease, got {values[first]} before {values[first + 1]} "
            f"at position {first}"
        )


def _cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    **options: Any,
) -> Cost:
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    pairs = sum(visible_pairs(q1 - q0, k1 - k0, causal, window) for (q0, q1), (k0, k1) in spans)
    more = cu_seqlens_q, cu_seqlens_k, options.get("sinks"), options.get("alibi")
    return cost_of(q.shape[1] * pairs, q, k, v, *more)


def _starts(lengths: Lengths, device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    # Costs are also counted where tensors are fake, without values: the offsets keep theirs.
    with _disable_current_modes():
        ends = torch.tensor((0, *lengths), dtype=dtype).cumsum(0)
        return ends.to(device=device, dtype=dtype)


def _packed(
    make: Make, queries: Lengths, keys: Lengths, h: int, hkv: int, d: int, dv: int | None = None
) -> tuple[Tensor, ...]:
    t, s = sum(queries), sum(keys)
    starts = _starts(queries, make.device), _starts(keys, make.device, torch.int64)
    return (make(t, h, d), make(s, hkv, d), make(s, hkv, dv or d), *starts)


def _samples(make: Make) -> Iterator[Sample]:
    packed = partial(_packed, make)
    for lengths, h, d in (((1,), 1, 1), ((5, 17, 2), 2, 32), ((40, 3, 130), 2, 40), ((7,) * 5, 2, 16)):
        name = f"{'+'.join(map(str, lengths))}x{h}x{d}"
        yield Sample(name, packed(lengths, lengths, h, h, d))
        yield Sample(f"{name} causal", packed(lengths, lengths, h, h, d), {"causal": True})
    yield Sample("grouped heads", packed((33, 8), (33, 8), 4, 2, 64), {"causal": True})
    yield Sample("more keys than queries", packed((1, 4, 9), (40, 4, 21), 4, 1, 16), {"causal": True})
    yield Sample("more queries than keys", packed((9, 20), (4, 20), 2, 2, 16), {"causal": True})
    yield Sample("wider values", packed((12, 20), (30, 7), 2, 2, 24, 56))
    yield Sample("empty sequences", packed((0, 46, 0, 35, 0), (13, 46, 0, 0, 24), 2, 1, 8))
    yield Sample("scale", packed((12, 3), (12, 3), 2, 2, 16), {"scale": 0.7})
    yield Sample("window", packed((70, 9), (70, 12), 2, 2, 16), {"window": 9})
    yield Sample("causal window", packed((30, 9), (41, 9), 2, 1, 16), {"window": 9, "causal": True})
    yield Sample("softcap", packed((20, 5), (20, 5), 2, 2, 32), {"softcap": 2.0, "causal": True})
    qkv = make(19, 3, 4, 16)
    starts = _starts((12, 7), make.device)
    yield Sample("packed qkv", (qkv[:, 0], qkv[:, 1], qkv[:, 2], starts, starts))
    yield Sample("strided", (*(make(19, 16, 2).mT for _ in range(3)), starts, starts))
    yield Sample("no tokens", packed((0, 0), (0, 0), 2, 2, 16))
    yield Sample("no sequences", packed((), (), 2, 2, 16))
    yield Sample("sinks", packed((70, 0, 9), (170, 3, 12), 8, 2, 16), {"sinks": make(8)})
    learned = packed((30, 9, 4), (41, 9, 0), 8, 4, 32)
    for t in learned[:3]:
        t.requires_grad_()
    more = {"alibi": make(8).abs() / 4, "window": 20, "causal": True}
    yield Sample("sinks and slopes", learned, {"sinks": make(8).requires_grad_(), **more})


def _workloads(make: Make) -> Iterator[Sample]:
    packed = partial(_packed, make)
    mixed = (1024, 17, 300, 64, 512, 5, 129, 800)
    yield Sample("8 sequences, 2851 tokens, 12x64", packed(mixed, mixed, 12, 12, 64), {"causal": True})
    lengths = tuple(range(16, 48)) * 2
    yield Sample("64 sequences of 16 to 47, 12x32", packed(lengths, lengths, 12, 12, 32))
    yield Sample(
        "8 x 1 token on 512 keys, 32/8x128", packed((1,) * 8, (512,) * 8, 32, 8, 128), {"causal": True}
    )


CARD = _CALL.card(
    kind=Kind.ATTENTION,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    domain=promised,
    gradient=GradientCost(flops=2.5, bytes=2.0),
    source="Dao et al., 2022",
)
