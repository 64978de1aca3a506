"""Cross-entropy over the last dimension, with label smoothing and z-loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call import common
from opsmith.call.common import (
    Tensor,
    as_rows,
    check_float,
    check_number,
    compiling,
    fresh,
    kernels,
    native,
    needs_grad,
    one_of,
    recorded,
    short,
    small,
    small_node,
    soonest,
)
from opsmith.call.fast import direct
from opsmith.call.run import declare
from opsmith.call.signature import (
    Constant,
    Gradient,
    Input,
    Kept,
    Made,
    Number,
    Output,
    Rows,
    Saved,
    Signature,
    Slope,
)
from opsmith.operator import Implementation, Kind, Operator, Pattern, register
from opsmith.ops.cross_entropy.samples import cost, samples, workloads

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
_REDUCED = {"sum": 1, "mean": 2}
_OF_PYTORCH = {"none": 0, "mean": 1, "sum": 2}
_FEW = 1024  # logits that PyTorch's two kernels have done with before one of ours has
_loss = torch._C._nn.cross_entropy_loss  # what F.cross_entropy calls
SIGNATURE = Signature(
    "cross_entropy",
    (
        *(Input("logits", "... V"), Input("target", "...", torch.int64), Number("ignore_index", int)),
        *(Number("label_smoothing", float), Number("z_loss", float), Number("reduction", int)),
    ),
    (Output("loss", ""),),
    kept=(Kept("stats", Rows.PAIR),),
    gradient=Gradient(
        "cross_entropy_backward",
        (
            *(Slope("loss"), Saved("logits"), Saved("target"), Saved("stats"), Saved("ignore_index")),
            *(Saved("label_smoothing"), Saved("z_loss"), Saved("reduction")),
            *(Constant("first", 0), Constant("classes", -1)),
        ),
        (Made("logits", optional=False),),
    ),
)


class TargetError(IndexError, ValueError):
    """A target that names no class: an IndexError as in PyTorch, and a ValueError as in opsmith."""


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """Negative log-likelihood of the targets under the softmax of the logits; reads the logits once.

    `loss = lse - (1 - e) * logits[target] - e * mean(logits) + z_loss * lse^2`, with `lse = log(sum(exp(logits)))`
    and `e = label_smoothing`; 0 where `target == ignore_index`. The mean is over the targets not ignored, and NaN
    if there is none, as in PyTorch. Classes are the LAST dimension, however many come before it.

    >>> logits = torch.randn(2, 128, 32000, requires_grad=True)
    >>> cross_entropy(logits, torch.randint(0, 32000, (2, 128))).shape
    torch.Size([])

    Args:
        logits: [..., V], float32, bfloat16 or float16 (float64 through PyTorch).
        target: [...], int32 or int64, each in [0, V) or `ignore_index`.
        ignore_index: targets of this value have no loss and no gradient.
        label_smoothing: the part of the target's probability that is spread over all classes, in [0, 1].
        z_loss: weight of the squared log-sum-exp, which keeps logits from drifting.
        reduction: "mean", "sum" or "none" (a loss for each target).
        dtype: of the loss, by default that of the logits. `torch.float32` on bfloat16 logits is what
            `cross_entropy(logits.float(), ...)` computes, without the copy.
        overwrite: the backward writes the gradient over the logits' own memory. They are destroyed by it, so
            nothing else may need them: an operator that saved them refuses its own backward.

    Raises:
        TargetError: (an IndexError and a ValueError) a target is outside [0, V) and not ignored.
        TypeError, ValueError: for a wrong dtype, shape, device, reduction or label smoothing.

    Source: Szegedy et al., "Rethinking the Inception Architecture", 2015 (label smoothing); Chowdhery et al.,
    "PaLM", 2022 (z-loss); Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if (
        z_loss == 0
        and dtype is None
        and reduction in _OF_PYTORCH
        and not compiling()
        and type(logits) is Tensor
    ):
        try:
            if (
                logits.numel() <= _FEW <= common.limit
                and logits.dim() < 3  # of more dimensions the second holds PyTorch's classes
                and target.dtype is torch.int64
                and logits.is_cpu
                and target.is_cpu
                and not overwrite
                and 0.0 <= label_smoothing <= 1.0
            ):
                code: Any = _OF_PYTORCH[reduction]
                return _loss(logits, target, None, code, ignore_index, label_smoothing)
        except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):  # the checks say why
            _check(logits, target, dtype, ignore_index, label_smoothing, z_loss, reduction)
            check_targets(target, logits.shape[-1], ignore_index)
            raise
    if reduction in _REDUCED and not overwrite and not compiling():
        try:
            if 0.0 <= label_smoothing <= 1.0 and dtype in (None, torch.float32, logits.dtype):
                rows, flat = logits, target
                if logits.dim() != 2 and logits.shape[:-1] == target.shape:
                    rows, flat = logits.view(-1, logits.shape[-1]), target.reshape(-1)
                options = (ignore_index, label_smoothing, z_loss, _REDUCED[reduction])
                loss: torch.Tensor | None = direct.new_cross_entropy(rows, flat, *options, loss=dtype)
                if loss is not None:
                    return loss
        except (RuntimeError, TypeError, AttributeError, KeyError):  # the checks say why
            pass
    _check(logits, target, dtype, ignore_index, label_smoothing, z_loss, reduction)
    options = (ignore_index, label_smoothing, z_loss, REDUCTIONS[reduction])
    training = needs_grad(logits)
    if native(logits, *_KERNELS[: 1 + training]) is not True or (
        (small_node if training else small)(logits.numel()) and not overwrite
    ):
        return reference(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            dtype=dtype,
        )
    if training:
        loss = recorded(_CrossEntropy, logits, target, options, dtype or logits.dtype, overwrite)
        return loss
    return _forward(logits, target, options, dtype or logits.dtype, None)


def reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    classes = logits.shape[-1]
    if dtype is not None and logits.dtype != torch.float64:
        logits = logits.to(dtype)
    rows, flat = logits.reshape(target.numel(), classes), target.reshape(-1).long()
    whole = z_loss == 0 and reduction != "none"
    try:
        loss = F.cross_entropy(
            rows,
            flat,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction if whole else "none",
        )
    except (IndexError, RuntimeError):
        if type(target) is torch.Tensor:
            check_targets(target, classes, ignore_index)
        raise
    if whole:
        return loss
    if z_loss != 0:
        valid = flat != ignore_index
        loss = loss + z_loss * rows.logsumexp(-1).square().masked_fill(~valid, 0.0)
        if reduction == "mean":
            return loss.sum() / valid.sum()
    return loss.sum() if reduction == "sum" else loss.view(target.shape)


def _check(logits: Any, target: Any, dtype: Any, *options: Any) -> None:
    check_float("cross_entropy", logits, "logits")
    check_target("cross_entropy", target, logits)
    if target.shape != logits.shape[:-1]:
        advice = f"expected {tuple(logits.shape[:-1])}"
        if logits.dim() > 2 and target.shape == (logits.shape[0], *logits.shape[2:]):
            advice = "classes are the last dimension here, not the second: pass logits.movedim(1, -1)"
        raise ValueError(
            f"cross_entropy: target must have the shape of logits {tuple(logits.shape)} without the last "
            f"dimension, got {tuple(target.shape)}; {advice}"
        )
    check_options("cross_entropy", *options)
    if logits.shape[-1] == 0 and target.numel():
        raise ValueError(f"cross_entropy: logits must have at least one class, got {tuple(logits.shape)}")
    if dtype is not None and dtype not in (logits.dtype, torch.float32):
        raise TypeError(f"cross_entropy: dtype must be {one_of(logits.dtype, torch.float32)}, got {dtype}")


def check_target(op: str, target: Any, logits: torch.Tensor, name: str = "logits") -> None:
    """Refuse targets that are no class numbers, or live elsewhere."""
    if not isinstance(target, torch.Tensor):
        raise TypeError(f"{op}: target must be a tensor, got {type(target).__name__}")
    if target.dtype not in (torch.int64, torch.int32):
        more = "; probabilities are not supported" if target.is_floating_point() else "; cast it first"
        raise TypeError(f"{op}: target must hold classes as int64 or int32, got {short(target.dtype)}{more}")
    if target.device != logits.device:
        raise ValueError(f"{op}: target is on {target.device}, {name} on {logits.device}; move one of them")


def check_options(op: str, ignore_index: Any, label_smoothing: Any, z_loss: Any, reduction: str) -> None:
    """Refuse a reduction that does not exist, a label smoothing that is no share, and what is no number."""
    check_number(op, "ignore_index", ignore_index, whole=True)
    check_number(op, "label_smoothing", label_smoothing)
    check_number(op, "z_loss", z_loss)
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        raise ValueError(f"{op}: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{op}: label_smoothing must be in [0, 1], got {label_smoothing}")


def check_targets(target: torch.Tensor, classes: int, ignore_index: int, op: str = "cross_entropy") -> None:
    """Refuse the first target outside [0, classes) that is not ignored, naming its position."""
    bad = ((target < 0) | (target >= classes)) & (target != ignore_index)
    if not bool(bad.any()):
        return
    position: Any = tuple(int(i) for i in bad.nonzero()[0])
    got = int(target[position])
    position = position[0] if len(position) == 1 else position
    raise TargetError(
        f"{op}: targets must be in [0, {classes}) or ignore_index={ignore_index}, got {got} at position "
        f"{position}; check the tokenizer's vocabulary against the size of the output layer"
    )


Options = tuple[int, float, float, int]


def _forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    options: Options,
    dtype: torch.dtype,
    stats: torch.Tensor | None,
) -> torch.Tensor:
    shape = () if options[3] else target.shape
    loss = torch.empty(shape, dtype=dtype, device=logits.device)
    rows, flat = as_rows(logits), target.reshape(-1)
    try:
        soonest(torch.ops.opsmith.cross_entropy.default)(
            rows, flat, *options, loss=loss.view(-1), stats=stats
        )
    except RuntimeError:
        if not torch.compiler.is_compiling():
            check_targets(target, logits.shape[-1], options[0])
        raise
    return loss


def _native(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> torch.Tensor:
    """The kernel, without autograd."""
    options = (ignore_index, label_smoothing, z_loss, REDUCTIONS[reduction])
    return _forward(logits, target, options, dtype or logits.dtype, None)


class _CrossEntropy(torch.autograd.Function):
    """Forward keeps two numbers a row, the pivot and the logarithm of the sum above it; backward is one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        options: Options,
        dtype: torch.dtype,
        overwrite: bool,
    ) -> torch.Tensor:
        stats = torch.empty(2, target.numel(), dtype=torch.float32, device=logits.device)
        loss = _forward(logits, target, options, dtype, stats)
        ctx.save_for_backward(logits, target, stats)
        ctx.options, ctx.overwrite = options, overwrite
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, target, stats = ctx.saved_tensors
        over = ctx.overwrite and logits.is_contiguous()
        dlogits = logits.detach() if over else fresh(logits)
        soonest(torch.ops.opsmith.cross_entropy_backward.default)(
            dloss.reshape(-1),
            as_rows(logits),
            target.reshape(-1),
            stats,
            *ctx.options,
            dlogits=dlogits.view(target.numel(), logits.shape[-1]),
        )
        if over:
            torch.autograd.graph.increment_version(logits)
        return dlogits, None, None, None, None


def _pattern(reduction: str) -> Pattern:
    def written(
        logits: torch.Tensor, target: torch.Tensor, ignore_index: float, label_smoothing: float
    ) -> torch.Tensor:
        return F.cross_entropy(
            logits,
            target,
            ignore_index=int(ignore_index),
            reduction=reduction,
            label_smoothing=label_smoothing,
        )

    return Pattern(
        f"cross_entropy(logits, target, {reduction})",
        written,
        {"logits": ("N", "V"), "target": ("N",), "ignore_index": -12345, "label_smoothing": 0.12345},
        dtypes={"target": "ids"},
        fixed={"reduction": reduction},
    )


CARD = register(
    Operator(
        name="cross_entropy",
        kind=Kind.LOSS,
        function=cross_entropy,
        reference=reference,
        cost=cost,
        samples=samples,
        workloads=workloads,
        implementations=[
            *kernels(_native, lambda logits, *a, **k: native(logits, "cross_entropy"), takes_out=False),
            Implementation("eager", reference),
        ],
        patterns=tuple(_pattern(reduction) for reduction in REDUCTIONS),
        widens="logits",
        schemas=declare(SIGNATURE),
        source="Szegedy et al., 2015; Chowdhery et al., 2022; Milakov, Gimelshein, 2018",
    )
)

_KERNELS = ("cross_entropy", "cross_entropy_backward")  # the second one for gradients
