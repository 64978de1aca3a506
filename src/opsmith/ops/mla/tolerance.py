"""How exact what is quantized must be: integers within one step, of a number at a tie that may round either way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from opsmith.operator import Tolerance, Verdict


@dataclass(frozen=True)
class Steps(Tolerance):
    """The policy, but integers may be off by one step where a last bit of float32 tips a tie.

    Args:
        of_scale: how much of the greatest magnitude of a floating-point result one such step of a quantized activation
            may move it; 0 where the result does not depend on one. Integers that do depend on one, and on results that
            were rounded to 16 bits, are held to the policy in steps.
    """

    of_scale: float = 0.0

    def check(self, got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> Verdict:
        if got.shape != exact.shape:
            return super().check(got, eager, exact)
        if got.dtype == torch.int8:
            error, theirs = (
                float((t.int() - exact.int()).abs().max()) if t.numel() else 0.0 for t in (got, eager)
            )
            bound = 1.0 + (self.factor * theirs if self.of_scale else 0.0)
            return Verdict(
                error <= bound, error, bound, "" if error <= bound else f"off by {error:.0f} steps"
            )
        verdict = super().check(got, eager, exact)
        if not self.of_scale or not exact.numel() or not math.isfinite(verdict.error):
            return verdict
        bound = verdict.bound + self.of_scale * float(exact.abs().max())
        ok = verdict.error <= bound
        return Verdict(
            ok, verdict.error, bound, "" if ok else f"error {verdict.error:.3g} above the bound {bound:.3g}"
        )
