"""What is wrong with a call, read from its signature: the messages of every operator, in one form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import (
    alike,
    check_dtype,
    check_float,
    check_like,
    check_number,
    check_out,
    earlier,
    one_of,
    short,
)
from opsmith.call.signature import Dtype, Input, Output, Signature


def check_arguments(op: str, signature: Signature, values: Sequence[Any], needed: Sequence[str] = ()) -> None:
    """Refuse what is no tensor, has another shape or dtype than the first one asks for, or is no number.

    Args:
        op: the operator, as messages call it.
        signature: of its kernel.
        values: of the kernel's arguments, in their order.
        needed: optional ones that this operator needs all the same.
    """
    first = signature.tensors[0]
    x = values[0]
    scalar = first.scalar and not needed
    check_float(op, x, first.name, least_dim=0 if scalar else 1)
    for one, value in zip(signature.arguments[1:], values[1:], strict=True):
        if not isinstance(one, Input):
            if value is not None or not one.optional:
                check_number(op, one.name, value, one.within, whole=one.type is int)
        elif value is not None or not one.optional or one.name in needed:
            shape = x.shape if one.sizes == first.sizes else x.shape[-1:]
            if not alike(value, x, shape):
                _refuse(op, one, value, first, x, shape)


def _refuse(op: str, one: Input, t: Any, first: Input, x: Tensor, shape: torch.Size) -> None:
    what = "the shape of {}" if one.sizes == first.sizes else "the size of {}'s last dimension"
    check_like(op, t, x, one.name, shape, what.format(first.name), first.name)
    if one.dtype is Dtype.FIRST:
        check_dtype(op, t, x, one.name, first.name)
    elif t.dtype not in (x.dtype, torch.float32):
        known = one_of(x.dtype, torch.float32)
        raise TypeError(f"{op}: {one.name} must be {known}, got {short(t.dtype)}; cast it first")


def check_outputs(
    op: str,
    out: Any,
    results: Sequence[tuple[Output, Sequence[int], torch.dtype]],
    x: Tensor,
    read: Mapping[str, Any],
    what: str = "",
) -> None:
    """Refuse an `out` of another type, shape, dtype or device, or one that shares memory with what is read.

    Args:
        op: the operator.
        out: what the caller wants written: a tensor, or as many as there are results.
        results: their declarations, shapes and dtypes.
        x: on whose device they are.
        read: what is read, by name.
        what: an `out` has to be, where not that many tensors.
    """
    many = {1: "a tensor", 2: "a pair of tensors", 3: "a triple of tensors"}.get(
        len(results), f"a tuple of {len(results)} tensors"
    )
    if not isinstance(out, tuple | Tensor):
        raise TypeError(f"{op}: out must be {many}, got {type(out).__name__}")
    given = out if isinstance(out, tuple) else (out,)
    if (n := len(given)) != len(results) or not all(isinstance(t, Tensor) for t in given):
        got = f"{n} tensor{'s' * (n != 1)}" if n != len(results) else type(given[0]).__name__
        raise (ValueError if n != len(results) else TypeError)(f"{op}: out must be {what or many}, got {got}")
    for i, (t, (one, shape, dtype)) in enumerate(zip(given, results, strict=True)):
        check_out(op, t, x, torch.Size(shape), dtype, onto=one.onto, **read, **earlier(given, i))


def sizes_of(
    op: str, signature: Signature, tensors: Sequence[Tensor], even: Sequence[str] = ()
) -> dict[str, Any]:
    """What each symbol of the inputs' sizes stands for.

    Raises:
        ValueError: a shape that does not fit.
    """
    found: dict[str, Any] = {}
    for one, t in zip(signature.tensors, tensors, strict=True):
        sizes: list[Any] = [*t.shape]
        if one.sizes[:1] == ("...",):
            lead = max(0, len(sizes) - len(one.sizes) + 1)
            sizes[:lead] = [t.shape[:lead]]
        if len(sizes) != len(one.sizes) or any(
            (found.setdefault(symbol, size) if isinstance(symbol, str) else symbol) != size
            for symbol, size in zip(one.sizes, sizes, strict=True)
        ):
            known = ", ".join(
                f"{k} = {tuple(v) if k == '...' else v}" for k, v in found.items() if k in one.sizes
            )
            raise ValueError(
                f"{op}: {one.name} must have shape [{', '.join(map(str, one.sizes))}]"
                f"{f' with {known}' if known else ''}, got {tuple(t.shape)}"
            )
    for symbol in even:
        if found[symbol] % 2:
            raise ValueError(f"{op}: {symbol} must be even, as its elements are pairs; got {found[symbol]}")
    return found
