"""The checks of the rotary embeddings: heads, the table of angles, and positions in it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import check_device, check_fit, check_float, check_number, one_of, short

Pair = tuple[Tensor, Tensor]


class PositionError(IndexError, ValueError):
    """A position that the table has no row for: an IndexError as in PyTorch, and a ValueError as in opsmith."""


def check(op: str, x: Any, cos: Any, sin: Any, positions: Any, dims: int) -> None:
    """Refuse wrong arguments; `dims` are rotated."""
    check_float(op, x, "q" if op == "rope_qk" else "x", least_dim=3)
    check_table(op, x, cos, sin, positions, dims, x.shape[-1], *check_heads(op, x))


def check_heads(op: str, x: Tensor) -> tuple[int, int]:
    """Refuse what is neither layout of heads; the batch and the tokens of a sequence."""
    shape = x.shape
    if len(shape) == 3:
        return 1, shape[0]
    if len(shape) != 4:
        raise ValueError(f"{op}: expected [B, H, L, D] or [T, H, D], got shape {tuple(shape)}")
    return shape[0], shape[2]


def check_table(
    op: str,
    x: Tensor,
    cos: Any,
    sin: Any,
    positions: Any,
    dims: int,
    size: int,
    batch: int,
    tokens: int,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    """Refuse a table that does not serve these tokens' heads of this size, of which `dims` are rotated."""
    check_number(op, "rotary_dim", dims, whole=True)
    if dims % 2 or not 2 <= dims <= size:
        raise ValueError(
            f"{op}: rotary_dim, by default the head size, must be an even number in [2, {size}], got {dims}"
        )
    for name, t in (("cos", cos), ("sin", sin)):
        check_float(op, t, name, least_dim=2)
        if t.dtype not in (dtypes or (x.dtype, torch.float32)):
            known = one_of(*(dtypes or (x.dtype, torch.float32)))
            raise TypeError(f"{op}: {name} must be {known}, got {short(t.dtype)}")
        check_device(op, t, x, name, "the input")
    given = cos.shape
    if sin.shape != given or sin.dtype != cos.dtype:
        raise ValueError(
            f"{op}: cos and sin must be alike, got {short(cos.dtype)} {tuple(given)} "
            f"and {short(sin.dtype)} {tuple(sin.shape)}"
        )
    other_batch = len(given) == 3 and given[0] not in (1, batch)
    if len(given) > 3 or given[-1] not in (dims, dims // 2) or other_batch:
        raise ValueError(
            f"{op}: cos and sin must have shape [rows, {dims}] or [rows, {dims // 2}], or [B, rows, ...] with "
            f"B = {batch}, got {tuple(given)}"
        )
    if positions is None:
        if given[-2] < tokens:
            raise PositionError(
                f"{op}: cos and sin must have a row for each of the {tokens} tokens, got {given[-2]}; "
                "make a longer table, or pass positions"
            )
        return
    _check_positions(op, positions, x, batch, tokens)
    if len(given) == 3 and given[0] != 1:
        raise ValueError(
            f"{op}: positions choose rows of one table, got one table for each of {given[0]} sequences; "
            "leave positions out, or pass cos and sin as [rows, D]"
        )


def _check_positions(op: str, positions: Any, x: Tensor, batch: int, tokens: int) -> None:
    if not isinstance(positions, Tensor):
        raise TypeError(f"{op}: positions must be a tensor, got {type(positions).__name__}")
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{op}: positions must be int64 or int32, got {short(positions.dtype)}; cast them")
    if positions.device != x.device:
        raise ValueError(
            f"{op}: positions are on {positions.device}, the input on {x.device}; move one of them"
        )
    shape = positions.shape
    if len(shape) not in (1, 2) or shape[-1] != tokens or (len(shape) == 2 and shape[0] not in (1, batch)):
        raise ValueError(
            f"{op}: positions must have shape ({tokens},) or ({batch}, {tokens}), one for each token, "
            f"got {tuple(shape)}"
        )


def check_key(q: Tensor, k: Any) -> None:
    """Refuse keys that are not as the queries, but for the number of heads."""
    rest = "D" if q.dim() == 3 else "L D"
    check_fit("rope_qk", ("q", q, f"B H {rest}"), ("k", k, f"B Hkv {rest}"))


def name_bad_position(positions: Tensor | None, table: Tensor, op: str = "rope") -> None:
    """What a refusal was about, where it was a position: the first without a row."""
    rows = table.shape[-2]
    bad = None if positions is None else positions[(positions < 0) | (positions >= rows)]
    if bad is not None and len(bad):
        raise PositionError(
            f"{op}: positions must be in [0, {rows}) for a table of {rows} rows, got {int(bad[0])}; "
            "make a longer table"
        ) from None
