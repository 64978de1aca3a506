"""The output layer and its cross-entropy in one: the logits exist a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.kernels.triton import INTERPRETED
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample, register
from opsmith.ops.common import (
    as_rows,
    check_float,
    check_like,
    fresh,
    kernels,
    native,
    nbytes,
    needs_grad,
    recorded,
    short,
    small,
)
from opsmith.ops.cross_entropy import (
    REDUCTIONS,
    Options,
    check_options,
    check_target,
    check_targets,
)
from opsmith.ops.cross_entropy import reference as loss_of
from opsmith.ops.linear import ONEDNN_DTYPES

# Of the bytes that all logits would take, the part that may exist at a time, whatever that is for: logits, and in the
# backward the sum of hidden's gradient. But a chunk no narrower than still multiplies well, and no larger than cache.
_SHARE = 9  # an eighth is promised, and the libraries take some of it
_NARROWEST = 256
_CHUNK_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
_STATE = 6  # float32 numbers a row between two chunks; see kernels/cpu/cross_entropy.h
_ONEDNN_ROWS = 16
_ONEDNN_CHAIN = 1024  # products that oneDNN may sum in one float32 chain and still be as exact as PyTorch


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

    `loss = cross_entropy(hidden @ weight.T + bias, target)`, chunk by chunk over the classes. The backward computes
    each chunk of logits again, turns it into its gradient, and multiplies that into both gradients while it is in
    cache. Between the passes two numbers a row are kept.

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
    _check(hidden, weight, target, bias, label_smoothing, reduction, dtype)
    if _supports(hidden, weight, target) is not True or small(target.numel() * weight.shape[0]):
        return reference(
            hidden,
            weight,
            target,
            bias=bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            dtype=dtype,
        )
    options = (ignore_index, label_smoothing, z_loss, REDUCTIONS[reduction])
    if needs_grad(hidden, weight, bias):
        loss: torch.Tensor = recorded(
            _LinearCrossEntropy, hidden, weight, target, bias, options, dtype or hidden.dtype
        )
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


def _check(
    hidden: Any, weight: Any, target: Any, bias: Any, label_smoothing: float, reduction: str, dtype: Any
) -> None:
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
    check_options(op, label_smoothing, reduction)
    if weight.shape[0] == 0 and target.numel():
        raise ValueError(f"{op}: weight must have at least one row, got {tuple(weight.shape)}")
    if dtype is not None and dtype not in (hidden.dtype, torch.float32):
        raise TypeError(f"{op}: dtype must be {short(hidden.dtype)} or float32, got {dtype}")


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
    rows, flat, classes = as_rows(hidden), target.reshape(-1), weight.shape[0]
    try:
        torch.ops.opsmith.linear_cross_entropy.default(
            rows, weight, flat, bias, *options, loss=loss.view(-1), stats=stats
        )
    except RuntimeError:
        if not torch.compiler.is_compiling():
            check_targets(target, classes, options[0], "linear_cross_entropy")
        raise
    return loss


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


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward keeps two numbers a row; backward computes the logits again, a chunk at a time."""

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
        dh = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if need_h else None
        dw = fresh(weight) if need_w else None
        db = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if need_b else None
        torch.ops.opsmith.linear_cross_entropy_backward.default(
            dloss.reshape(-1),
            as_rows(hidden),
            weight,
            target.reshape(-1),
            bias,
            stats,
            *ctx.options,
            dhidden=None if dh is None else dh.view(target.numel(), hidden.shape[-1]),
            dweight=dw,
            dbias=db,
        )
        return dh, dw, None, db, None, None


# --- the operators, in terms of chunks -----------------------------------------------------------------------------


class _Logits:
    """Chunks of hidden @ weight.T + bias; each lives until the next one is asked for."""

    def __init__(
        self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, other_bytes: int = 0
    ):
        self.weight, self.bias = weight, bias
        self.rows, self.classes = hidden.shape[0], weight.shape[0]
        self.onednn = onednn_multiplies(hidden)
        row = max(self.rows, 1) * hidden.element_size()
        budget = min(
            _CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"], self.classes * row // _SHARE - other_bytes
        )
        widest = budget // row // 64 * 64
        if self.onednn:  # which sums a chunk in one chain in the gradient of hidden
            widest = min(widest, _ONEDNN_CHAIN)
        chunks = -(-self.classes // max(widest, _NARROWEST))
        self.width = -(-self.classes // max(chunks, 1) // 64) * 64 or 64
        if self.onednn:
            self.parts = [part.contiguous() for part in hidden.split(_ONEDNN_CHAIN, 1)]
        else:
            self.hidden, self._memory = hidden, hidden.new_empty(self.rows * min(self.width, self.classes))

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        for first in range(0, self.classes, self.width):
            weight = self.weight[first : first + self.width]
            bias = None if self.bias is None else self.bias[first : first + self.width]
            yield first, weight, self._onednn(weight, bias) if self.onednn else self._mm(weight, bias)

    def _mm(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        some = weight.shape[0]
        out = self._memory[: self.rows * some].view(self.rows, some)
        if bias is None:
            return torch.mm(self.hidden, weight.t(), out=out)
        return torch.addmm(bias, self.hidden, weight.t(), out=out)

    def _onednn(self, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        linear = torch.ops.mkldnn._linear_pointwise
        # A weight with gaps between its rows would take oneDNN's slowest path.
        first, *more = (part.contiguous() for part in weight.split(_ONEDNN_CHAIN, 1))
        y: torch.Tensor = linear.default(self.parts[0], first, bias, "none", [], "")
        for x, w in zip(self.parts[1:], more, strict=True):
            y = linear.binary(x, y, w, None, "add")
        return y


def onednn_multiplies(x: torch.Tensor) -> bool:
    """True where oneDNN beats PyTorch's own choice, MKL: float32 on a CPU, and rows enough for a matrix product.

    A few rows PyTorch multiplies in several shorter chains of additions, more exactly than oneDNN in one.
    """
    if x.dtype != torch.float32 or not x.is_cpu or x.shape[0] < _ONEDNN_ROWS or x.shape[1] == 0:
        return False
    return torch.float32 in ONEDNN_DTYPES


def _linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    *,
    loss: torch.Tensor,
    stats: torch.Tensor | None = None,
) -> None:
    ops, classes = torch.ops.opsmith, weight.shape[0]
    state = torch.empty(_STATE, target.shape[0], dtype=torch.float32, device=hidden.device)
    for first, _, logits in _Logits(hidden, weight, bias):
        ops.cross_entropy_part.default(
            logits, target, ignore_index, label_smoothing, first, classes, state=state
        )
    ops.cross_entropy_finish.default(
        state, target, ignore_index, label_smoothing, z_loss, reduction, classes, loss=loss, stats=stats
    )


def _linear_cross_entropy_backward(
    dloss: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    stats: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: int,
    *,
    dhidden: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
) -> None:
    options = (ignore_index, label_smoothing, z_loss, reduction)
    total, other = None, 0
    if dhidden is not None:
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        other = hidden.numel() * (4 + hidden.element_size())  # and a chunk's part of it
    for first, part, logits in _Logits(hidden, weight, bias, other):
        torch.ops.opsmith.cross_entropy_backward.default(
            dloss, logits, target, stats, *options, first, weight.shape[0], dlogits=logits
        )
        last = first + part.shape[0]
        if dweight is not None:
            torch.mm(logits.t(), hidden, out=dweight[first:last])
        if dbias is not None:
            torch.sum(logits, 0, out=dbias[first:last])
        if total is not None:
            total = _add_product(total, logits, part)
        del logits  # before the next chunk takes memory
    if dhidden is not None and total is not None:
        dhidden.copy_(total)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a @ b, the total in float32."""
    if onednn_multiplies(a):
        return torch.ops.mkldnn._linear_pointwise.binary(a, total, b.contiguous().t(), None, "add")  # type: ignore[no-any-return]
    if a.dtype == torch.float32:
        return total.addmm_(a, b)
    if a.is_cuda:
        return total.add_(torch.mm(a, b, out_dtype=torch.float32))
    if INTERPRETED:
        return total.add_(torch.mm(a, b))
    # PyTorch's add_ would widen the product to float32 in memory first.
    torch.ops.opsmith.add_to_total.default(torch.mm(a, b).view(-1), total=total.view(-1))
    return total


# What a chunk passes through. No graph sees these: only the two operators above call them.
_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
_LIBRARY.define("add_to_total(Tensor part, *, Tensor(a!) total) -> ()")
_LIBRARY.define(
    "cross_entropy_part(Tensor logits, Tensor target, int ignore_index, float label_smoothing, int first, "
    "int classes, *, Tensor(a!) state) -> ()"
)
_LIBRARY.define(
    "cross_entropy_finish(Tensor state, Tensor target, int ignore_index, float label_smoothing, "
    "float z_loss, int reduction, int classes, *, Tensor(a!) loss, Tensor(b!)? stats=None) -> ()"
)


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
        implementations=[
            *kernels(_native, _supports, takes_out=False),
            Implementation("eager", reference),
        ],
        patterns=(),
        schemas=(
            "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, int ignore_index, "
            "float label_smoothing, float z_loss, int reduction, *, Tensor(a!) loss, Tensor(b!)? stats=None) -> ()",
            "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, "
            "Tensor stats, int ignore_index, float label_smoothing, float z_loss, int reduction, *, "
            "Tensor(a!)? dhidden=None, Tensor(b!)? dweight=None, Tensor(c!)? dbias=None) -> ()",
        ),
        source="Wijmans et al., 2024; Hsu et al., 2024",
    )
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("linear_cross_entropy", _linear_cross_entropy, _key)
    _LIBRARY.impl("linear_cross_entropy_backward", _linear_cross_entropy_backward, _key)
