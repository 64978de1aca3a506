"""Quantized embedding: a program a row of the output, dequantized in registers on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from opsmith.kernels.triton.common import check, flag, in_registers, launch, report, steps
from opsmith.ops.embedding.triton.embedding import flat, pitch


@triton.jit
def _gather(
    ids,
    table,
    scale,
    slots,
    cached,
    counts,
    stats,
    y,
    bad,
    rows,
    cached_rows,
    n,
    step,
    ts,
    ss,
    cs,
    ys,
    BLOCK: tl.constexpr,
):
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
    factor = tl.load(scale + row * ss, mask=inside, other=float("nan"))
    v = tl.load(table + row * ts + at, mask=at < tl.where(inside & (found == 0), n, 0), other=0)
    v = (v.to(tl.float32) * factor).to(y.dtype.element_ty)
    if slots is not None:
        kept = tl.load(cached + cached_at * cs + at, mask=at < tl.where(found, n, 0), other=0.0)
        v = tl.where(found, kept, v)
    tl.store(y + token * ys + at, v, mask=at < n)


def forward(
    ids: torch.Tensor,
    table: torch.Tensor,
    scale: torch.Tensor,
    prefetch: int,
    next_ids: torch.Tensor | None,
    slots: torch.Tensor | None,
    rows: torch.Tensor | None,
    *,
    counts: torch.Tensor | None = None,
    stats: torch.Tensor | None = None,
    y: torch.Tensor,
) -> None:
    """`prefetch` and `next_ids` are hints for a CPU: here, other rows are fetched while one is waited for."""
    total, n = table.shape
    if next_ids is not None and next_ids.numel():
        lowest, highest = next_ids.aminmax()
        if int(lowest) < 0 or int(highest) >= total:
            raise RuntimeError(
                f"quantized_embedding: next_ids must lie in [0, {total}), the rows of the table"
            )
    how = in_registers(n, 4096)
    bad = flag(ids)
    flat_ids, step = flat(ids)
    launch(
        _gather,
        (ids.numel(), max(triton.cdiv(n, how["BLOCK"]), 1)),
        *(flat_ids, table, scale, slots, rows, counts, stats, y, bad),
        *(total, 0 if rows is None else rows.shape[0], n),
        *(step, *steps(table, scale, rows), pitch(y, n)),
        **how,
    )
    check(bad, "quantized_embedding", ids, total)


KERNELS = {"quantized_embedding": forward}
