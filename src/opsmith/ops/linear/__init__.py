"""The linear layer, with its activation and the residual addition fused behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.call import common
from opsmith.call.common import (
    as_rows,
    check_float,
    check_like,
    check_out,
    compiling,
    dense,
    in_huge_pages,
    native,
    nbytes,
    needs_grad,
    out_rows,
    recording,
    short,
)
from opsmith.call.fast import direct, nodes
from opsmith.call.run import declare
from opsmith.call.signature import Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.kernels import libraries
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Pattern, Sample, register
from opsmith.ops.linear import entries
from opsmith.ops.linear.onednn import onednn, prepack, supports_onednn
from opsmith.ops.linear.training import ROWS, with_gradients

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
# Where autograd records more than a few rows, our kernels for these are the fastest up to 2^this times as many products
# as a small call has numbers. PyTorch takes tens of times as long in float16.
_LEARNING = {torch.float32: 10, torch.bfloat16: 10, torch.float16: 20}
# The same, up to which PyTorch is faster than what comes then: with twice as many, which are those of
# examples/train_proof.py, its steps took longer.
_LEARNT = 13

_BESIDE = (
    Input("bias", "N", optional=True),
    Input("residual", "... N", optional=True),
    Number("activation", int),
)
PACKED = Signature(
    "linear_packed", (Input("x", "... K"), Input("packed", "P N D"), *_BESIDE), (Output("y", "... N"),)
)
FEW_ROWS = Signature(
    "linear_rows",
    (Input("x", "... K"), Input("weight", "N K"), *_BESIDE),
    (Output("y", "... N"),),
    gradient=Gradient(
        "linear_rows_backward",
        (Slope("y"), Saved("x"), Saved("weight")),
        (Made("x"), Made("weight"), Made("bias")),
        only={"activation": 0},
    ),
)
_AT_ONCE = direct.Ready(FEW_ROWS, most_rows=ROWS)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by a weight; bias, activation and residual cost no pass over memory of their own.

    `y = activation(x @ weight.T + bias) + residual`.

    >>> linear(torch.randn(2, 128, 384), torch.randn(1536, 384), torch.zeros(1536), activation="gelu").shape
    torch.Size([2, 128, 1536])

    Args:
        x: [..., K], any floating-point dtype.
        weight: [N, K], in x's dtype.
        bias: [N], in x's dtype.
        activation: None, "gelu", "gelu_tanh", "relu" or "silu".
        residual: [..., N], in x's dtype; added after the activation.
        out: [..., N] in x's dtype to write into; x or residual itself is allowed when no gradient is needed.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device or activation.

    Source: Intel oneDNN's matmul with post-operations, through PyTorch.
    """
    if residual is None and out is None and not compiling():
        try:  # a few rows times a matrix are bound by memory, and one that is small by what stands before the product
            if recording() and needs_grad(x, weight, bias):
                y = _recorded(x, weight, bias) if activation is None else None
            else:
                y = _AT_ONCE.call(x, weight, bias, None, _CODES[activation])
                if y is None:
                    y = _small(x, weight, bias, activation)
            if y is not None:
                return y
        except (RuntimeError, TypeError, AttributeError, IndexError, KeyError):  # the checks say why
            pass
    _check(x, weight, bias, activation, residual, out)
    fn = reference
    if compiling():  # Inductor takes oneDNN's operator with constant weights only, and fuses epilogues itself
        pass
    elif not needs_grad(x, weight, bias, residual):
        if supports_rows(x, weight) is True:
            fn = _rows
        elif x.dtype != torch.float32 and supports_onednn(x, weight) is True:  # float32's sums err too far
            fn = onednn
        elif x.dtype == torch.float32 and _repays_packing(x, weight) and native(x, "linear_packed") is True:
            fn = _native
        elif activation in _GELUS and native(x, "gelu") is True:
            return _split(x, weight, bias, activation=activation, residual=residual, out=out)
    elif _learns(x, weight, activation):
        fn = _training
    y = fn(x, weight, bias, activation=activation, residual=residual)
    return y if out is None else out.copy_(y)


def _recorded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """A product that a node in C++ records, ours or PyTorch's; None where there are too many."""
    rows = max(ROWS, (common.limit << _LEARNING[x.dtype]) // max(1, weight.numel()))
    if x.numel() <= rows * x.shape[-1]:
        y: torch.Tensor | None = direct.new_linear_rows(x, weight, bias, None, 0)
        if y is not None:
            return y
        if native(x, "linear_rows") is True:
            nodes.begin()  # for the calls to come
    return direct.small_linear(x, weight, bias, -1, common.limit << _LEARNT)


def _small(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor | None:
    """PyTorch's product of one row, where ours cannot be had yet; None for others."""
    if direct.new_linear_rows is direct.not_loaded:
        native(x, "linear_rows")  # which loads the library, for the calls to come
    y = direct.small_linear(x, weight, bias, common.limit, -1)
    return y if y is None or activation is None else ACTIVATIONS[activation](y)


def reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, in plain PyTorch."""
    y = F.linear(x, weight, bias)
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def _check(x: Any, weight: Any, bias: Any, activation: Any, residual: Any, out: Any) -> None:
    check_float("linear", x)
    check_float("linear", weight, "weight")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear: weight must have shape [N, {x.shape[-1]}] for x {tuple(x.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise ValueError(f"linear: weight is on {weight.device}, x on {x.device}; move one of them")
    shape = (*x.shape[:-1], weight.shape[0])
    if bias is not None:
        check_like("linear", bias, x, "bias", weight.shape[:1], "the number of weight's rows")
    if residual is not None:
        check_like("linear", residual, x, "residual", shape, "the shape of the result")
    for name, t in (("weight", weight), ("bias", bias), ("residual", residual)):
        if t is not None and t.dtype != x.dtype:
            raise TypeError(
                f"linear: {name} must be {short(x.dtype)} like x, got {short(t.dtype)}; cast it first"
            )
    if activation is not None and activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise ValueError(f"linear: activation must be None or one of {known}, got {activation!r}")
    if out is not None:
        memory = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        check_out("linear", out, x, shape, onto=("x", "residual"), **memory)


def _learns(x: torch.Tensor, weight: torch.Tensor, activation: str | None) -> bool:
    """Whether to multiply by ourselves where gradients are wanted: float32, which PyTorch leaves to MKL."""
    return (
        x.dtype == torch.float32
        and x.numel() > max(x.shape[-1], common.limit)
        and (activation is not None or x.numel() * weight.shape[0] > common.limit << _LEARNT)
        and not torch.is_autocast_enabled("cpu")
        and supports_onednn(x, weight) is True
        and native(x, "linear_gradient", *(["gelu_backward"] if activation in _GELUS else [])) is True
    )


def _training(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    if activation is None:
        return with_gradients(x, weight, bias, residual)
    if activation in _GELUS:
        y = with_gradients(x, weight, bias, None, tanh=_GELUS[activation])
    else:
        y = ACTIVATIONS[activation](with_gradients(x, weight, bias, None))
    return y if residual is None else y + residual


_CODES = {name: code for code, name in enumerate((None, *ACTIVATIONS))}


def pack_weight(weight: torch.Tensor, rows: int = 0) -> torch.Tensor:
    """The weight as our kernel reads it, [1, N, K], K rounded up to pairs in bfloat16; the same for all rows."""
    n, k = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    packed = in_huge_pages(weight.new_empty(1, n, k + k % 2 if weight.dtype == torch.bfloat16 else k))
    torch.ops.opsmith.linear_pack.default(weight, packed=packed)
    return packed


_MANY, _MUCH = 64, 13  # rows of x, and 2^25 products: from there on our kernel makes good for packing


def _repays_packing(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.numel() >= _MANY * x.shape[-1] and x.numel() * weight.shape[0] > common.limit << _MUCH


def _native(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Our kernel, which sums K in blocks and so is more accurate than the libraries; the weight plain or packed."""
    packed = weight if weight.dim() == 3 else pack_weight(weight)
    return _through(torch.ops.opsmith.linear_packed.default, x, packed, bias, activation, residual, out)


def _through(
    kernel: Callable[..., object],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """A kernel of ours on rows; the weight is [N, K], or packed [1, N, K]."""
    y = x.new_empty((*x.shape[:-1], weight.shape[-2])) if out is None else out
    rows, added = as_rows(x), None if residual is None else as_rows(residual)
    target = out_rows(y) if y.dim() > 1 else y.unsqueeze(0)
    kernel(rows, weight, dense(bias), added, _CODES[activation], y=target)
    return y


def _rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Our kernel for a few rows, which reads the weight once, as it is, at the rate of memory."""
    return _through(torch.ops.opsmith.linear_rows.default, x, weight, bias, activation, residual, out)


def supports_rows(x: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> bool | str:
    """True where these are few rows, and a weight that our kernel reads as it is; else the reason why not."""
    if x.numel() > ROWS * x.shape[-1]:
        return f"for {ROWS} rows at most, x has {x.numel() // x.shape[-1]}"
    if weight.dtype != x.dtype or weight.stride(1) != 1:
        return "the weight must be in x's dtype, its rows contiguous"
    return native(x, "linear_rows")


def _supports_native(x: torch.Tensor, *args: Any, **options: Any) -> bool | str:
    return native(x, "linear_packed")


_GELUS = {"gelu": False, "gelu_tanh": True}


def _supports_split(x: torch.Tensor, *args: Any, activation: str | None = None, **options: Any) -> bool | str:
    if activation not in _GELUS:
        return f"no kernel of ours follows the matmul for activation={activation!r}"
    return native(x, "gelu")


def _split(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """PyTorch's matmul, then the GELU kernel in place: for dtypes that oneDNN does not multiply here."""
    direct = out is not None and out.is_contiguous() and x.dim() > 1
    if out is not None and direct:  # the product must not be written over what is still to be read
        memory = out.untyped_storage().data_ptr()
        direct = all(t is None or t.untyped_storage().data_ptr() != memory for t in (x, residual))
    y = torch.ops.aten.linear.out(x, weight, bias, out=out) if direct else F.linear(x, weight, bias)
    rows = as_rows(y)
    torch.ops.opsmith.gelu.default(rows, None, _GELUS[activation or ""], y=rows)
    if residual is not None:
        y.add_(residual)
    return y if out is None or direct else out.copy_(y)


def _cost(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: torch.Tensor | None = None,
) -> Cost:
    n, k = weight.shape
    rows = x.numel() // k if k else 0
    extra = sum(t is not None for t in (bias, residual)) + (20 if activation else 0)
    result = rows * n * x.element_size()
    return Cost(2.0 * rows * n * k + extra * rows * n, nbytes(x, weight, bias, residual) + result)


def _samples(make: Make) -> Iterator[Sample]:
    for rows, k, n in ((1, 1, 1), (1, 64, 33), (3, 7, 5), (17, 130, 65), (64, 384, 96)):
        yield Sample(f"{rows}x{k}x{n}", (make(rows, k), make(n, k, scale=k**-0.5), make(n)))
    x, weight, bias = make(2, 9, 48), make(33, 48, scale=0.2), make(33)
    for activation in ACTIVATIONS:
        yield Sample(activation, (x, weight, bias), {"activation": activation})
    yield Sample("no bias", (x, weight))
    yield Sample("residual", (x, weight, bias), {"residual": make(2, 9, 33)})
    yield Sample("residual, no bias", (x, weight), {"residual": make(2, 9, 33)})
    yield Sample("gelu and residual", (x, weight, bias), {"activation": "gelu", "residual": make(2, 9, 33)})
    yield Sample("vector", (make(48), weight, bias), {"activation": "gelu"})
    yield Sample("strided", (make(48, 6).t(), weight, bias))
    yield Sample("strided bias", (x, weight, make(33, 2)[:, 0]))
    yield Sample("transposed weight", (x, make(48, 33, scale=0.2).t(), bias), {"activation": "relu"})
    yield Sample("empty", (make(0, 48), weight, bias), {"activation": "silu"})


def _workloads(make: Make) -> Iterator[Sample]:
    for rows, k, n in ((4096, 384, 1536), (128, 384, 1536), (1, 4096, 4096)):
        x, weight, bias = make(rows, k), make(n, k, scale=k**-0.5), make(n)
        yield Sample(f"{rows}x{k}x{n} gelu", (x, weight, bias), {"activation": "gelu"})


CARD = register(
    Operator(
        name="linear",
        kind=Kind.MATMUL,
        function=linear,
        reference=reference,
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        implementations=[
            Implementation("onednn", onednn, "cpu", supports_onednn, prepack=prepack),
            Implementation("native", _native, "cpu", _supports_native, takes_out=True, prepack=pack_weight),
            Implementation("rows", _rows, "cpu", supports_rows, takes_out=True),
            Implementation("split", _split, "cpu", _supports_split, takes_out=True),
            Implementation("eager", reference),
        ],
        patterns=(
            Pattern(
                "linear(x, weight, bias)",
                lambda x, weight, bias: F.linear(x, weight, bias),
                {"x": ("B", "K"), "weight": ("N", "K"), "bias": ("N",)},
            ),
            Pattern(
                "linear(x, weight)",
                lambda x, weight: F.linear(x, weight),
                {"x": ("B", "K"), "weight": ("N", "K")},
            ),
        ),
        entries={
            "linear_pack": entries.linear_pack,
            **dict.fromkeys(("linear_packed", "linear_rows", "linear_unpacked"), entries.product),
            "linear_gradient": entries.linear_gradient,
            "linear_rows_backward": entries.linear_rows_backward,
            "nonzero_rows": entries.nonzero_rows,
        },
        schemas=(
            "linear_pack(Tensor weight, *, Tensor(a!) packed) -> ()",
            *declare(PACKED, "linear"),
            *declare(FEW_ROWS, "linear"),
            "linear_unpacked(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation, *, "
            "Tensor(a!) y, Tensor(b!)? before=None) -> ()",
            "linear_gradient(Tensor dy, Tensor x, bool shortly=False, *, Tensor(a!) dweight, "
            "Tensor(b!)? dbias=None) -> ()",
            "nonzero_rows(Tensor x, *, Tensor(a!) found) -> ()",
        ),
        onto=(("x", "residual"),),
        source="oneDNN matmul with post-operations",
    )
)

libraries.offer("linear", "linear_pack", "linear_unpacked", "linear_gradient")
