"""RMSNorm whose result leaves as int8: what feeds a W8A8 projection."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import EPS, check_number
from opsmith.call.dispatch import compiling
from opsmith.call.layouts import nbytes
from opsmith.call.run import Call, declare
from opsmith.call.signature import Dtype, Input, Number, Output, Signature
from opsmith.operator import Cost, Kind, Make, Sample, Tolerance, Verdict

SIGNATURE = Signature(
    "rms_norm_quant",
    (
        Input("x", "... N"),
        Input("weight", "N", Dtype.FIRST_OR_FLOAT32, optional=True),
        Input("bias", "N", Dtype.FIRST_OR_FLOAT32, optional=True, needs="weight"),
        Number("eps", float, within=EPS),
        Input("scale", "", torch.float32, optional=True),
        Input("offset", "", torch.float32, optional=True, needs="scale"),
    ),
    (Output("q", "... N", torch.int8), Output("s", "...", torch.float32, unless="scale")),
)
Result = Tensor | tuple[Tensor, Tensor]


def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: Tensor | float | None = None,
    offset: Tensor | float | None = None,
) -> Result:
    """Normalize the last dimension by its root mean square and quantize it to int8, in one pass.

    `y = x / sqrt(mean(x^2) + eps) * weight + bias` in float32. With a scale, one for the whole tensor:
    `q = rint(clamp(y / scale + offset, -128, 127))`. Without: `s = max|y| / 127` for each row,
    `q = rint(clamp(y / s))`, and s is returned too. Rounded half to even, and only there.

    >>> x = torch.randn(4, 512)
    >>> q, s = rms_norm_quant(x, torch.ones(512))
    >>> q.dtype, s.shape
    (torch.int8, torch.Size([4]))
    >>> rms_norm_quant(x, torch.ones(512), scale=0.02, offset=3.0).shape
    torch.Size([4, 512])

    Args:
        x: [..., N], float32, bfloat16 or float16.
        weight: [N], in x's dtype or float32; None: x comes normalized, and is quantized alone.
        bias: [N], added after the norm; needs a weight.
        eps: added to the mean square, under the root; 0 or more.
        scale, offset: one number each, the scale not 0, or none: then every row gets a scale of its own, and there is
            no offset.

    Returns:
        q, int8 like x; without a scale (q, s), s [...] float32. A row of zeros has q = 0 and s = 0, one with
            infinity or NaN q = 0 and an s that is not finite.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, and the NPU operator RmsNormQuant.
    """
    call = _CALL.compiled if compiling() else _CALL.fast.call
    return call(x, weight, bias, eps, scale, offset, None)  # type: ignore[no-any-return]


class _Quantized(Call):
    """Scale and offset are one number each, which a call may give as a number too; nothing has a gradient."""

    learns = False

    def traced(self, *given: Any) -> Any:
        with torch.no_grad():
            return super().traced(*given)

    def check(self, values: Sequence[Any]) -> None:
        x, weight, bias, eps, scale, offset = values
        super().check((x, weight, bias, eps, None, None))
        if bias is not None and weight is None:
            raise ValueError(f"{self.op}: a bias belongs to the norm, and weight is None: x comes normalized")
        if scale is None and offset is not None:
            raise ValueError(f"{self.op}: an offset needs a scale; without one each row's own is symmetric")
        for name, value in (("scale", scale), ("offset", offset)):
            if value is not None:
                check_number(self.op, name, value)
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"{self.op}: {name} must be one number, got shape {tuple(value.shape)}")

    def native(self, backend: str, values: Sequence[Any], out: Any = None) -> Any:
        x, *more, scale, offset = values
        return super().native(backend, (x, *more, _scalar(scale, x), _scalar(offset, x)), out)


def _scalar(value: Tensor | float | None, x: Tensor) -> Tensor | None:
    if isinstance(value, Tensor):
        return value.reshape(()).to(device=x.device, dtype=torch.float32)
    return None if value is None else torch.tensor(value, dtype=torch.float32, device=x.device)


def wide(t: Tensor) -> Tensor:
    """In float32, which is what is computed in; float64 stays."""
    return t if t.dtype == torch.float64 else t.float()


def q8(v: Tensor) -> Tensor:
    """`rint(clamp(v, -128, 127))`, half to even; the integers are still in floating point."""
    return v.clamp(-128, 127).round()


def quantize_rows(y: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's integers, in floating point, and `s = max|y| / 127` [..., 1]; zeros where s is 0 or not finite."""
    s = y.abs().amax(-1, keepdim=True) / 127 if y.shape[-1] else y.new_zeros((*y.shape[:-1], 1))
    there = (s > 0) & (s < math.inf)
    return torch.where(there, q8(y / torch.where(there, s, 1.0)), 0.0), s


def normalize(x: Tensor, gamma: Tensor | None, beta: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """RMSNorm in float32 (float64), unrounded; no gamma: x is normalized already."""
    y = wide(x)
    if gamma is None:
        return y
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * gamma.to(y.dtype)
    return y if beta is None else y + beta.to(y.dtype)


def definition(x: Tensor, weight: Any, bias: Any, eps: float, scale: Any, offset: Any) -> Result:
    """The definition, in plain PyTorch."""
    y = normalize(x, weight, bias, eps)
    if scale is None:
        q, s = quantize_rows(y)
        return q.to(torch.int8), s.squeeze(-1)
    step, shift = (
        torch.as_tensor(0.0 if v is None else v, dtype=y.dtype, device=y.device) for v in (scale, offset)
    )
    return q8(y / step.reshape(()) + shift.reshape(())).to(torch.int8)


_CALL = _Quantized(SIGNATURE, rms_norm_quant, definition)


def _cost(
    x: Tensor, weight: Any = None, bias: Any = None, eps: float = 0.0, *, scale: Any = None, **_: Any
) -> Cost:
    rows = x.numel() // x.shape[-1] if x.numel() else x.shape[:-1].numel()
    scales = 4 * rows if scale is None else 0
    return Cost(8.0 * x.numel(), nbytes(x, weight, bias) + x.numel() + scales)


def _samples(make: Make) -> Iterator[Sample]:
    def scalar(value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float32, device=make.device)

    for rows, n in ((1, 1), (1, 384), (9, 7), (17, 33), (5, 4097)):
        yield Sample(f"{rows}x{n}", (make(rows, n), make(n, scale=0.3, shift=1.0)))
    x = make(2, 9, 130)
    static = {"scale": scalar(0.021), "offset": scalar(-7.0)}
    yield Sample("static", (x, make(130)), static)
    yield Sample("static, bias", (x, make(130), make(130)), static)
    yield Sample("negative scale", (x, make(130)), {"scale": scalar(-0.03), "offset": scalar(11.0)})
    yield Sample("clamped", (x, make(130)), {"scale": scalar(0.002), "offset": scalar(0.0)})
    yield Sample("bias", (x, make(130), make(130)))
    yield Sample("normalized already", (x,))
    yield Sample("normalized already, static", (x,), static)
    yield Sample("strided", (make(60, 64).t(), make(60)))
    yield Sample("sliced rows", (make(8, 200)[:, 20:84], make(64)), static)
    yield Sample("rows of zeros", (torch.zeros_like(make(3, 40)), make(40)))
    yield Sample("empty", (make(0, 16), make(16)))


def _workloads(make: Make) -> Iterator[Sample]:
    yield Sample("4096x7168", (make(4096, 7168), make(7168)))
    yield Sample("1x7168", (make(1, 7168), make(7168)))


def _promised(x: Tensor, *given: Any, scale: Any = None, **more: Any) -> bool:
    tensors = (t for t in (x, *given, scale, *more.values()) if isinstance(t, Tensor))
    finite = all(bool(t.isfinite().all()) for t in tensors)
    if not finite or scale is not None:
        return finite and float(scale) != 0.0
    steps = CARD.reference(x.double(), *given, **more)[1]  # which float32 lacks for rows next to nothing
    return bool(((steps == 0) | (steps > torch.finfo(torch.float32).tiny)).all())


@dataclass(frozen=True)
class Steps(Tolerance):
    """The policy, but integers may be off by one step where a last bit of float32 tips a tie.

    Args:
        of_scale: how much of the greatest magnitude of a floating-point result one such step of a quantized activation
            may move it; 0 where the result does not depend on one. Integers that do depend on one, and on results that
            were rounded to 16 bits, are held to the policy in steps.
    """

    of_scale: float = 0.0

    def check(self, got: Tensor, eager: Tensor, exact: Tensor) -> Verdict:
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


CARD = _CALL.card(
    kind=Kind.NORM,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    tolerance=Steps(),
    domain=_promised,
    schemas=declare(SIGNATURE, bound=True),
    source="DeepSeek-AI, 2024",
)
