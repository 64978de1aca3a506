"""How models write the rotary embedding: on halves, on neighbors, on a part of each head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from opsmith.operator import Pattern, Recognition


def _halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first columns of x in pairs from two halves; cos and sin have a column for each pair."""
    size = cos.shape[-1]
    first, second, rest = x[..., :size], x[..., size : 2 * size], x[..., 2 * size :]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, -1)


def _neighbors(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first columns of x in pairs of neighbors."""
    size = cos.shape[-1]
    turned, rest = x[..., : 2 * size], x[..., 2 * size :]
    first, second = turned[..., ::2], turned[..., 1::2]
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _neighbors_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbors that are left as halves (DeepSeek-V3)."""
    first, second = x[..., ::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves, with a column of cos and sin for every column that is rotated, whatever stands in them."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def _back(turn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """By minus the angle (nanochat)."""
    return lambda x, cos, sin: turn(x, cos, -sin)


def _pattern(
    name: str,
    fn: Callable[..., Tensor],
    size: int,
    columns: int,
    pairs: int,
    converted: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    **fixed: Any,
) -> Pattern:
    table = ("B", 1, "L", columns)
    return Pattern(
        name,
        fn,
        {"x": ("B", "H", "L", size), "cos": table, "sin": table},
        fixed=fixed,
        recognition=Recognition(
            layouts=((0, 1, 2, 3), (0, 2, 1, 3), (1, 2, 0, 3), (0, 1, 2), (1, 0, 2)),
            shared={"cos": 1, "sin": 1},
            converted=converted,
            sizes={} if size == 2 * pairs else {"rotary_dim": ("cos", 2 * pairs // columns)},
        ),
    )


# The first ones of all pairs of neighbors, then the second ones.
_TO_HALVES = {"x": lambda x: x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)}
PATTERNS = (
    _pattern("rope(x, cos, sin), halves", _halves, 6, 3, 3),
    _pattern("rope(x, cos, sin), halves, partial", _halves, 11, 3, 3),
    _pattern("rope(x, cos, sin), neighbors", _neighbors, 6, 3, 3, interleaved=True),
    _pattern("rope(x, cos, sin), neighbors, partial", _neighbors, 11, 3, 3, interleaved=True),
    _pattern("rope(x, cos, sin), neighbors to halves", _neighbors_to_halves, 6, 3, 3, _TO_HALVES),
    _pattern("rope(x, cos, sin), a column each", _wide, 6, 6, 3),
    _pattern("rope(x, cos, sin), halves, back", _back(_halves), 6, 3, 3, {"sin": torch.neg}),
    _pattern("rope(x, cos, sin), a column each, back", _back(_wide), 6, 6, 3, {"sin": torch.neg}),
    _pattern("rope(x, cos, sin), a column each, partial", _wide, 11, 6, 3),
)
