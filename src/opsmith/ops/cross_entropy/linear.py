"""The output layer and its cross-entropy in one: the logits exist a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call import dispatch
from opsmith.call.arguments import check_float, check_like, one_of, short
from opsmith.call.dispatch import compiling, kernels, native, needs_grad, recorded, small
from opsmith.call.layouts import as_rows, fresh, nbytes
from opsmith.kernels import libraries
from opsmith.operator import Cost, Implementation, Kind, Make, MergedChain, Operator, Sample, register
from opsmith.ops.cross_entropy import (
    REDUCTIONS,
    TargetError,
    check_options,
    check_target,
    check_targets,
    code_of,
    counted_rows,
    cross_entropy,
    entries,
)
from opsmith.ops.cross_entropy import reference as loss_of
from opsmith.ops.linear import linear

Options = tuple[int, float, float, int]

# With gradients two operators are faster, and their memory is none to speak of, up to 2^this times as many logits.
_LEARNING = 8
# By what the gradients are too large until the backward, where float16 would else lose what is small in them.
_HALF_SCALE = 128.0


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Cross-entropy of a linear layer's output, which is never in memory as a whole.

    `loss = cross_entropy(hidden @ weight.T + bias, target)`, chunk by chunk over the classes. Where autograd records
    a mean or a sum, the gradients are computed at once, and the backward multiplies them by the one number that
    arrives: a loss that is never differentiated belongs under `torch.no_grad()`, where it costs a third. With
    reduction="none" the backward computes each chunk of logits again.

    >>> hidden, weight = torch.randn(2, 128, 64), torch.randn(32000, 64)
    >>> linear_cross_entropy(hidden, weight, torch.randint(0, 32000, (2, 128))).shape
    torch.Size([])

    Args:
        hidden: [..., K], float32, bfloat16 or float16 (float64 through PyTorch).
        weight: [V, K], in hidden's dtype.
        target: [...], int32 or int64, each in [0, V) or `ignore_index`.
        bias: [V], in hidden's dtype.
        ignore_index, label_smoothing, z_loss, reduction: as for `cross_entropy`.
        dtype: of the loss, by default hidden's; float32 is the other choice.

    Raises:
        TargetError: (an IndexError and a ValueError) a target is outside [0, V) and not ignored.
        TypeError, ValueError: for a wrong dtype, shape, device, reduction or label smoothing.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024; Hsu et al., "Liger Kernel",
    2024.
    """
    how: dict[str, Any] = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "reduction": reduction,
        "dtype": dtype,
    }
    if not compiling():
        try:
            rows, learns = target.numel(), needs_grad(hidden, weight, bias)
            most = dispatch.limit << _LEARNING if learns else dispatch.limit
            if (rows == 1 or learns) and rows * weight.size(0) <= most:  # nothing to save: as two operators
                return cross_entropy(linear(hidden, weight, bias), target, **how)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # the checks say why
            pass
    _check(hidden, weight, target, bias, dtype)
    check_options("linear_cross_entropy", ignore_index, label_smoothing, z_loss, code_of(reduction))
    if _supports(hidden, weight, target) is not True or small(target.numel() * weight.shape[0]):
        try:
            return reference(hidden, weight, target, bias=bias, **how)
        except TargetError:
            check_targets(target, weight.shape[0], ignore_index, "linear_cross_entropy")
            raise
    options = (ignore_index, label_smoothing, z_loss, REDUCTIONS[reduction])
    if needs_grad(hidden, weight, bias):
        function = _Reduced if options[3] else _Each
        loss: torch.Tensor = recorded(function, hidden, weight, target, bias, options, dtype or hidden.dtype)
        return loss
    return _forward(hidden, weight, target, bias, options, dtype or hidden.dtype, None)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    return loss_of(F.linear(hidden, weight, bias), target, **options)


def _check(hidden: Any, weight: Any, target: Any, bias: Any, dtype: Any) -> None:
    op = "linear_cross_entropy"
    check_float(op, hidden, "hidden")
    check_float(op, weight, "weight")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"{op}: weight must have shape [V, {hidden.shape[-1]}] for hidden {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if weight.device != hidden.device:
        raise ValueError(f"{op}: weight is on {weight.device}, hidden on {hidden.device}; move one of them")
    if bias is not None:
        check_like(op, bias, hidden, "bias", weight.shape[:1], "the number of weight's rows")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != hidden.dtype:
            raise TypeError(
                f"{op}: {name} must be {short(hidden.dtype)} like hidden, got {short(t.dtype)}; cast it first"
            )
    check_target(op, target, hidden, "hidden")
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{op}: target must have the shape of hidden {tuple(hidden.shape)} without the last dimension, "
            f"got {tuple(target.shape)}"
        )
    if weight.shape[0] == 0 and target.numel():
        raise ValueError(f"{op}: weight must have at least one row, got {tuple(weight.shape)}")
    if dtype is not None and dtype not in (hidden.dtype, torch.float32):
        raise TypeError(f"{op}: dtype must be {one_of(hidden.dtype, torch.float32)}, got {dtype}")


def _supports(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Any) -> bool | str:
    if weight.shape[1] == 0:
        return "there is nothing to multiply"
    return native(hidden, "cross_entropy_part")


def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
    dtype: torch.dtype,
    stats: torch.Tensor | None,
) -> torch.Tensor:
    loss = torch.empty(() if options[3] else target.shape, dtype=dtype, device=hidden.device)
    rows, flat = as_rows(hidden), target.reshape(-1)
    try:
        torch.ops.opsmith.linear_cross_entropy.default(
            rows, weight, flat, bias, *options, loss=loss.view(-1), stats=stats
        )
    except RuntimeError:
        _explain(target, weight, options)
        raise
    return loss


def _explain(target: torch.Tensor, weight: torch.Tensor, options: Options) -> None:
    """Name the target that a kernel refused."""
    if not torch.compiler.is_compiling():
        check_targets(target, weight.shape[0], options[0], "linear_cross_entropy")


def _native(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The kernels, without autograd."""
    options = (ignore_index, label_smoothing, z_loss, REDUCTIONS[reduction])
    return _forward(hidden, weight, target, bias, options, dtype or hidden.dtype, None)


class _Each(torch.autograd.Function):
    """A loss for each row: forward keeps two numbers a row; backward computes the logits again, a chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        stats = torch.empty(2, target.numel(), dtype=torch.float32, device=hidden.device)
        loss = _forward(hidden, weight, target, bias, options, dtype, stats)
        ctx.save_for_backward(hidden, weight, target, bias, stats)
        ctx.options = options
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, target, bias, stats = ctx.saved_tensors
        need_h, need_w, _, need_b, *_ = ctx.needs_input_grad
        dh, dw, db = _empty_gradients((hidden, need_h), (weight, need_w), (bias, need_b))
        torch.ops.opsmith.linear_cross_entropy_backward.default(
            dloss.reshape(-1),
            as_rows(hidden),
            weight,
            target.reshape(-1),
            bias,
            stats,
            *ctx.options,
            dhidden=_rows_of(dh),
            dweight=dw,
            dbias=db,
        )
        return dh, dw, None, db, None, None


class _Reduced(torch.autograd.Function):
    """One loss: forward computes the gradients while it has the logits; backward multiplies them by a number."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None,
        options: Options,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        need_h, need_w, _, need_b, *_ = ctx.needs_input_grad
        dh, dw, db = _empty_gradients((hidden, need_h), (weight, need_w), (bias, need_b))
        loss = torch.empty((), dtype=dtype, device=hidden.device)
        ctx.scale = _HALF_SCALE if hidden.dtype == torch.float16 and options[3] == REDUCTIONS["mean"] else 1.0
        try:
            torch.ops.opsmith.linear_cross_entropy_and_gradients.default(
                as_rows(hidden),
                weight,
                target.reshape(-1),
                bias,
                *options,
                ctx.scale,
                loss=loss.view(-1),
                dhidden=_rows_of(dh),
                dweight=dw,
                dbias=db,
            )
        except RuntimeError:
            _explain(target, weight, options)
            raise
        ctx.save_for_backward(dh, dw, db)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dh, dw, db = _times(dloss, 1.0 / ctx.scale, ctx.saved_tensors)
        return dh, dw, None, db, None, None


def _empty_gradients(*wanted: tuple[torch.Tensor | None, bool]) -> list[torch.Tensor | None]:
    """Contiguous memory for the gradient of each tensor that wants one."""
    return [fresh(t) if t is not None and needed else None for t, needed in wanted]


def _rows_of(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.view(-1, t.shape[-1])


def _times(
    dloss: torch.Tensor, factor: float, gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """The gradients times a number; in their own memory where no second backward through the graph may follow."""
    if torch.compiler.is_compiling() or type(dloss) is not torch.Tensor or not dloss.is_cpu:
        by = dloss.float() * factor
        return [None if g is None else g * by for g in gradients]
    number = float(dloss) * factor
    if number == 1.0:
        return [*gradients]
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return [None if g is None else g * number for g in gradients]
    return [None if g is None else g.mul_(number) for g in gradients]


def _cost(
    hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, bias: Any = None, **options: Any
) -> Cost:
    rows, (classes, k) = target.numel(), weight.shape
    dtype = options.get("dtype") or hidden.dtype
    results = (rows if options.get("reduction") == "none" else 1) * (torch.finfo(dtype).bits // 8)
    flops = 2.0 * rows * classes * k + 9.0 * rows * classes
    return Cost(flops, nbytes(hidden, weight, bias) + target.nbytes + results)


def _samples(make: Make) -> Iterator[Sample]:
    def sized(rows: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return make(rows, k), make(n, k, scale=2.0 * k**-0.5), make.ids(rows, high=n)

    for rows, k, n in ((1, 1, 1), (3, 7, 5), (17, 33, 130), (9, 64, 1029), (33, 48, 515)):
        yield Sample(f"{rows}x{k}x{n}", sized(rows, k, n))
    hidden, weight, bias = make(2, 9, 48), make(600, 48, scale=0.3), make(600)
    target = make.ids(2, 9, high=600).masked_fill(make.mask(2, 9, keep=0.4), -100)
    yield Sample("bias", (hidden, weight, target), {"bias": bias})
    yield Sample("sum", (hidden, weight, target), {"reduction": "sum"})
    yield Sample("none", (hidden, weight, target), {"reduction": "none", "bias": bias})
    yield Sample(
        "all options",
        (hidden, weight, target.masked_fill(target == -100, 7)),
        {"label_smoothing": 0.2, "z_loss": 1e-3, "ignore_index": 7},
    )
    yield Sample("float32 loss", (hidden, weight, target), {"dtype": torch.float32})
    yield Sample("large logits", (make(4, 64, scale=30.0), make(900, 64), make.ids(4, high=900)))
    yield Sample("int32 targets", (make(8, 32), make(65, 32), make.ids(8, high=65).int()))
    yield Sample("vector", (make(32), make(19, 32), make.ids(high=19)))
    yield Sample("strided", (make(48, 12).t(), make(48, 300, scale=0.3).t(), make.ids(12, high=300)))
    yield Sample("empty", (make(0, 16), make(20, 16), make.ids(0, high=20)), {"reduction": "sum"})


def _workloads(make: Make) -> Iterator[Sample]:
    hidden, weight = make(512, 1024), make(32000, 1024, scale=1024**-0.5)
    target = make.ids(512, high=32000)
    yield Sample("512x1024x32000", (hidden, weight, target))
    yield Sample("1x1024x32000", (hidden[:1], weight, target[:1]))


CARD = register(
    Operator(
        name="linear_cross_entropy",
        kind=Kind.LOSS,
        function=linear_cross_entropy,
        reference=reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        implementations=[*kernels(_native, _supports, takes_out=False), Implementation("eager", reference)],
        merges=MergedChain("linear", "cross_entropy", through="logits", over="x", rows="hidden"),
        entries={
            "linear_cross_entropy_and_gradients": entries.linear_cross_entropy_and_gradients,
            "linear_cross_entropy_backward": entries.linear_cross_entropy_backward,
        },
        schemas=(
            "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, int ignore_index, "
            "float label_smoothing, float z_loss, int reduction, *, Tensor(a!) loss, Tensor(b!)? stats=None) -> ()",
            "linear_cross_entropy_and_gradients(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, "
            "int ignore_index, float label_smoothing, float z_loss, int reduction, float scale, *, Tensor(a!) loss, "
            "Tensor(b!)? dhidden=None, Tensor(c!)? dweight=None, Tensor(d!)? dbias=None) -> ()",
            "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, "
            "Tensor stats, int ignore_index, float label_smoothing, float z_loss, int reduction, *, "
            "Tensor(a!)? dhidden=None, Tensor(b!)? dweight=None, Tensor(c!)? dbias=None) -> ()",
        ),
        source="Wijmans et al., 2024; Hsu et al., 2024",
    )
)
_LIBRARY = torch.library.Library("opsmith", "IMPL")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_cross_entropy", counted_rows.forward, _key)
    _LIBRARY.impl("linear_cross_entropy_and_gradients", counted_rows.forward_with_gradients, _key)
    _LIBRARY.impl("linear_cross_entropy_backward", counted_rows.backward, _key)

libraries.offer("cross_entropy", "add_to_total", "cross_entropy_part", "cross_entropy_finish")
