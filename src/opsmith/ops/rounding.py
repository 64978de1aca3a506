"""Rounding matrices of floats to few bits, some rows at a time, and what that takes from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class RoundingError:
    """What rounding took from a matrix: `relative` is the root of the summed squares, over the matrix's.

    `result` is the same of the products with the inputs that a matrix was rounded for; None without any.
    """

    relative: float
    result: float | None = None


class KeepsDtypes(nn.Module):
    """A module some of whose buffers have the dtypes that they are rounded to, whatever the module is cast to."""

    kept: tuple[str, ...]  # these buffers

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`.to`, `.half()`, `.cuda()`."""
        before = {name: self._buffers.get(name) for name in self.kept}
        super()._apply(fn, recurse)
        for name, t in before.items():
            now = self._buffers.get(name)
            if t is not None and now is not None and now.dtype != t.dtype:
                self._buffers[name] = t.to(now.device)
        return self


def round_in_parts(
    matrix: Tensor, rows: int, keep: Callable[[slice, Tensor], Tensor], every: str = ""
) -> RoundingError:
    """Round a matrix so many rows at a time: float32 copies of the whole need not fit.

    Args:
        matrix: any floating-point dtype.
        rows: how many at a time.
        keep: stores some rows, which it is given with their place, and returns what they stand for from now on.
        every: what must be finite, as a message calls it; nothing, if that is not asked for.

    Raises:
        ValueError: a number that is not finite.
    """
    lost, total = 0.0, 0.0
    for first in range(0, matrix.shape[0] if matrix.numel() and not matrix.is_meta else 0, rows):
        part = matrix[first : first + rows].float()
        if every and (bad := (~part.isfinite()).any(1).nonzero()).numel():
            raise ValueError(
                f"{every} must be finite, row {first + int(bad[0])} holds NaN or an infinity; "
                "no scale represents it: mend the row first"
            )
        error = part - keep(slice(first, first + part.shape[0]), part)
        lost += _squared(error)
        total += _squared(part)
    return RoundingError((lost / total) ** 0.5 if total else 0.0)


def round_rows(part: Tensor, most: int = 127) -> tuple[Tensor, Tensor]:
    """Rows as whole numbers in [-most, most], and their scales: the largest magnitude becomes the most.

    A scale is never zero, so that a row of zeros divides by something, and never so small that it loses its own digits.
    """
    scale = (part.abs().amax(-1) / most).clamp_(min=TINY)
    return (part / scale[..., None]).round_().clamp_(-most, most), scale


def on_grid(numbers: Tensor, scale: Tensor, middle: Tensor | float) -> Tensor:
    """The nearest of 0..15 for each number, which stands for `(it - middle) scale`."""
    return (numbers / scale).round_().add_(middle).clamp_(0, 15)


def _squared(t: Tensor) -> float:
    """The sum of its squares, in float64: a norm converts as it sums, in a quarter of the time."""
    return float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2
