"""Embedding: the rows of a table, by id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call import dispatch
from opsmith.call.arguments import check_float, check_is_tensor, short
from opsmith.call.dispatch import NATIVE_DTYPES, SMALL, compiling, exporting, native
from opsmith.call.layouts import as_rows, out_rows
from opsmith.call.run import Call, declare
from opsmith.call.signature import Constant, Gradient, Input, Made, Output, Saved, Signature, Slope
from opsmith.operator import Cost, GradientCost, Kind, Make, Pattern, Sample, Supports

_DTYPES = (*NATIVE_DTYPES, torch.float64)
# PyTorch's gather is as fast as any up to results of 16 MiB, which are still in a cache when they are read. Ours writes
# larger ones past the cache. In bytes for each of SMALL elements:
_IN_CACHE = (16 << 20) // SMALL
_AT_ONCE = 256  # ids for which our gather, called directly, is done first, however short the rows
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
    beside=("padding_idx", "sparse_grad"),
)


class IdError(IndexError, ValueError):
    """An id that names no row of the table: an IndexError as in PyTorch, and a ValueError as in opsmith."""


def embedding(
    ids: Tensor,
    table: Tensor,
    *,
    padding_idx: int | None = None,
    sparse_grad: bool = False,
    out: Tensor | None = None,
) -> Tensor:
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
    if out is None and not (compiling() or exporting()):
        # Looking at each argument would take as long as a short gather, so the kernel or PyTorch does it on its way.
        try:
            n = ids.numel()
            learns = torch.is_grad_enabled() and table.requires_grad
            # A node in C++ adds up gradients of these dtypes, in memory that need not come from the system.
            if (
                padding_idx is None
                and n <= _AT_ONCE
                and table.is_contiguous()
                and not (
                    learns
                    and (sparse_grad or table.dtype not in NATIVE_DTYPES or table.nbytes >= _FROM_SYSTEM)
                )
            ):
                return _CALL.fast.call(ids, table, None, False, None)  # type: ignore[no-any-return]
            if (
                not learns
                and (padding_idx is None or -(rows := table.shape[0]) <= padding_idx < rows)
                and table.dtype in _DTYPES
                and ids.is_cpu
                and table.is_cpu
                and n * table.shape[1] * table.element_size() // _IN_CACHE <= dispatch.limit
            ):
                return _gather(table, ids)
        except (AttributeError, IndexError, RuntimeError, TypeError):  # the checks say why
            pass
    return _CALL.traced(ids, table, padding_idx, sparse_grad, out)  # type: ignore[no-any-return]


def definition(ids: Tensor, table: Tensor, padding_idx: int | None, sparse_grad: bool) -> Tensor:
    """The definition, in plain PyTorch."""
    try:
        return F.embedding(ids, table, padding_idx, sparse=sparse_grad)
    except (IndexError, RuntimeError):
        if not torch.compiler.is_compiling():
            raise_bad_id("embedding", ids, table.shape[0])
        raise


def check_ids(op: str, ids: Any, table: Any, name: str = "ids") -> None:
    """Refuse what are no ids, and what is no table of rows on their device."""
    check_is_tensor(op, ids, name)
    if ids.dtype is not torch.int64 and ids.dtype is not torch.int32:
        raise TypeError(f"{op}: {name} must be int64 or int32, got {short(ids.dtype)}; cast them first")
    check_is_tensor(op, table, "table")
    if table.dim() != 2:
        raise ValueError(f"{op}: table must have shape [V, N], got {tuple(table.shape)}")
    if ids.device != table.device:
        raise ValueError(f"{op}: {name} are on {ids.device}, table on {table.device}; move one of them")


def raise_bad_id(op: str, ids: Tensor, rows: int, name: str = "ids") -> None:
    """Raise the error that names the first id outside the table and where it stands, if there is one."""
    bad = ((ids < 0) | (ids >= rows)).nonzero()
    if len(bad):
        at = tuple(bad[0].tolist())
        raise IdError(
            f"{op}: {name} must be in [0, {rows}) for a table of {rows} rows, got {int(ids[at])} at position "
            f"{at[0] if len(at) == 1 else at}; check the tokenizer's vocabulary against the table"
        )


class Gather(Call):
    """Rows of a table by id; the ids are as they lie, and of the rows only each has to be contiguous."""

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        if t is None or of.name in ("table", "scale"):
            return t
        if of.name in ("ids", "next_ids"):
            return t if t.is_contiguous() else t.reshape(-1)
        return t if t.is_contiguous() else as_rows(t)

    def taken_result(self, of: Any, t: Tensor) -> Tensor:
        return t if t.is_contiguous() else out_rows(t)

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        table = values[1]
        if table.shape[1] > 1 and table.stride(1) != 1:
            return "the kernel gathers rows that are contiguous, this table is transposed"
        floats = next(t for t in values[1:] if t.is_floating_point())
        return native(floats, self.signature.name, *more)

    def explain(self, values: Sequence[Any]) -> None:
        named = self.named(values)
        for name in ("ids", "next_ids"):
            if named.get(name) is not None:
                raise_bad_id(self.op, named[name], named["table"].shape[0], name)


class _Embedding(Gather):
    """Backward adds the rows of the output's gradient into the table's, each row rounded once."""

    def check(self, values: Sequence[Any]) -> None:
        ids, table, padding_idx, _ = values
        check_ids(self.op, ids, table)
        check_float(self.op, table, "table")
        rows = int(table.shape[0])
        if padding_idx is not None and not -rows <= padding_idx < rows:
            raise ValueError(f"embedding: padding_idx must be in [{-rows}, {rows}), got {padding_idx}")

    def gradients(
        self, backend: str, known: dict[str, Any], slopes: Sequence[Tensor], wanted: set[str]
    ) -> dict[str, Tensor]:
        rows, padding = known["table"].shape[0], known["padding_idx"]
        known["padding_idx"] = padding = -1 if padding is None else padding % rows
        if known["sparse_grad"]:
            sparse = torch.ops.aten.embedding_sparse_backward(slopes[0], known["ids"], rows, padding, False)
            return {"table": sparse}
        return super().gradients(backend, known, slopes, wanted)

    def made_gradient(self, name: str, like: Tensor, known: dict[str, Any]) -> Tensor:
        """Zeros of the system where there are many.

        Most rows of a large table get no gradient. Memory that the system hands out is zero, and costs nothing where it
        is never written: NumPy's zeros leave it so, where PyTorch's write every page.
        """
        if torch.compiler.is_compiling() or not like.is_cpu or like.nbytes < _FROM_SYSTEM:
            return torch.empty_like(like, memory_format=torch.contiguous_format)
        known["zeroed"] = True
        return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)


_CALL = _Embedding(SIGNATURE, embedding, definition)


def _cost(ids: Tensor, table: Tensor, **options: Any) -> Cost:
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


CARD = _CALL.card(
    kind=Kind.EMBEDDING,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    patterns=(
        Pattern(
            "embedding(ids, table)",
            lambda ids, table: F.embedding(ids, table),
            {"ids": ("B", "L"), "table": ("V", "N")},
            dtypes={"ids": "ids"},
        ),
        Pattern(
            "embedding(ids, table, padding_idx)",
            lambda ids, table, padding_idx: F.embedding(ids, table, int(padding_idx)),
            {"ids": ("B", "L"), "table": ("V", "N"), "padding_idx": 3},
            dtypes={"ids": "ids"},
        ),
    ),
    gradient=GradientCost(bytes=1.0),  # the table's
    schemas=declare(SIGNATURE),
    source="Mikolov et al., 2013",
)
