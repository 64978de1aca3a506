"""Embeddings: a program a row of the output, dequantized in registers on the way where the table is int8.

Backward sorts the ids, so that a row's gradients stand together and are added in one order, whatever the device does:
chunks of the sorted list first, then the runs that cross chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import as_rows, check, flag, in_registers, launch, report, steps
from opsmith.ops.pages import has_values

_CHUNK = 32  # sorted positions that one program adds up


@triton.jit
def _gather(
    ids, table, scale, slots, cached, counts, stats, y, bad, rows, cached_rows, n, step, ts, ss, cs, ys,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token * step).to(tl.int64)
    inside = (row >= 0) & (row < rows)
    report(bad, token, inside)
    cached_at = row
    found = inside & False
    if slots is not None:
        cached_at = tl.load(slots + row, mask=inside, other=-1).to(tl.int64)
        found = (cached_at >= 0) & (cached_at < cached_rows)
    if counts is not None:  # noqa: SIM102  one is decided by the compiler, the other by each program
        if inside & (part == 0):
            tl.atomic_add(counts + row, 1)
            tl.atomic_add(stats, found.to(tl.int64))
            tl.atomic_add(stats + 1, 1)
    # A row that does not exist is never read: its place is filled with NaN.
    if scale is None:
        v = tl.load(table + row * ts + at, mask=at < tl.where(inside, n, 0), other=float("nan"))
    else:
        factor = tl.load(scale + row * ss, mask=inside, other=float("nan"))
        v = tl.load(table + row * ts + at, mask=at < tl.where(inside & (found == 0), n, 0), other=0)
        v = (v.to(tl.float32) * factor).to(y.dtype.element_ty)
    if slots is not None:
        kept = tl.load(cached + cached_at * cs + at, mask=at < tl.where(found, n, 0), other=0.0)
        v = tl.where(found, kept, v)
    tl.store(y + token * ys + at, v, mask=at < n)


@triton.jit
def _chunk_sums(
    dy, ids, order, dtable, heads, tails, tokens, rows, n, padding, gs, ts,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up the runs of equal ids in a chunk: whole runs into dtable, what a neighbor must complete aside."""
    chunk = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    first = chunk * CHUNK
    total = tl.zeros((BLOCK,), tl.float32)
    current = tl.load(ids + first).to(tl.int64)
    begun_before = tl.load(ids + first - 1, mask=first > 0, other=-1).to(tl.int64) == current
    for position in range(first, tl.minimum(first + CHUNK, tokens)):
        total += tl.load(dy + tl.load(order + position) * gs + at, mask=mask, other=0.0).to(tl.float32)
        following = tl.load(ids + position + 1, mask=position + 1 < tokens, other=-1).to(tl.int64)
        ends = following != current
        last = position + 1 == first + CHUNK
        if begun_before:
            if ends | last:
                tl.store(heads + chunk * n + at, total, mask=mask)
        elif ends:
            if (current != padding) & (current >= 0) & (current < rows):
                tl.store(dtable + current * ts + at, total.to(dtable.dtype.element_ty), mask=mask)
        elif last:
            tl.store(tails + chunk * n + at, total, mask=mask)
        total = tl.where(ends, 0.0, total)
        begun_before = begun_before & (ends == 0)
        current = following


@triton.jit
def _long_runs(
    ids, dtable, heads, tails, tokens, rows, n, padding, ts, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Completes the run that begins in this chunk and goes on in the next."""
    chunk = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    first = chunk * CHUNK
    end = first + CHUNK
    row = tl.load(ids + end - 1, mask=end < tokens, other=-1).to(tl.int64)
    goes_on = (end < tokens) & (tl.load(ids + end, mask=end < tokens, other=-2).to(tl.int64) == row)
    begins_here = tl.load(ids + first - 1, mask=first > 0, other=-1).to(tl.int64) != row
    if goes_on & begins_here & (row != padding) & (row >= 0) & (row < rows):
        # How far it goes is found first: Triton 3.6 cannot compile a `while` loop that adds up rows.
        last = chunk
        while goes_on:
            last += 1
            end += CHUNK
            goes_on = (end < tokens) & (tl.load(ids + end, mask=end < tokens, other=-2).to(tl.int64) == row)
        total = tl.load(tails + chunk * n + at, mask=mask, other=0.0)
        for following in range(chunk + 1, last + 1):
            total += tl.load(heads + following * n + at, mask=mask, other=0.0)
        tl.store(dtable + row * ts + at, total.to(dtable.dtype.element_ty), mask=mask)


def _gathered(op: str, ids: Tensor, table: Tensor, y: Tensor, **quantized: Tensor | None) -> None:
    total, n = table.shape
    scale, slots, rows, counts, stats = (
        quantized.get(name) for name in ("scale", "slots", "rows", "counts", "stats")
    )
    how = in_registers(n, 4096)
    bad = flag(ids)
    launch(
        _gather,
        (ids.numel(), max(triton.cdiv(n, how["BLOCK"]), 1)),
        *(ids, table, scale, slots, rows, counts, stats, y, bad),
        *(total, 0 if rows is None else rows.shape[0], n),
        *(ids.stride(0) if ids.dim() == 1 else 1, *steps(table, scale, rows, as_rows(y))),
        **how,
    )
    check(bad, op, ids, total)


def embedding(ids: Tensor, table: Tensor, *, y: Tensor) -> None:
    _gathered("embedding", ids, table, y)


def quantized_embedding(ids, table, scale, prefetch, next_ids, slots, rows, *, counts=None, stats=None, y):
    """`prefetch` and `next_ids` are hints for a CPU: here, other rows are fetched while one is waited for."""
    if next_ids is not None and next_ids.numel() and has_values(next_ids):
        total = table.shape[0]
        lowest, highest = next_ids.aminmax()
        if int(lowest) < 0 or int(highest) >= total:
            raise RuntimeError(
                f"quantized_embedding: next_ids must lie in [0, {total}), the rows of the table"
            )
    quantized = {"scale": scale, "slots": slots, "rows": rows, "counts": counts, "stats": stats}
    _gathered("quantized_embedding", ids, table, y, **quantized)


def embedding_backward(
    dy: Tensor, ids: Tensor, padding_idx: int = -1, zeroed: bool = False, *, dtable: Tensor
) -> None:
    rows, n = dtable.shape
    if not zeroed:
        dtable.zero_()
    if not dy.numel():
        return
    ordered, order = torch.sort(ids.reshape(-1), stable=True)
    tokens = ordered.numel()
    how = in_registers(n, 1024)
    grid = (triton.cdiv(tokens, _CHUNK), triton.cdiv(n, how["BLOCK"]))
    heads, tails = torch.empty((2, grid[0], n), dtype=torch.float32, device=dy.device).unbind()
    sizes = (tokens, rows, n, padding_idx)
    launch(
        _chunk_sums,
        grid,
        *(dy, ordered, order, dtable, heads, tails),
        *(*sizes, *steps(as_rows(dy), dtable)),
        CHUNK=_CHUNK,
        **how,
    )
    launch(_long_runs, grid, ordered, dtable, heads, tails, *sizes, *steps(dtable), CHUNK=_CHUNK, **how)


KERNELS = {
    "embedding": embedding,
    "embedding_backward": embedding_backward,
    "quantized_embedding": quantized_embedding,
}
