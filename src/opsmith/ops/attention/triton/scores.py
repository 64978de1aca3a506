"""What attention's kernels share, forward and backward: where a tile lies, which keys it sees, its products and scores,
and how a launch is described.

Packed sequences are one long row of tokens, [1, H, T, D]; a program finds the sequence of its tile by bisection, so
nothing waits for the lengths to come back from the device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.call.arguments import Maybe
from opsmith.kernels.triton import INTERPRETED
from opsmith.kernels.triton.common import dot, exponential, inner, rounded

LOG2E = tl.constexpr(1.4426950408889634)


@inner
def place(
    q_starts,
    k_starts,
    sequences,
    queries,
    keys,
    tile,
    BLOCK: tl.constexpr,
    OF_KEYS: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Of the sequence a tile lies in: the tile's first row, where queries and keys begin, and how many they are."""
    first = tile.to(tl.int64) * BLOCK
    q0 = tl.full((), 0, tl.int64)
    k0 = tl.full((), 0, tl.int64)
    n = q0 + queries
    m = k0 + keys
    if VARLEN:
        # Sequence i owns the tiles from starts[i] // BLOCK + i on: enough for it, whatever its length.
        starts = k_starts if OF_KEYS else q_starts
        low = 0
        high = sequences
        while high - low > 1:
            middle = (low + high) // 2
            below = tl.load(starts + middle) // BLOCK + middle <= tile
            low = tl.where(below, middle, low)
            high = tl.where(below, high, middle)
        # Offsets on a GPU are not validated, so they are held to the tensors here.
        q0 = tl.minimum(tl.maximum(tl.load(q_starts + low).to(tl.int64), 0), queries)
        k0 = tl.minimum(tl.maximum(tl.load(k_starts + low).to(tl.int64), 0), keys)
        n = tl.minimum(tl.maximum(tl.load(q_starts + low + 1).to(tl.int64), q0), queries) - q0
        m = tl.minimum(tl.maximum(tl.load(k_starts + low + 1).to(tl.int64), k0), keys) - k0
        first = (tile - tl.load(starts + low) // BLOCK - low).to(tl.int64) * BLOCK
    return first, q0, n, k0, m


@inner
def load_rows(x, at, stride, limit, lanes, width, EVEN: tl.constexpr):
    """Rows `at` of a matrix, zeros from row `limit` and column `width` on."""
    p = x + at[:, None] * stride + lanes[None, :]
    if EVEN:
        return tl.load(p, mask=(at < limit)[:, None], other=0.0)
    return tl.load(p, mask=(at < limit)[:, None] & (lanes < width)[None, :], other=0.0)


@inner
def store_rows(x, at, stride, limit, lanes, width, value):
    p = x + at[:, None] * stride + lanes[None, :]
    tl.store(p, rounded(value, x), mask=(at < limit)[:, None] & (lanes < width)[None, :])


@inner
def saturate(x):
    """tanh, exact to an ulp or so near zero too: a softcap multiplies its error."""
    x2 = x * x
    p = x2 * -8.8632355e-3 + 2.1869488e-2
    p = p * x2 - 5.3968254e-2
    p = p * x2 + 1.3333333e-1
    p = p * x2 - 3.3333333e-1
    near = x + x * x2 * p
    far = 1.0 - 2.0 / (tl.exp2(tl.minimum(tl.abs(x), 20.0) * (2.0 * LOG2E)) + 1.0)
    return tl.where(tl.abs(x) < 0.35, near, tl.where(x < 0, -far, far))


@inner
def visible(i, j, n, m, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether query i of n sees key j of m: both broadcast against each other."""
    seen = (i < n) & (j < m)
    if CAUSAL:
        seen &= j <= i + (m - n)
    if WINDOW:
        seen &= i + (m - n) - j < window
        if not CAUSAL:
            seen &= j - i - (m - n) < window
    return seen


@inner
def biased(s, slope, i, j, n, m):
    """Scores with ALiBi's bias: query i of n stands at the position of key i + m - n."""
    return s + slope * (j - i - (m - n)).to(tl.float32)


@inner
def masked(s, mask, i, j, n, m, m_l, m_s, MASK: tl.constexpr):
    """Scores under a mask: 1 is boolean, 2 additive. i and j are broadcast against each other."""
    if MASK == 1:
        keep = tl.load(mask + i * m_l + j * m_s, mask=(i < n) & (j < m), other=0)
        s = tl.where(keep != 0, s, float("-inf"))
    if MASK == 2:
        s += tl.load(mask + i * m_l + j * m_s, mask=(i < n) & (j < m), other=0.0).to(tl.float32)
    return s


@inner
def key_range(first, n, m, window, BM: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The keys that some query of a tile sees."""
    begin = m * 0
    end = m
    last = tl.minimum(first + BM, n) - 1 + (m - n)
    if CAUSAL:
        end = tl.minimum(m, last + 1)
    if WINDOW:
        begin = tl.maximum(begin, first + (m - n) - window + 1)
        if not CAUSAL:
            end = tl.minimum(m, last + window)
    return begin, end


@inner
def halves(x):
    """Every other column of a matrix, and the others."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@inner
def against(a, b):
    """a @ b.T of two matrices of rows.

    float32 is summed by one multiplication and addition after another, and an error of the scores is one of every
    weight's exponent: there the columns are divided between four sums, which are added at the end.
    """
    wide: tl.constexpr = a.shape[1] if a.dtype == tl.float32 else 0
    # Triton 3.6 compiles what follows a `return`, for which the shapes are wrong.
    if wide >= 64:
        a0, a1 = halves(a)
        b0, b1 = halves(b)
        s = _in_two(a0, b0) + _in_two(a1, b1)
    elif wide == 32:
        s = _in_two(a, b)
    else:
        s = dot(a, tl.trans(b))
    return s


@inner
def _in_two(a, b):
    a0, a1 = halves(a)
    b0, b1 = halves(b)
    return dot(a0, tl.trans(b0)) + dot(a1, tl.trans(b1))


@inner
def weight(s, factor, like):
    """e^(factor s), in float32 as exact as PyTorch's."""
    return exponential(s * factor) if like.dtype == tl.float32 else tl.exp2(s * (factor * LOG2E))


class Sequences:
    """Where packed sequences begin, as a launch is given it; none in dense tensors."""

    def __init__(self, q_starts: Maybe, k_starts: Maybe) -> None:
        self.count = 0 if q_starts is None else q_starts.numel() - 1
        starts = (None if t is None else t.contiguous() for t in (q_starts, k_starts))
        self.arguments = (*starts, self.count)
        self.packed = q_starts is not None

    def dense(self, x: Any) -> Any:
        """[T, H, ...] as a tensor of one batch, [1, H, T, ...]."""
        return x.transpose(0, 1)[None] if self.packed and x is not None else x

    def tiles(self, length: int, block: int) -> int:
        """Tiles of so many rows that all of the length takes."""
        if not length:
            return 0
        return length // block + self.count if self.packed else triton.cdiv(length, block)


def options(
    q: Tensor, v: Tensor, mask: Maybe, alibi: Maybe, scale: float, causal: bool, window: int, softcap: float
) -> dict[str, Any]:
    """What forward and backward are specialized for."""
    dim, value_dim = q.shape[3], v.shape[3]
    wide, wide_values = (max(triton.next_power_of_2(d), 16) for d in (dim, value_dim))
    additive = mask is not None and mask.dtype != torch.bool
    return {
        "BD": wide,
        "BDV": wide_values,
        "CAUSAL": causal,
        "WINDOW": window > 0,
        "SOFTCAP": softcap > 0,
        "MASK": 0 if mask is None else 2 if additive else 1,
        "PLAIN": mask is None and alibi is None and softcap <= 0 and scale > 0,
        "EVEN": wide == dim and wide_values == value_dim,
    }


def blocks(q: Tensor, v: Tensor, *, backward: bool) -> dict[str, int]:
    """Rows and columns of a tile, warps and stages, from what a multiprocessor's shared memory holds."""
    if INTERPRETED:
        return {"BM": 64, "BN": 32}
    width = max(q.shape[3], v.shape[3])
    if q.dtype == torch.float32:
        small = width > 64
        return {"BM": 32 if small else 64, "BN": 32, "num_warps": 4, "num_stages": 1 if small else 2}
    if backward:
        if width <= 64:
            return {"BM": 64, "BN": 128, "num_warps": 8, "num_stages": 2}
        return {
            "BM": 64,
            "BN": 64 if width <= 128 else 32,
            "num_warps": 8 if width <= 128 else 4,
            "num_stages": 2,
        }
    if width <= 64:
        return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
    if width <= 128:
        return {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    return {"BM": 64, "BN": 32, "num_warps": 4, "num_stages": 2}


def strides(*tensors: Maybe) -> list[int]:
    """Strides over batch, head and token of each tensor, zeros for one that is not there."""
    return [step for t in tensors for step in (t.stride()[:3] if t is not None else (0, 0, 0))]


def mask_arguments(mask: Maybe, q: Tensor, k: Tensor) -> tuple[Maybe, tuple[int, ...]]:
    """The mask as memory that Triton reads, and its four strides, 0 where it is broadcast."""
    if mask is None:
        return None, (0, 0, 0, 0)
    steps = mask.expand(*q.shape[:3], k.shape[2]).stride()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask, steps
