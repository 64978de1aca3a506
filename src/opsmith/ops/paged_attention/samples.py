"""What paged attention is tried and timed on, and what it costs at least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Make, Sample
from opsmith.ops.attention.samples import at_least_float32, visible_pairs
from opsmith.ops.pages import has_values


def cost(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    k_scale: Tensor | None = None,
    **rest: Any,
) -> Cost:
    """Each key and value that a query sees is read once, for all heads that share it.

    Sequences are as long as the tables say where lengths have no values, as in a profile of the dispatcher's entry.
    """
    queries = q.shape[1] if q.dim() == 4 else 1
    heads, kv_heads = q.shape[-2], k_cache.shape[2]
    dims = k_cache.shape[3] + v_cache.shape[3]
    window = window or None
    most = None if window is None else window + queries - 1  # keys of a sequence that are seen
    if has_values(seq_lens):
        lengths = seq_lens.tolist()
        pairs = sum(visible_pairs(queries, length, True, window) for length in lengths)
        keys = sum(length if most is None else min(length, most) for length in lengths)
    else:
        keys = rows_of_tables(block_tables, k_cache.shape[1])
        keys = keys if most is None else min(keys, block_tables.shape[0] * most)
        pairs = queries * keys
    row = dims * k_cache.element_size() + (0 if k_scale is None else 8)
    result = q.numel() // max(q.shape[-1], 1) * v_cache.shape[3] * q.element_size()
    moved = keys * kv_heads * row + nbytes(q, block_tables, seq_lens, sinks, alibi) + result
    return Cost(2.0 * heads * pairs * dims, moved)


def step_cost(q: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, **on: Any) -> Cost:
    """Of a layer's step: attention of q [B, H, L, D], and new rows read and written."""
    attended = cost(q.transpose(1, 2), **on)
    rows = (k.numel() + v.numel()) * on["k_cache"].element_size()
    return replace(attended, min_bytes=attended.min_bytes + nbytes(k, v, slot_mapping) + rows)


def rows_of_tables(block_tables: Tensor, block_size: int) -> int:
    """The rows that tables stand for, where lengths are not known: every block but the last is full, that has one."""
    sequences, columns = block_tables.shape
    return sequences * (max(columns - 1, 0) * block_size + min(columns, 1))


def promised(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any) -> bool:
    """Finite calls: the NaN of a key that one query sees may reach another one that does not."""
    given = (q, k_cache, v_cache, *(options.get(name) for name in ("k_scale", "v_scale")))
    return all(bool(t.isfinite().all()) for t in given if t is not None)


def _numbers(values: Any, make: Make, dtype: torch.dtype) -> Tensor:
    # Costs are also counted where tensors are fake, without values: tables and lengths keep theirs.
    with _disable_current_modes():
        return torch.as_tensor(values, dtype=dtype).to(make.device)


def tables(make: Make, lengths: Sequence[int], size: int, blocks: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """Tables in which the blocks of the sequences alternate, and the lengths."""
    most = max((-(-n // size) for n in lengths), default=0)
    batch = len(lengths)
    ids = [[(i * batch + b) % max(blocks, 1) for i in range(most)] for b in range(batch)]
    table = _numbers(ids, make, dtype).view(batch, most)
    return table, _numbers(list(lengths), make, dtype)


def _call(
    make: Make,
    lengths: Sequence[int],
    h: int,
    hkv: int,
    d: int,
    *,
    size: int = 16,
    dv: int | None = None,
    new: int = 0,
    ids: torch.dtype = torch.int32,
) -> tuple[Tensor, ...]:
    blocks = sum(-(-n // size) for n in lengths) + 1
    q = make(len(lengths), *((new,) if new else ()), h, d)
    caches = make(blocks, size, hkv, d), make(blocks, size, hkv, dv or d)
    return (q, *caches, *tables(make, lengths, size, blocks, ids))


def samples(make: Make) -> Iterator[Sample]:
    call = partial(_call, make)

    def int8(args: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        q, k, v, *rest = args
        bytes_ = [make.ids(*t.shape, high=255).sub_(127).to(torch.int8) for t in (k, v)]
        wide = make.dtype if make.dtype == torch.float64 else torch.float32
        scales = [(make(*t.shape[:3]).float().abs() * 0.01 + 0.002).to(wide) for t in (k, v)]
        return (q, *bytes_, *rest), {"k_scale": scales[0], "v_scale": scales[1]}

    sizes = ((40, 5), 4, 2, 33), ((9, 70, 33), 6, 2, 40), ((130, 17), 8, 2, 65), ((90, 7), 5, 5, 24)
    for lengths, h, hkv, d in sizes:
        yield Sample(f"{'+'.join(map(str, lengths))}, {h}/{hkv}x{d}", call(lengths, h, hkv, d))
    yield Sample("one key", call((1,), 2, 1, 8))
    yield Sample("one key head", call((300, 20), 7, 1, 64))
    yield Sample("as many key heads", call((77,), 3, 3, 128))
    for size in (1, 128, 256):
        yield Sample(f"blocks of {size}", call((150, 300, 7), 4, 2, 32, size=size, ids=torch.int64))
    yield Sample("wider values", call((60, 33), 4, 2, 24, dv=72))
    yield Sample("narrower values", call((60, 33), 4, 1, 96, dv=40))
    yield Sample("three new tokens", call((50, 3, 17), 4, 2, 40, new=3))
    yield Sample("more new tokens than keys", call((2, 40), 4, 2, 16, new=5))
    yield Sample("empty sequences", call((0, 30, 0, 5), 4, 2, 16))
    yield Sample("scale", call((35, 18), 4, 2, 16), {"scale": 0.7})
    yield Sample("negative scale", call((35, 18), 4, 2, 16), {"scale": -0.3})
    yield Sample("window", call((150, 9, 40), 4, 2, 32), {"window": 37})
    yield Sample("window, new tokens", call((150, 9, 40), 4, 2, 32, new=4), {"window": 20})
    yield Sample("softcap", call((35, 18), 4, 2, 32), {"softcap": 2.0})
    yield Sample("window and softcap", call((90, 18), 4, 2, 32), {"softcap": 5.0, "window": 64})
    for name, more in (("", {}), (", softcap", {"softcap": 2.0}), (", window", {"window": 21})):
        args, scales = int8(call((60, 33, 7, 80, 20, 100, 11, 48), 8, 4, 40))
        yield Sample(f"int8{name}", args, {**scales, **more})
    args, scales = int8(call((60, 33), 4, 2, 48, dv=32, new=2))
    yield Sample("int8, new tokens", args, scales)
    # Four rows a head and heads of whole lines, which the kernel knows ahead of time.
    for h, hkv, d, dv in ((16, 4, 128, 64), (40, 10, 64, 128), (32, 1, 128, 128)):
        args = call((130, 33, 70), h, hkv, d, dv=dv)
        yield Sample(f"{h}/{hkv}x{d}x{dv}", args)
        args, scales = int8(args)
        yield Sample(f"int8, {h}/{hkv}x{d}x{dv}", args, scales)
    q, k, v, *rest = call((50, 33), 4, 2, 32)
    pool = make(2, k.shape[0], k.shape[1], 2, 4, 32)
    yield Sample("a slice of a pool", (q, pool[0, :, :, 0, 1:3], pool[1, :, :, 1, :2], *rest))
    yield Sample(
        "heads before tokens", (q, *(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)), *rest)
    )
    yield Sample(
        "strided", (make(2, 32, 4).mT, make(*k.shape[:3], 64)[..., ::2], make(*k.shape[:2], 32, 2).mT, *rest)
    )
    q, k, v, *rest = call((50, 33, 70, 20, 64, 9, 80, 41), 8, 4, 64, new=4)
    yield Sample("sharp", (q * 8, k * 4, v, *rest))
    yield Sample("no sequences", call((), 4, 2, 16))
    sinks, slopes = make(8, scale=2.0), make(8).abs() / 8
    for name, given in (("sinks", {"sinks": sinks}), ("slopes", {"alibi": slopes})):
        yield Sample(name, call((300, 0, 18), 8, 4, 32), given)
        yield Sample(f"{name}, window", call((150, 9, 40), 8, 1, 32), {"window": 37, **given})
        yield Sample(f"{name}, new tokens", call((150, 2, 40), 8, 4, 24, new=3), {"softcap": 3.0, **given})
        yield Sample(f"{name}, as many key heads", call((300, 20), 8, 8, 64), given)
    both = {"sinks": sinks, "alibi": at_least_float32(slopes)}
    yield Sample("sinks and slopes", call((700,), 8, 2, 64), both)
    for hkv, d, dv in ((4, 40, 40), (2, 128, 64)):
        args, scales = int8(call((60, 33, 7, 80, 20, 100, 11, 48), 8, hkv, d, dv=dv))
        yield Sample(f"int8, sinks and slopes, 8/{hkv}x{d}x{dv}", args, {**scales, **both})
        yield Sample(f"int8, sinks, 8/{hkv}x{d}x{dv}", args, {**scales, "sinks": sinks})


def workloads(make: Make) -> Iterator[Sample]:
    call = partial(_call, make)
    yield Sample("1 x 4096 keys, 32/8x128", call((4096,), 32, 8, 128))
    args = call((64, 300, 512, 777, 1000, 1024, 1500, 2048), 32, 8, 128)
    yield Sample("8 sequences of 64 to 2048 keys, 32/8x128", args)
    yield Sample("1 x 2048 keys, 32/32x128", call((2048,), 32, 32, 128))
    args = call((4096,), 32, 8, 128)
    int8 = [make.ids(*args[1].shape, high=255).sub_(127).to(torch.int8) for _ in range(2)]
    scales = {
        name: torch.full(args[1].shape[:3], 0.01, device=make.device) for name in ("k_scale", "v_scale")
    }
    yield Sample("1 x 4096 keys, 32/8x128, int8", (args[0], *int8, *args[3:]), scales)
