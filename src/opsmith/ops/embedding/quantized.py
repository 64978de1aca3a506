"""Quantized embedding: the rows of an int8 table, by id, dequantized while they are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import check_device, check_is_tensor, short
from opsmith.call.dispatch import compiling
from opsmith.call.run import declare
from opsmith.call.signature import Input, Number, Output, Signature
from opsmith.operator import Cost, Kind, Make, Sample, Supports
from opsmith.ops.embedding import Gather, check_ids, raise_bad_id

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OP = "quantized_embedding"

SIGNATURE = Signature(
    "quantized_embedding",
    (
        *(Input("ids", "...", torch.int64), Input("table", "V N", torch.int8)),
        Input("scale", "V", torch.float32),
        *(Number("prefetch", int), Input("next_ids", "...", torch.int64, True)),
        *(Input("slots", "V", torch.int32, True), Input("rows", "R N", optional=True)),
    ),
    (
        Output("counts", "V", torch.int32, optional=True),
        Output("stats", "2", torch.int64, optional=True),
        Output("y", "... N", torch.float32),  # in the dtype that the call asks for
    ),
    beside=("dtype", "counts", "stats"),
)


def quantized_embedding(
    ids: Tensor,
    table: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    prefetch: int = 0,
    next_ids: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Gather the rows of an int8 table, each times its own scale.

    `y[..., :] = table[ids[...], :] * scale[ids[...]]`, in float32, rounded once to `dtype`.

    >>> table, scale = torch.randint(-127, 128, (10, 64), dtype=torch.int8), torch.rand(10)
    >>> quantized_embedding(torch.tensor([[3, 1, 3]]), table, scale, dtype=torch.bfloat16).shape
    torch.Size([1, 3, 64])

    `QuantizedEmbedding.from_float` makes table and scale of a floating-point table.

    Args:
        ids: any shape, int32 or int64, each in [0, V).
        table: [V, N] int8.
        scale: [V] float32 (float64 through PyTorch, the result is float64 then).
        dtype: of the result, float32, bfloat16 or float16 (float64 through PyTorch).
        prefetch: fetch rows from memory this many tokens before they are needed, on a CPU. Changes no value.
        next_ids: rows that the next call is likely to need, fetched into the CPU's cache at the end of this one.
        out: [*ids.shape, N] in `dtype` to write into.

    Raises:
        IdError: (an IndexError and a ValueError) an id is outside [0, V); nothing is read out of range.
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: Guan et al., "Post-Training 4-bit Quantization on Embedding Tables", 2019.
    """
    soon = not compiling() and isinstance(prefetch, int) and prefetch >= 0
    return (_CALL.fast.call if soon else _CALL.traced)(  # type: ignore[no-any-return]
        ids, table, scale, prefetch, next_ids, None, None, dtype, None, None, out
    )


def definition(
    ids: Tensor,
    table: Tensor,
    scale: Tensor,
    prefetch: int,
    next_ids: Tensor | None,
    slots: Tensor | None,
    rows: Tensor | None,
    dtype: torch.dtype,
    *counted: Tensor | None,
) -> Tensor:
    """The definition, in plain PyTorch. In float64 it rounds nothing, whatever dtype is asked for."""
    try:
        y = torch.embedding(table, ids).to(scale.dtype) * torch.embedding(scale.unsqueeze(-1), ids)
    except (IndexError, RuntimeError):  # of a table without rows
        if not torch.compiler.is_compiling():
            raise_bad_id(_OP, ids, table.shape[0])
        raise
    return y if scale.dtype == torch.float64 else y.to(dtype)


class _Quantized(Gather):
    """The rows of a cache that is given are taken from there, and counted."""

    learns = False

    def check(self, values: Sequence[Any]) -> None:
        ids, table, scale, prefetch, next_ids, *_, dtype, _, _ = values
        check_ids(_OP, ids, table)
        if table.dtype != torch.int8:
            raise TypeError(
                f"{_OP}: table must be int8, got {short(table.dtype)}; QuantizedEmbedding.from_float quantizes it"
            )
        check_is_tensor(_OP, scale, "scale")
        if scale.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{_OP}: scale must be float32, got {short(scale.dtype)}; a rounded scale shifts rows"
            )
        if scale.shape != table.shape[:1]:
            raise ValueError(
                f"{_OP}: scale must have shape ({table.shape[0]},), one for each row of table, "
                f"got {tuple(scale.shape)}"
            )
        check_device(_OP, scale, table, "scale", "table")
        if dtype not in (*DTYPES, torch.float64):
            raise TypeError(f"{_OP}: dtype must be float32, bfloat16 or float16, got {dtype}")
        if not isinstance(prefetch, int) or prefetch < 0:
            raise ValueError(f"{_OP}: prefetch must be a number of tokens, 0 for none, got {prefetch!r}")
        if next_ids is not None:
            check_ids(_OP, next_ids, table, "next_ids")

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        known = self.named(values)
        if known["scale"].dtype != torch.float32 or known["dtype"] not in DTYPES:
            return "the kernels dequantize in float32, to float32, bfloat16 or float16"
        return super().supported(values, *more)

    def result_dtypes(self, values: Sequence[Any]) -> Sequence[torch.dtype]:
        known = self.named(values)
        wide = known["scale"].dtype
        return torch.int32, torch.int64, known["dtype"] if wide == torch.float32 else wide


_CALL = _Quantized(SIGNATURE, quantized_embedding, definition)
# With the memory of a `RowCache` too: ids, table, scale, prefetch, next_ids, slots, rows, dtype, counts, stats, out.
gather_cached = _CALL.traced


def prefetch_rows(ids: Tensor, table: Tensor, scale: Tensor) -> None:
    """Have the CPU fetch rows, where a kernel of ours can ask it to."""
    check_ids("prefetch_rows", ids, table)
    none = torch.empty(0, dtype=torch.int64, device=ids.device)
    values = none, table, scale, 0, ids, None, None, torch.float32, None, None
    if _CALL.supported(values) is True:
        _CALL.native("opsmith", values)


def _cost(ids: Tensor, table: Tensor, scale: Tensor, **options: Any) -> Cost:
    wide = options.get("dtype", torch.float32).itemsize
    elements = ids.numel() * table.shape[1]
    row_scales = ids.numel() * scale.element_size()
    return Cost(elements, elements * (1 + wide) + row_scales + ids.numel() * ids.element_size())


def _table(make: Make, rows: int, n: int) -> tuple[Tensor, Tensor]:
    """An int8 table as quantization leaves it, and its scales, which are float32 whatever dtype is asked for."""
    table = (make.ids(rows, n, high=255) - 127).to(torch.int8)
    return table, (make(rows).float().abs() + 0.1) / 127


def _samples(make: Make) -> Iterator[Sample]:
    to = {"dtype": make.dtype}
    yield Sample("1 id", (make.ids(1, high=7), *_table(make, 7, 5)), to)
    yield Sample("2x9 of 50x130", (make.ids(2, 9, high=50), *_table(make, 50, 130)), to)
    yield Sample("128 of 1000x384", (make.ids(128, high=1000), *_table(make, 1000, 384)), to)
    yield Sample("17 of 29x24", (make.ids(17, high=29), *_table(make, 29, 24)), to)
    yield Sample("300 of 4x65", (make.ids(300, high=4), *_table(make, 4, 65)), to)
    yield Sample("int32", (make.ids(3, 4, high=20).int(), *_table(make, 20, 33)), to)
    yield Sample("prefetch", (make.ids(90, high=64), *_table(make, 64, 200)), {**to, "prefetch": 3})
    yield Sample(
        "next ids", (make.ids(4, high=9), *_table(make, 9, 70)), {**to, "next_ids": make.ids(2, 3, high=9)}
    )
    yield Sample("scalar id", (make.ids(high=7), *_table(make, 7, 5)), to)
    yield Sample("strided ids", (make.ids(6, 4, high=9).t(), *_table(make, 9, 16)), to)
    table, scale = _table(make, 9, 40)
    yield Sample("strided table", (make.ids(11, high=9), table[:, 3:27], scale), to)
    yield Sample("strided scale", (make.ids(11, high=9), table, scale.repeat_interleave(2)[::2]), to)
    yield Sample("transposed table", (make.ids(11, high=40), table.t(), make(40).float()), to)
    tiny = torch.tensor([0.0, 1e-40, 1e-8], device=make.device)
    yield Sample("zero and tiny scales", (make.ids(11, high=3), table[:3], tiny), to)
    yield Sample("empty", (make.ids(0, high=9), *_table(make, 9, 16)), to)


def _workloads(make: Make) -> Iterator[Sample]:
    to = {"dtype": make.dtype}
    yield Sample("4096 of 64000x512", (make.ids(4096, high=64000), *_table(make, 64000, 512)), to)
    yield Sample("1 of 64000x512", (make.ids(1, 1, high=64000), *_table(make, 64000, 512)), to)


CARD = _CALL.card(
    kind=Kind.EMBEDDING,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    # No model writes this as plain PyTorch, so there is nothing to recognize: QuantizedEmbedding is put in.
    schemas=declare(SIGNATURE, "embedding"),
    source="Guan et al., 2019",
)
