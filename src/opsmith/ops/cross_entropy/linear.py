"""The output layer and its cross-entropy in one: the logits exist a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call import dispatch
from opsmith.call.dispatch import compiling, exporting, is_sharded, native, needs_grad, recorded
from opsmith.call.layouts import nbytes
from opsmith.call.signature import Gradient, Input, Kept, Made, Number, Output, Rows, Saved, Signature, Slope
from opsmith.kernels import libraries
from opsmith.operator import Cost, Kind, Make, MergedChain, Sample, Supports
from opsmith.ops.cross_entropy import (
    REDUCTIONS,
    Loss,
    check_options,
    check_target,
    chunks,
    code_of,
    cross_entropy,
    definition as loss_of,
)
from opsmith.ops.cross_entropy.ranks import Ranks
from opsmith.ops.linear import check_layer, linear

_OP = "linear_cross_entropy"
# With gradients two operators are faster, and their memory is none to speak of, up to 2^this times as many logits.
_LEARNING = 8
_OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "reduction")
# The gradients are results too, where a call gives memory for them: the forward has the logits that they need.
SIGNATURE = Signature(
    _OP,
    (
        *(Input("hidden", "... K"), Input("weight", "V K"), Input("target", "...", torch.int64)),
        *(Input("bias", "V", optional=True), Number("ignore_index", int), Number("label_smoothing", float)),
        *(Number("z_loss", float), Number("reduction", int)),
    ),
    (
        *(Output("loss", ""), Output("dhidden", "... K", optional=True)),
        *(Output("dweight", "V K", optional=True), Output("dbias", "V", optional=True)),
    ),
    kept=(Kept("stats", Rows.PAIR),),
    gradient=Gradient(
        "linear_cross_entropy_backward",
        (Slope("loss"), *map(Saved, ("hidden", "weight", "target", "bias", "stats", *_OPTIONS))),
        (Made("hidden"), Made("weight"), Made("bias")),
    ),
    beside=("dtype", "dhidden", "dweight", "dbias"),
)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
) -> Tensor:
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
    if not (compiling() or exporting()):
        try:
            rows, learns = target.numel(), needs_grad(hidden, weight, bias)
            most = dispatch.limit << _LEARNING if learns else dispatch.limit
            little = (rows == 1 or learns) and rows * weight.size(0) <= most
            # Nothing to save: as two operators. One of parts exchanges less.
            if little and not any(map(is_sharded, (hidden, weight, target))):
                how: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
                how |= {"z_loss": z_loss, "reduction": reduction, "dtype": dtype}
                with dispatch.uncast(hidden):
                    return cross_entropy(linear(hidden, weight, bias), target, **how)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):  # the checks say why
            pass
    options = (ignore_index, label_smoothing, z_loss, code_of(reduction))
    return _CALL.traced(hidden, weight, target, bias, *options, dtype, None, None, None, None)  # type: ignore[no-any-return]


def definition(hidden: Tensor, weight: Tensor, target: Tensor, bias: Any, *how: Any) -> Tensor:
    """The definition, in plain PyTorch."""
    options: Any = (*how[:5], False, _OP)
    return loss_of(F.linear(hidden, weight, bias), target, *options)


class _LinearCrossEntropy(Loss):
    """A loss for each row keeps two numbers a row, and its backward computes the logits again, a chunk at a time."""

    def check(self, values: Sequence[Any]) -> None:
        hidden, weight, target, bias, *options, dtype, _, _, _ = values
        check_layer(_OP, hidden, weight, bias, name="hidden", rows="V")
        check_target(_OP, target, hidden, "hidden")
        if target.shape != hidden.shape[:-1]:
            raise ValueError(
                f"{_OP}: target must have the shape of hidden {tuple(hidden.shape)} without the last dimension, "
                f"got {tuple(target.shape)}"
            )
        if weight.shape[0] == 0 and target.numel():
            raise ValueError(f"{_OP}: weight must have at least one row, got {tuple(weight.shape)}")
        check_options(_OP, hidden, dtype, *options)

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        return "opsmith" if self.supported(values) is True else None

    def supported(self, values: Sequence[Any], *more: str) -> Supports:
        hidden, weight, *_ = values
        if weight.shape[1] == 0:
            return "there is nothing to multiply"
        return native(hidden, "cross_entropy_part", *more)

    def recorded(self, backend: str, values: Sequence[Any]) -> Any:
        if self.named(values)["reduction"] == REDUCTIONS["none"]:
            return super().recorded(backend, values)
        return recorded(_Reduced, backend, *values)

    def kernel(self, backend: Any, backward: bool = False) -> Callable[..., Any]:
        if isinstance(backend, Ranks):
            return partial(chunks.backward if backward else chunks.forward, ranks=backend)
        return super().kernel(backend, backward)

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        return t if of.name in ("weight", "bias") else super().taken(of, t)


class _Reduced(torch.autograd.Function):
    """One loss: forward computes the gradients while it has the logits; backward multiplies them by a number."""

    @staticmethod
    def forward(ctx: Any, backend: Any, *values: Any) -> Tensor:
        known = _CALL.named(values)
        wanted = [name for name, needed in zip(known, ctx.needs_input_grad[1:], strict=True) if needed]
        made = {name: _CALL.fresh(known[name]) for name in wanted}
        rows = {f"d{name}": t.view(-1, t.shape[-1]) if name == "hidden" else t for name, t in made.items()}
        (loss,), _ = _CALL.run(backend, [*(known | rows).values()])
        ctx.scale = chunks.gradient_scale(known["hidden"], known["weight"], known["reduction"])
        ctx.places = [made.get(name) is not None for name in known]
        ctx.save_for_backward(*made.values())
        return loss

    @staticmethod
    @dispatch.once(_OP)
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        gradients = iter(_times(dloss, 1.0 / ctx.scale, ctx.saved_tensors))
        return None, *(next(gradients) if made else None for made in ctx.places)


def _times(dloss: Tensor, factor: Tensor | float, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """The gradients times a number; in their own memory where no second backward through the graph may follow."""
    if torch.compiler.is_compiling() or type(dloss) is not Tensor or not dloss.is_cpu:
        by = dloss.float() * factor
        return [g * by for g in gradients]
    number = float(dloss) * float(factor)
    if number == 1.0:
        return gradients
    if torch._C._autograd._get_current_graph_task_keep_graph():
        return [g * number for g in gradients]
    return [g.mul_(number) for g in gradients]


_CALL = _LinearCrossEntropy(
    SIGNATURE,
    linear_cross_entropy,
    definition,
    converted={"reduction": lambda reduction: REDUCTIONS[reduction]},
)


def _cost(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Any = None,
    reduction: str = "mean",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> Cost:
    shape = target.shape if reduction == "none" else ()
    loss = hidden.new_empty(shape, dtype=dtype, device="meta")
    return _entry(hidden, weight, target, bias=bias, loss=loss)


def _entry(hidden: Tensor, weight: Tensor, target: Tensor, **rest: Any) -> Cost:
    """An entry of the dispatcher: the logits, and a product of their size for each gradient that is asked for."""
    wanted = sum(rest.get(name) is not None for name in ("dhidden", "dweight"))
    flops = target.numel() * (2.0 * (1 + wanted) * weight.numel() + 9.0 * weight.shape[0])
    return Cost(flops, nbytes(hidden, weight, target, *(t for t in rest.values() if isinstance(t, Tensor))))


def _samples(make: Make) -> Iterator[Sample]:
    def sized(rows: int, k: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
        return make(rows, k), make(n, k, scale=2.0 * k**-0.5), make.ids(rows, high=n)

    for rows, k, n in ((1, 1, 1), (3, 7, 5), (17, 33, 130), (9, 64, 1029), (33, 48, 515)):
        yield Sample(f"{rows}x{k}x{n}", sized(rows, k, n))
    hidden, weight, bias = make(2, 9, 48), make(600, 48, scale=0.3), make(600)
    target = make.ids(2, 9, high=600).masked_fill(make.mask(2, 9, keep=0.4), -100)
    yield Sample("bias", (hidden, weight, target), {"bias": bias})
    yield Sample("sum", (hidden, weight, target), {"reduction": "sum"})
    yield Sample("none", (hidden, weight, target), {"reduction": "none", "bias": bias})
    options = {"label_smoothing": 0.2, "z_loss": 1e-3, "ignore_index": 7}
    yield Sample("all options", (hidden, weight, target.masked_fill(target == -100, 7)), options)
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


CARD = _CALL.card(
    kind=Kind.LOSS,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    merges=MergedChain("linear", "cross_entropy", through="logits", over="x", rows="hidden"),
    entries=dict.fromkeys((_OP, "linear_cross_entropy_backward"), _entry),
    schemas=SIGNATURE.schemas(),
    source="Wijmans et al., 2024; Hsu et al., 2024",
)
_LIBRARY = torch.library.Library("opsmith", "IMPL")
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl(_OP, chunks.forward, _key)
    _LIBRARY.impl("linear_cross_entropy_backward", chunks.backward, _key)

libraries.offer("cross_entropy", "add_to_total", "cross_entropy_part", "cross_entropy_finish")
