"""What attention is tried and timed on, and what it costs at least."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Make, Sample


def visible_pairs(rows: int, columns: int, causal: bool, window: int | None) -> int:
    """How many (query, key) pairs are visible, exactly, for any L and S."""

    def ramp(m: int) -> int:  # the sum over n <= m of n held to [0, columns]
        rising = max(0, min(m, columns))
        return rising * (rising + 1) // 2 + max(0, m - columns) * columns

    def keys_before(first: int) -> int:  # the keys before position first + i, summed over the queries i
        return ramp(first + rows - 1) - ramp(first - 1)

    here = columns - rows  # the first query's own position
    if window is None:
        return keys_before(here + 1) if causal else rows * columns
    return keys_before(here + (1 if causal else window)) - keys_before(here - window + 1)


def cost(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int | None = None, **options: Any
) -> Cost:
    pairs = q.shape[:2].numel() * visible_pairs(q.shape[2], k.shape[2], causal, window)
    return cost_of(pairs, q, k, v, *(options.get(name) for name in ("mask", "sinks", "alibi")))


def cost_of(pairs: int, q: Tensor, k: Tensor, v: Tensor, *more: Tensor | None) -> Cost:
    """Of so many queries and keys that these see."""
    result = q.shape[:-1].numel() * v.shape[-1] * q.element_size()
    return Cost(2.0 * pairs * (q.shape[-1] + v.shape[-1]), nbytes(q, k, v, *more) + result)


def entry_cost(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, **rest: Any) -> Cost:
    """Of a call of the dispatcher's entry, as a profile has it; the gradients have the scores once more.

    Of several packed sequences the lengths are values, which a call's shapes do not tell.
    """
    heads, length, keys = q.shape[:-2].numel(), q.shape[-2], k.shape[-2]
    if cu_seqlens_q is not None:
        if cu_seqlens_q.shape[0] != 2:
            raise NotImplementedError
        heads, length, keys = q.shape[1], q.shape[0], k.shape[0]
    seen = visible_pairs(length, keys, bool(rest["causal"]), rest["window"] or None)
    tensors = [t for t in (cu_seqlens_q, *rest.values()) if isinstance(t, Tensor)]
    flops = 2.0 * heads * seen * (q.shape[-1] + v.shape[-1])
    return Cost(2.5 * flops if "dout" in rest else flops, nbytes(q, k, v, *tensors))


def promised(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> bool:
    """What a mask or a score of -infinity hides is not looked at; in the reference its NaN or infinity shows."""
    hides = options.get("causal") or any(options.get(name) is not None for name in ("mask", "window"))
    hides = hides or bool(q.isinf().any() or k.isinf().any())
    return not hides or all(bool(t.isfinite().all()) for t in (k, v))


def at_least_float32(t: Tensor) -> Tensor:
    return t.to(torch.promote_types(t.dtype, torch.float32))


def _qkv(
    make: Make, b: int, h: int, hkv: int, l: int, s: int, d: int, dv: int | None = None
) -> tuple[Tensor, ...]:
    return make(b, h, l, d), make(b, hkv, s, d), make(b, hkv, s, dv or d)


def samples(make: Make) -> Iterator[Sample]:
    qkv = partial(_qkv, make)
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
    positions = torch.arange(50, dtype=make.dtype).to(make.device)
    yield Sample("ALiBi", x, {"mask": make(2, 1, 1) * positions / 8, "causal": True})
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
    # The largest error of a few sinks' gradients is luck, eager's too: of many heads' it is not.
    x = qkv(1, 48, 12, 33, 50, 16)
    sinks = make(48, scale=2.0)
    yield Sample("sinks", x, {"sinks": sinks})
    more = {"sinks": sinks, "causal": True, "window": 40}
    yield Sample("sinks, causal window", qkv(1, 48, 24, 70, 300, 64), more)
    x = qkv(2, 8, 2, 33, 50, 32)
    sinks, slopes = make(8, scale=2.0), make(8).abs() / 4
    yield Sample("sinks and mask", x, {"sinks": sinks, "mask": make.mask(2, 1, 33, 50)})
    yield Sample("sinks where all is masked", x, {"sinks": sinks, "mask": make.mask(1, 1, 33, 50, keep=0.0)})
    more = {"sinks": at_least_float32(make(48)), "softcap": 2.0}
    yield Sample("sinks in float32", qkv(1, 48, 12, 40, 20, 16), more)
    yield Sample(
        "sinks of a query and a long cache", qkv(1, 8, 2, 1, 700, 64), {"sinks": make(8), "alibi": slopes}
    )
    yield Sample("slopes", x, {"alibi": slopes, "causal": True})
    yield Sample("slopes, not causal", qkv(2, 8, 8, 9, 140, 16), {"alibi": make(8) / 8, "window": 30})
    learned = tuple(t.requires_grad_() for t in (*qkv(1, 8, 4, 40, 150, 32), make(8)))
    more = {"alibi": slopes, "causal": True, "softcap": 3.0, "mask": make.mask(1, 1, 40, 150)}
    yield Sample("sinks and slopes, not learned", learned[:3], {"sinks": learned[3], **more})


def workloads(make: Make) -> Iterator[Sample]:
    qkv = partial(_qkv, make)
    for h, d in ((12, 64), (8, 128)):
        for l in (512, 1024, 2048, 4096):
            yield Sample(f"1x{h}x{l}x{d}", qkv(1, h, h, l, l, d))
            yield Sample(f"1x{h}x{l}x{d} causal", qkv(1, h, h, l, l, d), {"causal": True})
    x, mask = qkv(32, 12, 12, 128, 128, 32), make.mask(32, 1, 1, 128, keep=0.9)
    yield Sample("32x12x128x32 padding mask", x, {"mask": mask})
    yield Sample("1x32/8x1x2048x128 decode", qkv(1, 32, 8, 1, 2048, 128))
