"""What the Triton kernels of MLA share: rotation, where a row lies in the cache."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton.common import inner


@inner
def turned(x, cos, sin, row, pair, half, mask, second, INTERLEAVED: tl.constexpr, TURN: tl.constexpr):
    """Both numbers of each pair of x, rotated, and where they stand; row `row` of the table begins `second` apart."""
    first = pair
    other = pair + half
    if INTERLEAVED:
        first = 2 * pair
        other = first + 1
    a = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + other, mask=mask, other=0.0).to(tl.float32)
    if TURN:
        cos1 = tl.load(cos + row + pair, mask=mask, other=0.0).to(tl.float32)
        sin1 = tl.load(sin + row + pair, mask=mask, other=0.0).to(tl.float32)
        cos2 = tl.load(cos + row + pair + second, mask=mask, other=0.0).to(tl.float32)
        sin2 = tl.load(sin + row + pair + second, mask=mask, other=0.0).to(tl.float32)
        c = a * cos1 - b * sin1
        b = b * cos2 + a * sin2
        a = c
    return first, other, a, b


def layout(t: Tensor, tiled: bool) -> tuple[int, int, int, int]:
    """Strides of a block, of a tile and of a token in a cache's tensor, and how wide a tile is."""
    if tiled:
        return t.stride(0), t.shape[2] * t.shape[3], t.shape[3], max(t.shape[3], 1)
    return t.stride(0), 0, t.stride(1), max(t.shape[3], 1)


def table_of(cos: Tensor | None, sin: Tensor | None, rope: int) -> tuple[Any, Any, int, int]:
    """The table as one dtype and stride, and how far the columns of a pair's second number are."""
    if cos is None or sin is None:
        return None, None, 0, 0
    if sin.stride(0) != cos.stride(0) and cos.shape[0] > 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, cos.stride(0), (rope // 2 if cos.shape[1] == rope else 0)


def power(n: int, least: int = 16) -> int:
    return int(max(triton.next_power_of_2(max(n, 1)), least))
