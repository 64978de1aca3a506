"""The linear layer by oneDNN's matmul, its epilogue as post-operations; and products that oneDNN does not know here."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.call import dispatch
from opsmith.call.arguments import short
from opsmith.call.dispatch import carries_tangents, compiling, native
from opsmith.call.layouts import dense, dense_rows, is_dense
from opsmith.kernels import isa

# Activations in oneDNN's words: attribute and algorithm.
_POST_OPERATIONS = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def _onednn_dtypes() -> frozenset[torch.dtype]:
    """What oneDNN multiplies on this machine."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    ops = torch.ops.mkldnn
    half = {torch.bfloat16: ops._is_mkldnn_bf16_supported, torch.float16: ops._is_mkldnn_fp16_supported}
    return frozenset({torch.float32, *(dtype for dtype, supported in half.items() if supported())})


ONEDNN_DTYPES = _onednn_dtypes()
# Of these, what the CPU has no instruction for, and oneDNN multiplies into float32 memory of its own.
EMULATED_DTYPES = {torch.bfloat16} & ONEDNN_DTYPES if isa.supported()[-1] == "avx512" else frozenset()

# What PyTorch has no unit for here: it takes several times as long as in float32, tens where the weight lies across.
SLOW_DTYPES = frozenset({torch.bfloat16, torch.float16}) - ONEDNN_DTYPES


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, y: Tensor | None = None, ours: Any = SLOW_DTYPES
) -> Tensor:
    """x [m, k] times a weight [n, k], into y: in some dtypes by our kernel, where a sum has more than one term."""
    y = x.new_empty(len(x), len(weight)) if y is None else y
    takes = x.is_cpu and x.dtype in ours and x.shape[1] > 1 and y.numel() > 0 and is_dense(y)
    if takes and native(x, "linear_unpacked") is True:
        by = weight if 1 in weight.stride() else weight.contiguous()
        torch.ops.opsmith.linear_unpacked.default(dense_rows(x), by, dense(bias), None, 0, y=y)
        return y
    return torch.mm(x, weight.t(), out=y) if bias is None else torch.addmm(bias, x, weight.t(), out=y)


our_product = partial(product, ours={torch.float32, *SLOW_DTYPES, *EMULATED_DTYPES})


_MKLS = torch.backends.mkl.is_available() and isa.is_intels()


def mkl_leads() -> bool:
    """True where PyTorch's own product of many rows in float32, MKL's, is the fastest: on its maker's processors.

    Elsewhere it takes slower code. What is to be ours in any case (`always_native`) is ours here too.
    """
    return _MKLS and dispatch.limit >= 0


def supports_onednn(x: Tensor, weight: Tensor) -> bool | str:
    """True for what oneDNN multiplies here; else the reason why it does not."""
    if not x.is_cpu:
        return f"oneDNN runs on the CPU, the input is on {x.device}"
    if not compiling() and carries_tangents():
        return "oneDNN's linear layer has no rule for forward-mode differentiation"
    if x.dtype not in ONEDNN_DTYPES:
        return f"oneDNN does not multiply {short(x.dtype)} on this CPU"
    if not x.numel() or not weight.shape[0]:
        return "nothing to multiply"
    return True


def onednn(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str | None
) -> Tensor:
    """oneDNN's matmul with the epilogue in its registers; the weight plain or packed."""
    bias = dense(bias)  # oneDNN takes it for contiguous, whatever its strides
    if residual is not None and activation is None:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, "add")  # type: ignore[no-any-return]
    attribute, algorithm = _POST_OPERATIONS.get(activation, _POST_OPERATIONS[None])
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, attribute, [], algorithm)
    if activation == "relu":
        y.relu_()  # oneDNN's own turns NaN into 0
    return y if residual is None else y.add_(residual)


def prepack(weight: Tensor, rows: int) -> Tensor:
    """The weight in the layout that oneDNN reads fastest for so many rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # type: ignore[no-any-return]


# PyTorch knows the shape of the unary form only; without this one, a graph could not hold the addition.
_META = torch.library.Library("mkldnn", "IMPL", "Meta")
_BINARY = "mkldnn::_linear_pointwise.binary"
if ONEDNN_DTYPES and not torch._C._dispatch_has_kernel_for_dispatch_key(_BINARY, "Meta"):
    _META.impl(
        "_linear_pointwise.binary",
        lambda x, other, weight, bias, attribute: x.new_empty((*x.shape[:-1], weight.shape[0])),
    )
