"""Rounding a weight so that the layer's results change least on inputs that it was seen with."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from opsmith.ops.rounding import on_grid

_COLUMNS = 128  # whose errors are carried on to the others together
_DAMPING = (0.01, 0.1, 1.0, 10.0)  # of the mean of the diagonal: more where the sums are not definite enough


class Inputs:
    """What a layer's inputs were like: the sum of `x^T x` over all rows, [K, K] in float32.

    >>> inputs = Inputs(64)
    >>> inputs.add(torch.randn(1000, 64))
    >>> PackedLinear.from_linear(torch.nn.Linear(64, 48), format="int4", group_size=32, inputs=inputs).error.result

    A result changes by `x e`, with e the error of a weight's row; squared and summed over the inputs that is
    `e H e^T`, H this sum. So the columns of a weight are rounded one by one, those of the largest inputs first, and
    what each loses is made up for in the columns that are still to come, by the inverse of H.

    Args:
        k: numbers of a row of inputs.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023.
    """

    def __init__(self, k: int, device: torch.device | str | None = None) -> None:
        self.sum = torch.zeros(k, k, device=device)
        self.rows = 0

    def add(self, x: Tensor) -> None:
        """Take in more inputs [..., K].

        Raises:
            ValueError: for another K, or numbers that are not finite.
        """
        k = len(self.sum)
        if x.shape[-1] != k:
            raise ValueError(f"Inputs: expected inputs [..., {k}], got {tuple(x.shape)}")
        rows = x.detach().reshape(-1, k).to(self.sum.device, torch.float32)
        if not bool(rows.isfinite().all()):
            raise ValueError("Inputs: inputs must be finite, got NaN or an infinity")
        self.sum.addmm_(rows.t(), rows)
        self.rows += len(rows)
        self.__dict__.pop("_order_and_factor", None)

    def change(self, error: Tensor) -> float:
        """By how much results change, squared and summed over all inputs, where rows of a weight do by so much."""
        return float((error @ self.sum).mul_(error).sum(dtype=torch.float64))

    def round(self, part: Tensor, scale: Tensor, middle: Tensor, group_size: int) -> Tensor:
        """Rows [n, K] of a weight as numbers 0..15, by groups [n, groups] of scales and middles."""
        order, factor = self._order_and_factor
        left = part.t()[order]  # [K, n]: a column is read in one piece
        groups = (order // group_size).tolist()
        scale, middle = scale.t().contiguous(), middle.t().contiguous()
        q = torch.empty_like(left)
        for first in range(0, len(left), _COLUMNS):
            last = min(first + _COLUMNS, len(left))
            errors = torch.empty_like(left[first:last])
            for i in range(first, last):
                step, zero = scale[groups[i]], middle[groups[i]]
                q[i] = on_grid(left[i], step, zero)
                errors[i - first] = (left[i] - (q[i] - zero) * step) / factor[i, i]
                left[i + 1 : last].addr_(factor[i, i + 1 : last], errors[i - first], alpha=-1)
            left[last:].addmm_(factor[first:last, last:].t(), errors, alpha=-1)
        return torch.empty_like(q).index_copy_(0, order, q).t()

    @cached_property
    def _order_and_factor(self) -> tuple[Tensor, Tensor]:
        """The order of the columns, and the upper Cholesky factor of the inverse of the damped sum in that order.

        Row i of it has what an error of column i means for those behind, the columns before it settled.
        """
        damped = self.sum.clone()
        diagonal = damped.diagonal()
        diagonal[diagonal == 0] = 1  # an input that was always 0: whatever its weight is, nothing changes
        order = diagonal.argsort(descending=True)
        damped, mean = damped[order][:, order], float(diagonal.mean())
        before = 0.0
        for damping in _DAMPING:
            damped.diagonal().add_((damping - before) * mean)
            before = damping
            lower, failed = torch.linalg.cholesky_ex(damped)
            if int(failed):
                continue
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return order, upper
        return order, torch.eye(len(order), device=damped.device)
