"""The linear layer, with its activation and the residual addition fused behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call import dispatch
from opsmith.call.arguments import check_device, check_dtype, check_float, check_like, check_out
from opsmith.call.dispatch import compiling, exporting, native, needs_grad, recorded
from opsmith.call.fast import direct, nodes
from opsmith.call.layouts import as_rows, in_huge_pages, nbytes
from opsmith.call.run import Call, declare
from opsmith.call.signature import Gradient, Input, Made, Number, Output, Saved, Signature, Slope
from opsmith.kernels import libraries
from opsmith.operator import Cost, Implementation, Kind, Make, Pattern, Sample, Supports
from opsmith.ops.linear.onednn import SLOW_DTYPES, mkl_leads, onednn, prepack, supports_onednn
from opsmith.ops.linear.training import ROWS, LinearFunction

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
_NAMES = (None, *ACTIVATIONS)
_CODES = {name: code for code, name in enumerate(_NAMES)}  # what the kernels call them
_GELUS = {"gelu": False, "gelu_tanh": True}
# Where autograd records more than a few rows, our kernels for these are the fastest up to 2^this times as many products
# as a small call has numbers. PyTorch takes tens of times as long in float16.
_LEARNING = {torch.float32: 10, torch.bfloat16: 10, torch.float16: 20}
# The same, up to which PyTorch is faster than what comes then: with twice as many, which are those of
# examples/train_proof.py, its steps took longer.
_LEARNT = 13
_MANY, _MUCH = 64, 13  # rows of x, and 2^25 products: from there on our kernel makes good for packing
_FEW, _MOST = 32, 64  # rows of x up to which the kernel for few of them is the fastest, and may yet be
_ONTO = ("x", "residual")  # what the result may be written over, though no kernel could: it is copied there

_BESIDE = (
    Input("bias", "N", optional=True),
    Input("residual", "... N", optional=True),
    Number("activation", int),
)
PACKED = Signature(
    "linear_packed", (Input("x", "... K"), Input("packed", "P N D"), *_BESIDE), (Output("y", "... N"),)
)
_PLAIN_INPUTS = (Input("x", "... K"), Input("weight", "N K"), *_BESIDE)
UNPACKED = Signature("linear_unpacked", _PLAIN_INPUTS, (Output("y", "... N"),))
FEW_ROWS = Signature(
    "linear_rows",
    _PLAIN_INPUTS,
    (Output("y", "... N"),),
    gradient=Gradient(
        "linear_rows_backward",
        (Slope("y"), Saved("x"), Saved("weight")),
        (Made("x"), Made("weight"), Made("bias")),
        only={"activation": 0},
    ),
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
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
    code = _CODES[activation] if activation in _CODES else repr(activation)
    call = _CALL.traced if compiling() else _CALL.fast.call
    return call(x, weight, bias, residual, code, out)  # type: ignore[no-any-return]


def definition(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int
) -> Tensor:
    """The definition, in plain PyTorch."""
    y = F.linear(x, weight, bias)
    name = _NAMES[activation]
    if name is not None:
        y = ACTIVATIONS[name](y)
    return y if residual is None else y + residual


def check_layer(op: str, x: Any, weight: Any, bias: Any, *, name: str = "x", rows: str = "N") -> None:
    """Refuse a weight [N, K] or a bias that is not for x [..., K], which messages call by its name."""
    check_float(op, x, name)
    check_float(op, weight, "weight")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"{op}: weight must have shape [{rows}, {x.shape[-1]}] for {name} {tuple(x.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    check_weights(op, x, weight, bias, weight.shape[0], name)


def check_weights(op: str, x: Tensor, weight: Tensor, bias: Any, n: int, name: str = "x") -> None:
    """The same where the weight's shape is right, for n outputs."""
    check_device(op, weight, x, "weight", name)
    check_dtype(op, weight, x, "weight", name)
    if bias is not None:
        check_like(op, bias, x, "bias", (n,), "the number of weight's rows", name)
        check_dtype(op, bias, x, "bias", name)


class _Linear(Call):
    """Which kernel multiplies depends on the rows, the dtype, the activation, and whether gradients are wanted."""

    def __init__(self) -> None:
        converted = {"activation": lambda activation: _CODES[activation]}
        super().__init__(FEW_ROWS, linear, definition, converted=converted, most_rows=_FEW)
        self.node = direct.Ready(FEW_ROWS, super().traced)

    def traced(self, *given: Any) -> Any:
        """Where gradients are wanted, the node in C++ is quick for more rows than `fast` takes."""
        x, weight, bias = given[:3]
        tensors = isinstance(x, Tensor) and isinstance(weight, Tensor) and weight.dim() == 2
        tensors = tensors and (bias is None or isinstance(bias, Tensor))
        if not (compiling() or exporting()) and tensors and needs_grad(x, weight, bias):
            most = max(ROWS * weight.numel(), dispatch.limit << _LEARNING.get(x.dtype, 0))
            if x.numel() * weight.shape[0] <= most:
                # The first call saves what others do: a checkpointed layer counts that.
                if not self.node.loaded:
                    native(x, "linear_rows")
                nodes.begin()
                return self.node.call(*given)
        return super().traced(*given)

    def check(self, values: Sequence[Any]) -> None:
        x, weight, bias, residual, activation = values
        check_layer(self.op, x, weight, bias)
        if residual is not None:
            shape = (*x.shape[:-1], weight.shape[0])
            check_like(self.op, residual, x, "residual", shape, "the shape of the result")
            check_dtype(self.op, residual, x, "residual")
        if isinstance(activation, str):
            known = ", ".join(ACTIVATIONS)
            raise ValueError(f"linear: activation must be None or one of {known}, got {activation}")

    def backend(self, values: Sequence[Any], training: bool) -> str | None:
        x, weight, *_, code = values
        # Inductor takes oneDNN's operator with constant weights only, and fuses epilogues itself.
        if compiling() or exporting() or (dispatch.autocasts(x) and self.mixed(values)):
            return None
        products, exact = x.numel() * weight.shape[0], x.dtype == torch.float32
        if training:
            much = x.numel() > max(x.shape[-1], dispatch.limit) and (
                code or not exact or products > dispatch.limit << _LEARNT
            )
            if not much or (mkl_leads() if exact else x.dtype not in SLOW_DTYPES):
                return None
            more = ["gelu_backward"] if _NAMES[code] in _GELUS else []
            return "training" if native(x, "linear_unpacked", "linear_gradient", *more) is True else None
        if x.numel() <= _FEW * x.shape[-1] and self.takes("rows", values) is True:
            return "rows"
        if not exact and self.takes("onednn", values) is True:  # float32's sums err too far
            return "onednn"
        repaid = x.numel() >= _MANY * x.shape[-1] and products > dispatch.limit << _MUCH
        wins = repaid and not mkl_leads() if exact else x.dtype in SLOW_DTYPES
        if wins and self.takes("native", values) is True:
            return "native"
        return "split" if self.takes("split", values) is True else None

    def mixed(self, values: Sequence[Any]) -> bool:
        """Whether autocast has anything to cast, or an activation to compute in float32."""
        within = torch.get_autocast_dtype(values[0].device.type)
        return values[-1] != 0 or any(t.dtype != within for t in values[:-1] if t is not None)

    def plain(self, values: Sequence[Any]) -> Any:
        """In autocast's dtype, as the function of PyTorch's whose place it takes."""
        return self.definition(*values)

    def apart(self, values: Sequence[Any]) -> Sequence[str]:
        return "...", "N"

    def takes(self, backend: str, values: Sequence[Any]) -> Supports:
        """True where it computes this call, else the reason why not."""
        x, weight, *_, code = values
        if backend == "rows":
            return supports_rows(x, weight, _MOST)
        if backend == "onednn":
            return supports_onednn(x, weight)
        if backend in ("native", "packed"):
            return native(x, "linear_packed", "linear_unpacked")
        if _NAMES[code] not in _GELUS:
            return f"no kernel of ours follows the matmul for activation={_NAMES[code]!r}"
        return native(x, "gelu")

    def recorded(self, backend: str, values: Sequence[Any]) -> Tensor:
        x, weight, bias, residual, code = values
        name = _NAMES[code]
        fused = residual if name is None else None
        y: Tensor = recorded(LinearFunction, x, weight, bias, fused, code if name in _GELUS else 0)
        if name is not None and name not in _GELUS:
            y = ACTIVATIONS[name](y)
        return y if residual is fused else y + residual

    def check_out(self, values: Sequence[Any], out: Any) -> None:
        x, weight, bias, residual, _ = values
        shape = (*x.shape[:-1], weight.shape[0])
        read = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        check_out(self.op, out, x, shape, onto=_ONTO, **read)

    def native(self, backend: str, values: Sequence[Any], out: Any = None) -> Tensor:
        # Aside, as each result needs all of a row of x, which `out` may be.
        return self.store(self.product(backend, values), out)  # type: ignore[no-any-return]

    def product(self, backend: str, values: Sequence[Any], out: Any = None) -> Tensor:
        """The result by one of these.

        rows: our kernel for few rows, which reads the weight once, as it is, at the rate of memory.
        packed: ours that sums K in blocks, more accurate than the libraries', of a weight that was packed once.
        native: the same of a weight as it is, of which blocks are packed in a cache.
        onednn: the library's, with the activation in its registers.
        split: PyTorch's matmul, then the GELU kernel in place: for dtypes that oneDNN does not multiply here.
        """
        x, weight, bias, residual, code = values
        if backend == "rows":
            return super().native(backend, values, out)  # type: ignore[no-any-return]
        if backend in ("native", "packed"):
            call = _PACKED if weight.dim() == 3 else _UNPACKED
            return call.native(backend, values, out)  # type: ignore[no-any-return]
        if backend == "onednn":
            return onednn(x, weight, bias, residual, _NAMES[code])
        y = F.linear(x, weight, bias)
        rows = as_rows(y)
        torch.ops.opsmith.gelu.default(rows, None, code == _CODES["gelu_tanh"], y=rows)
        return y if residual is None else y.add_(residual)

    def implementation(self, backend: str, *, out: bool = False, **more: Any) -> Implementation:
        """One of these, for the card."""
        run = self.form(partial(self.product, backend), out=out)
        takes = self.form(partial(self.takes, backend))
        return Implementation(backend, run, "cpu", takes, takes_out=out, **more)


class _Unpacked(Call):
    """A weight as it lies, its rows or its columns next to each other."""

    def taken(self, of: Any, t: Tensor | None) -> Tensor | None:
        return t if t is not None and of.name == "weight" and 1 in t.stride() else super().taken(of, t)


_CALL, _PACKED = _Linear(), Call(PACKED, linear, definition)
_UNPACKED = _Unpacked(UNPACKED, linear, definition)


def pack_weight(weight: Tensor, rows: int = 0) -> Tensor:
    """The weight as our kernel reads it, [1, N, K], K rounded up to pairs in bfloat16; the same for all rows."""
    n, k = weight.shape
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    packed = in_huge_pages(weight.new_empty(1, n, k + k % 2 if weight.dtype == torch.bfloat16 else k))
    torch.ops.opsmith.linear_pack.default(weight, packed=packed)
    return packed


def supports_rows(x: Tensor, weight: Tensor, most: int = ROWS) -> Supports:
    """True where these are few rows, and a weight that our kernel reads as it is; else the reason why not."""
    if x.numel() > most * x.shape[-1]:
        return f"for {most} rows at most, x has {x.numel() // x.shape[-1]}"
    if weight.dtype != x.dtype or weight.stride(1) != 1:
        return "the weight must be in x's dtype, its rows contiguous"
    return native(x, "linear_rows")


def _cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Cost:
    n, k = weight.shape
    rows = x.numel() // k if k else 0
    extra = sum(t is not None for t in (bias, residual)) + (20 if activation else 0)
    result = rows * n * x.element_size()
    return Cost(2.0 * rows * n * k + extra * rows * n, nbytes(x, weight, bias, residual) + result)


# Of entries of the dispatcher called by themselves: the profiler sees their shapes, and None for what is left out.


def product_cost(x: Tensor, y: Tensor, **rest: Any) -> Cost:
    """Rows times a weight, which may be packed: what the entry takes and writes, once."""
    tensors = [t for t in rest.values() if isinstance(t, Tensor)]
    return Cost(2.0 * y.numel() * x.shape[-1], nbytes(x, y, *tensors))


def _gradient_cost(dy: Tensor, x: Tensor, **rest: Tensor | None) -> Cost:
    """A product for each of the two matrices, of which it reads the other, and the sum of the rows."""
    dx, dweight, dbias = (rest.get(name) for name in ("dx", "dweight", "dbias"))
    products = [other for to, other in ((dx, rest.get("weight")), (dweight, x)) if to is not None]
    flops = 2.0 * len(products) * dy.numel() * x.shape[-1] + (0 if dbias is None else dy.numel())
    return Cost(flops, nbytes(dy, *products, dx, dweight, dbias))


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


CARD = _CALL.card(
    kind=Kind.MATMUL,
    onto=(_ONTO,),
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    implementations=[
        # It compiles a kernel for each number of rows, and keeps a thousand of them: hundreds of megabytes.
        _CALL.implementation("onednn", prepack=prepack, margin=1.2),
        _CALL.implementation("packed", out=True, prepack=pack_weight, packs_alike=True),
        _CALL.implementation("native", out=True),
        _CALL.implementation("rows", out=True),
        _CALL.implementation("split"),
        Implementation("eager", _CALL.reference),
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
        **dict.fromkeys(("linear_rows", "linear_unpacked"), product_cost),
        **dict.fromkeys(("linear_gradient", "linear_rows_backward"), _gradient_cost),
    },
    schemas=(
        *declare(FEW_ROWS, "linear"),
        "linear_unpacked(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation, *, "
        "Tensor(a!) y, Tensor(b!)? before=None) -> ()",
        "linear_gradient(Tensor dy, Tensor x, bool shortly=False, *, Tensor(a!) dweight, "
        "Tensor(b!)? dbias=None) -> ()",
    ),
    source="oneDNN matmul with post-operations",
)

libraries.offer("linear", "linear_pack", "linear_unpacked", "linear_gradient")
