"""What the Triton kernels share: how they are launched, and how they take the matrix units."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from opsmith.kernels.triton import INTERPRETED, later

# The interpreter keeps bfloat16 as raw bits and would multiply those: there, matrices are widened first.
_WIDEN = tl.constexpr(INTERPRETED)
_TRUNCATES = tl.constexpr(INTERPRETED)  # to bfloat16, where a GPU rounds
SETTINGS = ("num_warps", "num_stages", "enable_fp_fusion")  # what a launch says to the compiler


def inner(fn: Any) -> Any:
    """`triton.jit` for what kernels call: the interpreter, which would prepare itself anew for each such call, is
    spared that by plain functions."""
    return fn if INTERPRETED else triton.jit(fn)


@inner
def dot(a, b, acc=None):
    """a @ b (+ acc) in float32, on the matrix units in the inputs' dtype."""
    if _WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if acc is None:  # which Triton 3.2 takes for a tensor when it is handed on
        return tl.dot(a, b, input_precision="ieee")
    else:  # what follows such a return would be compiled there all the same
        return tl.dot(a, b, acc, input_precision="ieee")


@inner
def integer_dot(a, b, acc):
    """a @ b + acc of bytes, in int32. The interpreter multiplies in float32, exact for a block of K."""
    if _WIDEN:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee").to(tl.int32)
    return tl.dot(a, b, acc, out_dtype=tl.int32)


@inner
def integers_like(whole, x):
    """Integers in x's dtype, which holds them; in float32 where `dot` would widen them again."""
    if _WIDEN:
        return whole.to(tl.float32)
    return whole.to(x.dtype)


@inner
def narrow(a, like):
    """A float32 matrix in the dtype of the one that it will multiply; as it is, where `dot` would widen it again."""
    if _WIDEN:
        return a
    return a.to(like.dtype)


@inner
def rounded(value, like):
    """A float32 value in the dtype that pointer `like` points to, rounded to nearest under the interpreter too."""
    if _TRUNCATES and like.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)  # 0 stays 0
    return value.to(like.dtype.element_ty)


_HALF_EVEN = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bits for a fraction


@inner
def nearest(v):
    """The nearest whole number, half to even, of float32 up to 2^22."""
    return (v + _HALF_EVEN) - _HALF_EVEN


_LOG2E = tl.constexpr(1.44269502162933349609375)  # in float32, and what that leaves
_LOG2E_REST = tl.constexpr(1.925963033500e-8)
_LN2 = tl.constexpr(0.6931471805599453)


@inner
def exponential(x):
    """e^x of float32, to two units in the last place or so whatever x: `tl.exp` rounds x log2(e), which costs |x| of
    them. Here the product's own error comes back as a factor."""
    product = x * _LOG2E
    rest = tl.fma(x, _LOG2E_REST, tl.fma(x, _LOG2E, -product))
    power = tl.exp2(product)
    return tl.where(tl.abs(product) < 126.0, tl.fma(power, rest * _LN2, power), power)


@inner
def exp_for(x, like):
    """e^x as exact as what pointer `like` points to can tell."""
    return exponential(x) if like.dtype.element_ty == tl.float32 else tl.exp(x)


@inner
def quotient_for(a, b, like):
    """a / b, the same: the nearest float32 takes several instructions more."""
    return tl.div_rn(a, b) if like.dtype.element_ty == tl.float32 else a / b


@triton.jit
def report(bad, token, inside):
    """Keeps the first position whose row lies outside the table."""
    if inside == 0:
        tl.atomic_min(bad, token)


def flag(ids: Tensor) -> Tensor:
    """Where a kernel reports the first position whose row lies outside the table."""
    return torch.full((1,), ids.numel(), dtype=torch.int64, device=ids.device)


def check(bad: Tensor, op: str, ids: Tensor, rows: int, name: str = "ids") -> None:
    """Raise if a row was outside the table. Waits for the kernel; while a CUDA graph is captured, that is left to
    whoever replays it, where he has asked.

    PyTorch's own kernel stops the device in that case, and with it the process.
    """
    count = ids.numel()

    def look(at: int) -> None:
        if at < count:
            raise RuntimeError(
                f"{op}: {name} must lie in [0, {rows}), the rows of the table; position {at} does not"
            )

    if not bad.is_cuda or not torch.cuda.is_current_stream_capturing():
        look(int(bad))
    elif later.asked is not None:
        later.asked.append((bad, look))


def as_rows(x: Tensor) -> Tensor:
    """A tensor of any dimensions as [rows, n], a view: operators hand over what has one."""
    return x if x.dim() == 2 else x.view(-1, x.shape[-1]) if x.numel() else x.view(0, 1)


def block_of(n: int, largest: int = 16384) -> int:
    """The power of two that holds a row of n, at most `largest`."""
    return int(min(max(triton.next_power_of_2(n), 16), largest))


def warps_of(block: int) -> int:
    """Warps for a program that holds `block` elements."""
    return min(max(block // 512, 1), 16)


def in_registers(n: int, largest: int = 16384) -> dict[str, int]:
    """How a program takes a row of n: `BLOCK` elements at a time, and by how many warps."""
    block = block_of(n, largest)
    return {"BLOCK": block, "num_warps": warps_of(block)}


def steps(*tensors: Tensor | None) -> tuple[int, ...]:
    """How far the rows of each are apart; 0 where there is none."""
    return tuple(0 if t is None else t.stride(0) for t in tensors)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run a kernel on the device of its first tensor; an empty grid is no launch.

    A kernel that rounds to integers says `enable_fp_fusion=False`: a product that is not rounded before the sum that
    rounds it falls on the other side of a tie.
    """
    if 0 in grid:
        return
    if INTERPRETED:
        options = {name: value for name, value in options.items() if name not in SETTINGS}
        with np.errstate(invalid="ignore"):  # inf - inf is NaN, and no news to a GPU
            kernel[grid](*args, **options)
        return
    with torch.cuda.device(next(a for a in args if isinstance(a, Tensor)).device):
        kernel[grid](*args, **options)


def processors(like: Tensor) -> int:
    """Multiprocessors of the device: how many programs a persistent grid has."""
    return 4 if INTERPRETED else torch.cuda.get_device_properties(like.device).multi_processor_count
