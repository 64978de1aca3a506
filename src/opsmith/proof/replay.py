"""A call as text and back: `x=float32[1,128,512] weight=float32[512] eps=1e-06`, to be timed again by itself.

Strides stand behind an `@` where a tensor is not contiguous, and behind `<` what integers stay below: without that,
random ones would point outside of a table.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from opsmith.operator import Make, Operator, Sample

_TENSOR = re.compile(r"(?:(\w+):)?([a-z]+\d*)\[([\d,]*)\](?:@([\d,]+))?(?:<(\d+))?")


def spell(card: Operator, call: Mapping[str, Any]) -> str | None:
    """A call's text; None where its integers mean what random ones could not.

    >>> spell(registry()["rms_norm"], {"x": torch.zeros(2, 3), "eps": 1e-6})
    'x=float32[2,3] eps=1e-06'
    """
    parts = []
    for name, value in call.items():
        if isinstance(value, Tensor):
            text = f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
            if not value.is_contiguous():
                text += f"@{','.join(map(str, value.stride()))}"
            if not value.dtype.is_floating_point and value.dtype != torch.bool:
                high = _below(card, name, call)
                if high is None:
                    return None
                text += f"<{high}"
        elif isinstance(value, bool | int | float | str) and re.fullmatch(r"[\w.+-]+", str(value)):
            text = str(value)
        elif value is None:
            continue
        else:
            return None
        parts.append(f"{name}={text}")
    return " ".join(parts)


def _below(card: Operator, name: str, call: Mapping[str, Any]) -> int | None:
    """What the integers of an input stay below, where any such will do."""
    classes = ("logits", -1) if "logits" in call else ("weight", 0)
    tables = {"ids": ("table", 0), "target": classes, "positions": ("cos", -2)}
    table, axis = tables.get(name, ("", 0))
    found = call.get(table)
    return int(found.shape[axis]) if isinstance(found, Tensor) and found.dim() else None


def call_of(text: str, make: Make | None = None) -> dict[str, Any]:
    """The call that a text describes: with random tensors of `make`, or without one with tensors that have no memory.

    >>> call_of("weight=cpu:float32[3,4] x=cpu:float32[2,4] activation=gelu")["x"].shape
    torch.Size([2, 4])

    Raises:
        ValueError: a part that says nothing.
    """
    call: dict[str, Any] = {}
    for part in text.split():
        name, _, value = part.partition("=")
        if not name.isidentifier() or not value:
            raise ValueError(f"{part!r} says nothing; write name=float32[2,3], name=0.5 or name=word")
        tensor = _TENSOR.fullmatch(value)
        call[name] = _setting(value) if tensor is None else _tensor(part, tensor, make)
    return call


def _setting(text: str) -> Any:
    for read in (ast.literal_eval, float):  # the second for inf and nan
        with suppress(SyntaxError, ValueError):
            return read(text)
    return text


def _tensor(part: str, found: re.Match[str], make: Make | None) -> Tensor:
    dtype = getattr(torch, found[2], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{part!r}: PyTorch has no dtype {found[2]!r}")
    sizes = [int(n) for n in found[3].split(",") if n]
    strides = [int(n) for n in found[4].split(",")] if found[4] else None
    if strides is not None and len(strides) != len(sizes):
        raise ValueError(f"{part!r}: {len(sizes)} sizes and {len(strides)} strides")
    if make is None:
        values = torch.empty(sizes, dtype=dtype, device="meta")
    elif dtype == torch.bool:
        values = make.mask(*sizes)
    elif dtype.is_floating_point:
        values = make(*sizes).to(dtype)
    elif found[5] is None:
        raise ValueError(f"{part!r}: integers need a bound, as in name=int64[2,3]<100")
    else:
        values = make.ids(*sizes, high=int(found[5])).to(dtype)
    if strides is None:
        return values
    return torch.empty_strided(sizes, strides, dtype=dtype, device=values.device).copy_(values)


def sample_of(card: Operator, text: str, device: str = "cpu") -> tuple[Sample, torch.dtype]:
    """An input of a card from a text, and its dtype: that of the first tensor of floating-point numbers.

    Raises:
        ValueError: a part that says nothing, or a name that the operator does not take.
    """
    described = call_of(text)
    floats = [v.dtype for v in described.values() if isinstance(v, Tensor) and v.is_floating_point()]
    dtype = floats[0] if floats else torch.float32
    call = call_of(text, Make(dtype, device))
    parameters = inspect.signature(card.function).parameters
    try:
        bound = inspect.signature(card.function).bind(**call)
    except TypeError as error:
        raise ValueError(f"{card.name} takes {', '.join(parameters)}: {error}") from None
    name = " ".join(
        f"{n} {'x'.join(map(str, v.shape))}" if isinstance(v, Tensor) else f"{n}={v}" for n, v in call.items()
    )
    return Sample(name, bound.args, bound.kwargs), dtype
