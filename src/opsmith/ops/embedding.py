"""Embedding: the rows of a table, by id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Pattern, Sample, register
from opsmith.ops.common import (
    as_rows,
    check_float,
    check_out,
    kernels,
    native,
    needs_grad,
    out_rows,
    short,
    small,
)


class IdError(IndexError, ValueError):
    """An id that names no row of the table: an IndexError as in PyTorch, and a ValueError as in opsmith."""


def embedding(
    ids: torch.Tensor,
    table: torch.Tensor,
    *,
    padding_idx: int | None = None,
    sparse_grad: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather the rows of a table: `y[..., :] = table[ids[...], :]`.

    >>> embedding(torch.tensor([[3, 1, 3]]), torch.randn(10, 64)).shape
    torch.Size([1, 3, 64])

    Args:
        ids: any shape, int32 or int64, each in [0, V).
        table: [V, N], float32, bfloat16 or float16 (float64 through PyTorch).
        padding_idx: this row gets no gradient; negative counts from the end.
        sparse_grad: give the table a sparse gradient, which costs by the ids and not by the table.
        out: [*ids.shape, N] in the table's dtype to write into.

    Raises:
        IdError: (an IndexError and a ValueError) an id is outside [0, V); nothing is read out of range.
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Mikolov et al., "Efficient Estimation of Word Representations in Vector Space", 2013.
    """
    padding = _check(ids, table, padding_idx, out)
    if small(ids.numel() * table.shape[1]) or _supports(ids, table) is not True:
        y = reference(ids, table, padding_idx=padding_idx, sparse_grad=sparse_grad)
    elif needs_grad(table):
        y = _Embedding.apply(ids, table, padding, sparse_grad)
    else:
        return _native(ids, table, out=out)
    return y if out is None else out.copy_(y)


def reference(
    ids: torch.Tensor, table: torch.Tensor, *, padding_idx: int | None = None, sparse_grad: bool = False
) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    if torch.compiler.is_compiling():
        return F.embedding(ids, table, padding_idx, sparse=sparse_grad)
    try:
        return F.embedding(ids, table, padding_idx, sparse=sparse_grad)
    except IndexError:
        raise _bad_id(ids, table.shape[0]) from None


def _check(ids: Any, table: Any, padding_idx: int | None, out: Any) -> int:
    """Refuse wrong arguments; the padding row, -1 for none."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"embedding: ids must be a tensor, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: ids must be int64 or int32, got {short(ids.dtype)}; cast them first")
    check_float("embedding", table, "table")
    if table.dim() != 2:
        raise ValueError(f"embedding: table must have shape [V, N], got {tuple(table.shape)}")
    if ids.device != table.device:
        raise ValueError(f"embedding: ids are on {ids.device}, table on {table.device}; move one of them")
    if out is not None:
        check_out("embedding", out, table, shape=(*ids.shape, table.shape[1]))
    if padding_idx is None:
        return -1
    rows = int(table.shape[0])
    if not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx must be in [{-rows}, {rows}), got {padding_idx}")
    return int(padding_idx % rows)


def _bad_id(ids: torch.Tensor, rows: int) -> IdError:
    """The error that names the first id outside the table, and where it stands."""
    flat = ids.reshape(-1)
    first = int(((flat < 0) | (flat >= rows)).nonzero()[0])
    position: Any = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), ids.shape))
    position = position[0] if len(position) == 1 else position
    return IdError(
        f"embedding: ids must be in [0, {rows}) for a table of {rows} rows, got {int(flat[first])} "
        f"at position {position}; check the tokenizer's vocabulary against the table"
    )


def _supports(ids: torch.Tensor, table: torch.Tensor, **options: Any) -> bool | str:
    if table.shape[1] > 1 and table.stride(1) != 1:
        return "the kernel gathers rows that are contiguous, this table is transposed"
    return native(table, "embedding")


def _native(
    ids: torch.Tensor,
    table: torch.Tensor,
    *,
    padding_idx: int | None = None,
    sparse_grad: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The CPU kernel, without autograd."""
    y = table.new_empty(*ids.shape, table.shape[1]) if out is None else out
    flat, rows = ids.reshape(-1), out_rows(y) if y.dim() > 1 else y.view(1, -1)
    if torch.compiler.is_compiling():
        torch.ops.opsmith.embedding.default(flat, table, y=rows)
        return y
    try:
        torch.ops.opsmith.embedding.default(flat, table, y=rows)
    except RuntimeError:
        if bool(((flat < 0) | (flat >= table.shape[0])).any()):
            raise _bad_id(ids, table.shape[0]) from None
        raise
    return y


class _Embedding(torch.autograd.Function):
    """Backward adds the rows of the output gradient into the table's, each row rounded once."""

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, table: torch.Tensor, padding: int, sparse: bool) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.table, ctx.padding, ctx.sparse = (table.shape, table.dtype), padding, sparse
        return _native(ids, table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        shape, dtype = ctx.table
        if ctx.sparse:
            dtable = torch.ops.aten.embedding_sparse_backward(dy, ids, shape[0], ctx.padding, False)
            return None, dtable, None, None
        dtable = torch.empty(shape, dtype=dtype)
        dy = as_rows(dy) if dy.dim() > 1 else dy.reshape(1, -1)
        torch.ops.opsmith.embedding_backward.default(dy, ids.reshape(-1), ctx.padding, dtable=dtable)
        return None, dtable, None, None


def _cost(ids: torch.Tensor, table: torch.Tensor, **options: Any) -> Cost:
    gathered = ids.numel() * table.shape[1] * table.element_size()
    return Cost(0.0, 2 * gathered + ids.numel() * ids.element_size())


def _samples(make: Make) -> Iterator[Sample]:
    yield Sample("1 id", (make.ids(1, high=7), make(7, 5)))
    yield Sample("2x9 of 50x130", (make.ids(2, 9, high=50), make(50, 130)))
    yield Sample("128 of 1000x384", (make.ids(128, high=1000), make(1000, 384)))
    yield Sample("17 of 29x24", (make.ids(17, high=29), make(29, 24)))
    yield Sample("int32", (make.ids(3, 4, high=20).int(), make(20, 33)))
    yield Sample("one row often", (make.ids(200, high=2), make(2, 64)))
    yield Sample("padding", (make.ids(40, high=4), make(4, 17)), {"padding_idx": 2})
    yield Sample("padding from the end", (make.ids(40, high=4), make(4, 17)), {"padding_idx": -1})
    yield Sample("scalar id", (make.ids(high=7), make(7, 5)))
    yield Sample("strided ids", (make.ids(6, 4, high=9).t(), make(9, 16)))
    yield Sample("strided table", (make.ids(11, high=9), make(9, 40)[:, 3:27]))
    yield Sample("transposed table", (make.ids(11, high=9), make(24, 9).t()))
    yield Sample("empty", (make.ids(0, high=9), make(9, 16)))


def _workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096 of 30522x384", (make.ids(32, 128, high=30522), make(30522, 384)))
    yield Sample("1 of 30522x384", (make.ids(1, 1, high=30522), make(30522, 384)))


CARD = register(
    Operator(
        name="embedding",
        kind=Kind.EMBEDDING,
        function=embedding,
        reference=reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        implementations=[
            *kernels(_native, _supports),
            Implementation("eager", reference),
        ],
        patterns=(
            Pattern(
                "embedding(ids, table)",
                lambda ids, table: F.embedding(ids, table),
                {"ids": ("B", "L"), "table": ("V", "N")},
                dtypes={"ids": "ids"},
            ),
        ),
        schemas=(
            "embedding(Tensor ids, Tensor table, *, Tensor(a!) y) -> ()",
            "embedding_backward(Tensor dy, Tensor ids, int padding_idx, *, Tensor(a!) dtable) -> ()",
        ),
        source="Mikolov et al., 2013",
    )
)
