"""Calls that nodes in C++ record, and who looks on when they go back."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith.ops as ops


class Onlooker(TorchDispatchMode):
    """Sees every operator, and by being there leaves calls to the Functions in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.given: dict[str, dict[str, Any]] = {}  # the named arguments of each

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        self.given[str(func)] = kwargs or {}
        return func(*args, **(kwargs or {}))


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def _loss(logits: torch.Tensor, **options: Any) -> torch.Tensor:
    return ops.cross_entropy(logits, torch.arange(logits.shape[0]), **options)


def _turned(*x: torch.Tensor) -> Any:
    cos, sin = ops.rope_table(x[0].shape[-1], x[0].shape[-2])
    return ops.rope(*x, cos, sin) if len(x) == 1 else ops.rope_qk(*x, cos, sin)


def _packed(q: torch.Tensor, *kv: torch.Tensor, **options: Any) -> Any:
    """Two sequences, between which is one without tokens."""
    ends = (torch.tensor([0, 2, 2, t.shape[0]]) for t in (q, kv[0]))
    return ops.attention_varlen(q, *kv, *ends, **options)


def _heads_inside(*x: torch.Tensor) -> Any:
    return ops.attention(*(t.transpose(1, 2) for t in x), causal=True)


def _some(*shape: int) -> torch.Tensor:
    """A boolean mask that hides some keys, and of no row all."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 0] = True
    return mask


_QKV = ((2, 3, 5, 16),) * 3
CALLS: dict[str, tuple[str, Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "softmax": ("softmax_backward", ops.softmax, ((3, 40),)),
    "softmax, four dimensions, scaled": (
        "softmax_backward",
        lambda x: ops.softmax(x, scale=0.3, method="stable"),
        ((2, 3, 4, 40),),
    ),
    "layer_norm": ("layer_norm_backward", ops.layer_norm, ((2, 3, 40), (40,), (40,))),
    "layer_norm residual": (
        "layer_norm_backward",
        lambda x, w, b, r: ops.layer_norm(x, w, b, residual=r),
        ((3, 40), (40,), (40,), (3, 40)),
    ),
    "rms_norm": ("rms_norm_backward", ops.rms_norm, ((3, 40), (40,))),
    "rms_norm without weight": ("rms_norm_backward", ops.rms_norm, ((40,),)),
    "rms_norm residual": (
        "rms_norm_backward",
        lambda x, w, r: ops.rms_norm(x, w, residual=r, weight_offset=1.0),
        ((2, 3, 40), (40,), (2, 3, 40)),
    ),
    "gelu": ("gelu_backward", ops.gelu, ((3, 40),)),
    "gelu of one number": ("gelu_backward", ops.gelu, ((),)),
    "bias_gelu tanh": ("gelu_backward", lambda x, b: ops.bias_gelu(x, b, tanh=True), ((3, 40), (40,))),
    "silu_mul": ("gated_backward", ops.silu_mul, ((3, 40), (3, 40))),
    "gelu_mul packed": ("gated_backward", ops.gelu_mul, ((3, 80),)),
    "cross_entropy": (
        "cross_entropy_backward",
        lambda x: _loss(x, z_loss=1e-3, label_smoothing=0.1),
        ((4, 4000),),
    ),
    "attention": ("attention_backward", ops.attention, _QKV),
    "attention of a token": ("attention_backward", ops.attention, ((1, 4, 1, 64),) * 3),
    "attention, causal, of fewer queries than keys": (
        "attention_backward",
        lambda *x: ops.attention(*x, causal=True),
        ((2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 16)),
    ),
    "attention, grouped heads": (
        "attention_backward",
        lambda *x: ops.attention(*x, causal=True),
        ((2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 16)),
    ),
    "attention, heads inside": ("attention_backward", _heads_inside, ((2, 5, 3, 16),) * 3),
    "attention, one mask for all": ("attention_backward", lambda *x: ops.attention(*x, mask=_some(5)), _QKV),
    "attention, a mask for each sequence": (
        "attention_backward",
        lambda *x: ops.attention(*x, mask=_some(2, 1, 1, 5)),
        _QKV,
    ),
    "attention, a mask for each row": (
        "attention_backward",
        lambda *x: ops.attention(*x, mask=_some(3, 5, 5), causal=True),
        _QKV,
    ),
    "attention, additive mask": (
        "attention_backward",
        lambda *x: ops.attention(*x, mask=torch.linspace(-1, 1, 15).view(3, 1, 5)),
        _QKV,
    ),
    "attention, scale, window, softcap": (
        "attention_backward",
        lambda *x: ops.attention(*x, scale=0.3, window=2, softcap=5.0),
        _QKV,
    ),
    "attention_varlen": ("attention_backward", _packed, ((7, 4, 16), (9, 2, 16), (9, 2, 16))),
    "attention_varlen, causal, heads outside": (
        "attention_backward",
        lambda *x: _packed(*(t.transpose(0, 1) for t in x), causal=True, scale=0.3),
        ((2, 7, 16),) * 3,
    ),
    "linear": ("linear_rows_backward", ops.linear, ((3, 40), (7, 40), (7,))),
    "linear of a vector, without bias": ("linear_rows_backward", ops.linear, ((40,), (7, 40))),
    "linear of many rows": ("linear_rows_backward", ops.linear, ((5, 67, 10), (37, 10), (37,))),
    "rope": ("rope", _turned, ((2, 3, 5, 8),)),
    "rope, heads inside": ("rope", lambda x: _turned(x.transpose(1, 2)), ((2, 5, 3, 8),)),
    "rope_qk, heads inside": (
        "rope_qk",
        lambda *x: _turned(*(t.transpose(1, 2) for t in x)),
        ((2, 5, 4, 8), (2, 5, 1, 8)),
    ),
    "rope_qk": ("rope_qk", _turned, ((2, 4, 5, 8), (2, 1, 5, 8))),
}


# Those whose Functions in Python call the same kernels.
SAME_KERNELS = [name for name in CALLS if not name.startswith("linear")]


def tensors(results: Any) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]
