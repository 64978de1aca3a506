"""Embedding: the rows of a table, by id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from opsmith.call import common
from opsmith.call.common import (
    NATIVE_DTYPES,
    SMALL,
    as_rows,
    check_float,
    check_out,
    compiling,
    kernels,
    native,
    needs_grad,
    out_rows,
    recorded,
    recording,
    short,
    small,
    small_node,
    writable,
)
from opsmith.call.fast import direct
from opsmith.call.run import declare
from opsmith.call.signature import Constant, Gradient, Input, Made, Output, Saved, Signature, Slope
from opsmith.operator import (
    Cost,
    GradientCost,
    Implementation,
    Kind,
    Make,
    Operator,
    Pattern,
    Sample,
    register,
)

_DTYPES = (*NATIVE_DTYPES, torch.float64)
# PyTorch's gather is as fast as any up to results of 16 MiB, which are still in a cache when they are read. Ours writes
# larger ones past the cache. In bytes for each element of a call that is `small`:
_IN_CACHE = (16 << 20) // SMALL
_AT_ONCE = 256  # ids for which our gather, called directly, is done first, however short the rows
_FEW = 64  # ids whose rows are in a cache afterwards, however long
# Malloc takes blocks of this size from the system each time, and gives them back.
_FROM_SYSTEM = 32 << 20
_gather = torch.embedding

SIGNATURE = Signature(
    "embedding",
    (Input("ids", "...", torch.int64), Input("table", "V N")),
    (Output("y", "... N", "table"),),
    gradient=Gradient(
        "embedding_backward",
        (Slope("y"), Saved("ids"), Constant("padding_idx", -1), Constant("zeroed", False)),
        (Made("table", optional=False),),
    ),
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
    if out is None and not compiling():
        # Looking at each argument would take as long as a short gather, so the kernel or PyTorch does it on its way.
        try:
            n = ids.numel()
            if (
                padding_idx is None
                and n <= _AT_ONCE
                and table.is_contiguous()
                and not (recording() and table.requires_grad and (sparse_grad or not _adds_rows(table)))
            ):
                y: torch.Tensor | None = direct.new_embedding(ids, table)
                if y is not None:
                    return y
                if direct.new_embedding is direct.not_loaded:
                    native(table, "embedding")  # which loads the library, for the calls to come
            if (
                not (recording() and table.requires_grad)
                and (padding_idx is None or -(rows := table.shape[0]) <= padding_idx < rows)
                and table.dtype in _DTYPES
                and ids.is_cpu
                and table.is_cpu
                and (
                    n <= _FEW <= common.limit
                    or n * table.shape[1] * table.element_size() // _IN_CACHE <= common.limit
                )
            ):
                return _gather(table, ids)
        except (AttributeError, IndexError, RuntimeError, TypeError):
            _check(ids, table, padding_idx, None)
            raise_bad_id("embedding", ids, table.shape[0])
            raise
    padding = _check(ids, table, padding_idx, out)
    training = needs_grad(table)
    elements = ids.numel() * table.shape[1]
    if not training and out is None:
        elements = elements * table.element_size() // _IN_CACHE
    pytorchs = small_node if training else small
    if _supports(ids, table) is not True or pytorchs(elements):
        y = reference(ids, table, padding_idx=padding_idx, sparse_grad=sparse_grad)
    elif training:
        y = recorded(_Embedding, ids, table, padding, sparse_grad)
    elif out is None or writable(out):
        return _native(ids, table, out=out)
    else:
        y = _native(ids, table)
    return y if out is None else out.copy_(y)


def reference(
    ids: torch.Tensor, table: torch.Tensor, *, padding_idx: int | None = None, sparse_grad: bool = False
) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    if torch.compiler.is_compiling():
        return F.embedding(ids, table, padding_idx, sparse=sparse_grad)
    try:
        return F.embedding(ids, table, padding_idx, sparse=sparse_grad)
    except (IndexError, RuntimeError):
        raise_bad_id("embedding", ids, table.shape[0])
        raise


def _adds_rows(table: torch.Tensor) -> bool:
    """Whether a node calls the kernel of the gradient for this table, in memory that need not come from the system."""
    return table.dtype in NATIVE_DTYPES and table.nbytes < _FROM_SYSTEM


def _check(ids: Any, table: Any, padding_idx: int | None, out: Any) -> int:
    """Refuse wrong arguments; the padding row, -1 for none."""
    check_ids("embedding", ids, table)
    check_float("embedding", table, "table")
    if out is not None:
        check_out("embedding", out, table, (*ids.shape, table.shape[1]), ids=ids, table=table)
    if padding_idx is None:
        return -1
    rows = int(table.shape[0])
    if not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx must be in [{-rows}, {rows}), got {padding_idx}")
    return int(padding_idx % rows)


def check_ids(op: str, ids: Any, table: Any, name: str = "ids") -> None:
    """Refuse what are no ids, and what is no table of rows on their device."""
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(ids).__name__}")
    if ids.dtype is not torch.int64 and ids.dtype is not torch.int32:
        raise TypeError(f"{op}: {name} must be int64 or int32, got {short(ids.dtype)}; cast them first")
    if not isinstance(table, torch.Tensor):
        raise TypeError(f"{op}: table must be a tensor, got {type(table).__name__}")
    if table.dim() != 2:
        raise ValueError(f"{op}: table must have shape [V, N], got {tuple(table.shape)}")
    if ids.device != table.device:
        raise ValueError(f"{op}: {name} are on {ids.device}, table on {table.device}; move one of them")


def raise_bad_id(op: str, ids: torch.Tensor, rows: int, name: str = "ids") -> None:
    """Raise the error that names the first id outside the table and where it stands, if there is one."""
    flat = ids.reshape(-1)
    bad = ((flat < 0) | (flat >= rows)).nonzero()
    if not bad.numel():
        return
    first = int(bad[0])
    position: Any = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), ids.shape))
    position = position[0] if len(position) == 1 else position
    raise IdError(
        f"{op}: {name} must be in [0, {rows}) for a table of {rows} rows, got {int(flat[first])} "
        f"at position {position}; check the tokenizer's vocabulary against the table"
    )


def flat_ids(ids: torch.Tensor) -> torch.Tensor:
    """Ids as the kernels take them: a vector, or contiguous."""
    return ids if ids.is_contiguous() else ids.reshape(-1)


def rows_out(y: torch.Tensor) -> torch.Tensor:
    """An output as the kernels take it: contiguous, or rows with a pitch."""
    return y if y.is_contiguous() else out_rows(y)


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
    """The kernel, without autograd."""
    y = table.new_empty((*ids.shape, table.shape[1])) if out is None else out
    if torch.compiler.is_compiling():
        torch.ops.opsmith.embedding.default(flat_ids(ids), table, y=rows_out(y))
        return y
    try:
        torch.ops.opsmith.embedding.default(flat_ids(ids), table, y=rows_out(y))
    except RuntimeError:
        raise_bad_id("embedding", ids, table.shape[0])
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
        dtable, zeroed = _for_gradient(shape, dtype, dy.device)
        dy = dy if dy.is_contiguous() else as_rows(dy)
        torch.ops.opsmith.embedding_backward.default(dy, flat_ids(ids), ctx.padding, zeroed, dtable=dtable)
        return None, dtable, None, None


def _for_gradient(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, bool]:
    """Memory for a dense gradient, and whether it is zero already.

    Most rows of a large table get no gradient. Memory that the system hands out is zero, and costs nothing where it
    is never written: NumPy's zeros leave it so, where PyTorch's write every page.
    """
    size = shape.numel() * dtype.itemsize
    if torch.compiler.is_compiling() or device.type != "cpu" or size < _FROM_SYSTEM:
        return torch.empty(shape, dtype=dtype, device=device), False
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape), True


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
        implementations=[*kernels(_native, _supports), Implementation("eager", reference)],
        patterns=(
            Pattern(
                "embedding(ids, table)",
                lambda ids, table: F.embedding(ids, table),
                {"ids": ("B", "L"), "table": ("V", "N")},
                dtypes={"ids": "ids"},
            ),
        ),
        gradient=GradientCost(bytes=1.0),  # the table's
        schemas=declare(SIGNATURE),
        source="Mikolov et al., 2013",
    )
)
