"""What an operator is timed against: its definition, eager PyTorch, torch.compile, the best library for the job."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from opsmith.operator import Operator, Supports


@dataclass(frozen=True)
class Baseline:
    """A named peer: whether it can run on a device, and its spelling of an operator's call."""

    name: str
    title: str  # as tables show it
    available: Callable[[str], Supports]
    of: Callable[[Operator], Callable[..., Any] | str]  # takes the operator's arguments; or why there is none


def choose(names: Sequence[str], device: str) -> list[Baseline]:
    """The baselines of these names, in this order.

    >>> [b.title for b in choose(["eager", "compile"], "cpu")]
    ['eager', 'torch.compile']

    Raises:
        ValueError: an unknown baseline, or one that cannot run on this device.
    """
    chosen = []
    for name in dict.fromkeys(names):
        if name not in BASELINES:
            raise ValueError(f"no baseline is called {name!r}; there are: {', '.join(BASELINES)}")
        here = BASELINES[name].available(device)
        if here is not True:
            raise ValueError(f"cannot compare against {name}: {here}")
        chosen.append(BASELINES[name])
    return chosen


def _compiled(card: Operator) -> Callable[..., Any]:
    """torch.compile of eager, compiled when it is first called, for those sizes."""
    torch._dynamo.reset()
    return torch.compile(card.eager, dynamic=False)


def _liger_here(device: str) -> Supports:
    if device != "cuda":
        return "Liger-Kernel is written in Triton and needs a GPU; add --device cuda, or leave it out"
    if importlib.util.find_spec("liger_kernel") is None:
        return "Liger-Kernel is not installed; pip install liger-kernel, or leave it out"
    return True


def _only(**wanted: bool) -> None:
    """Refuse what Liger's operator does not do."""
    missing = [name.replace("_", " ") for name, fits in wanted.items() if not fits]
    if missing:
        raise ValueError(f"Liger's takes only: {', '.join(missing)}")


# Each takes the arguments of the operator of its name. Where Liger may work in place, it is asked not to.
def _layer_norm(
    x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, residual: Any = None
) -> Any:
    _only(a_weight=weight is not None, a_bias=bias is not None, no_residual=residual is None)
    return _functional().liger_layer_norm(x, weight, bias, eps)


def _rms_norm(
    x: Any,
    weight: Any = None,
    eps: float = 1e-6,
    *,
    residual: Any = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Any:
    _only(a_weight=weight is not None, no_residual=residual is None)
    mode = "llama" if round_before_weight else "gemma"
    return _functional().liger_rms_norm(x, weight, eps, weight_offset, mode, False)


def _silu_mul(gate: Any, up: Any = None) -> Any:
    _only(gate_and_up_apart=up is not None)
    return _functional().liger_swiglu(gate, up)


def _gelu_mul(gate: Any, up: Any = None, *, tanh: bool = False) -> Any:
    _only(gate_and_up_apart=up is not None, tanh=tanh)
    return _functional().liger_geglu(gate, up)


def _rope_qk(q: Any, k: Any, cos: Any, sin: Any, **options: Any) -> Any:
    _only(halves_of_whole_heads=not any(options.values()), batches=q.dim() == 4)
    return _functional().liger_rope(q, k, cos[None], sin[None])[:2]


def _loss(function: str) -> Callable[..., Any]:
    def call(*tensors: Any, ignore_index: int = -100, z_loss: float = 0.0, **options: Any) -> Any:
        options |= {"ignore_index": ignore_index, "lse_square_scale": z_loss}
        return getattr(_functional(), function)(*tensors, **options)

    return call


def _functional() -> Any:
    return importlib.import_module("liger_kernel.transformers.functional")


_LIGER: dict[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "silu_mul": _silu_mul,
    "gelu_mul": _gelu_mul,
    "rope_qk": _rope_qk,
    "cross_entropy": _loss("liger_cross_entropy"),
    "linear_cross_entropy": _loss("liger_fused_linear_cross_entropy"),
}


def _liger(card: Operator) -> Callable[..., Any] | str:
    return _LIGER.get(card.name, f"we know of no {card.name} in Liger-Kernel")


def _reference(card: Operator) -> Callable[..., Any] | str:
    return card.reference if card.eager is not card.reference else "eager runs the definition itself"


_ALL = (
    Baseline("reference", "reference", lambda device: True, _reference),
    Baseline("eager", "eager", lambda device: True, lambda card: card.eager),
    Baseline("compile", "torch.compile", lambda device: True, _compiled),
    Baseline("liger", "Liger", _liger_here, _liger),
)
BASELINES = {baseline.name: baseline for baseline in _ALL}
