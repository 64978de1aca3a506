"""Norms, gated activations and rotary embeddings: vLLM's layers, computed by opsmith's operators.

Each class takes the place of vLLM's own of that name wherever a model makes one (`CustomOp.register_oot`). vLLM calls
`forward_native` where Inductor compiles the model, in whose graph an operator of ours is one node, and `forward_cpu`
where nothing does. There alone a layer can be timed by itself, so in a compiled model it is ours where it was named.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.rotary_embedding import (
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)

from opsmith import ops
from opsmith_vllm import choice, measured

Normalized = Tensor | tuple[Tensor, Tensor]


class _Chosen:
    """A layer that is ours where it was named, or measured to be faster than vLLM's own, for the sizes at hand."""

    name: str
    own: Callable[..., Any]  # what vLLM calls where it compiles nothing
    mine: Callable[..., Any]

    in_graphs = True  # where Inductor compiles: what is named in OPSMITH_VLLM
    ours: bool | None = None  # not known before the first call

    def forward_native(self, *inputs: Tensor | None, **named: Tensor | None) -> Any:
        return (self.mine if self.in_graphs else super().forward_native)(*inputs, **named)  # type: ignore[misc]

    def forward_cpu(self, *inputs: Tensor | None, **named: Tensor | None) -> Any:
        if self.ours is None and not torch.compiler.is_compiling():
            self.ours = self._choose([*inputs, *named.values()])
        return (self.own if self.ours is False else self.mine)(*inputs, **named)

    def _choose(self, inputs: list[Tensor | None]) -> bool:
        def cases() -> Any:
            for tokens in (1, 256):
                some = [t if t is None else t[:tokens].clone() for t in inputs]
                yield lambda some=some: self.own(*some), lambda some=some: self.mine(*some)

        sizes = " ".join(
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[1:])}" for t in inputs if t is not None
        )
        return choice.ours(f"{self.name} of {sizes}", cases)


class OpsmithRMSNorm(_Chosen, RMSNorm):
    """RMSNorm as Llama writes it: rounded to the input's dtype before the weight."""

    def mine(self, x: Tensor, residual: Tensor | None = None) -> Normalized:
        if self.variance_size_override is not None:  # the mean square of a part of the row
            return self.own(x, residual)  # type: ignore[no-any-return]
        passed = self.pass_weight if residual is None else self.pass_weight_add
        weight = self.weight.data if passed else None
        rounded = weight is not None and weight.dtype == x.dtype
        return ops.rms_norm(x, weight, self.variance_epsilon, residual=residual, round_before_weight=rounded)

    own = RMSNorm.forward_native


class OpsmithGemmaRMSNorm(_Chosen, GemmaRMSNorm):
    """RMSNorm as Gemma writes it: times 1 + weight, rounded once."""

    def mine(self, x: Tensor, residual: Tensor | None = None) -> Normalized:
        return ops.rms_norm(x, self.weight.data, self.variance_epsilon, residual=residual, weight_offset=1.0)

    own = GemmaRMSNorm.forward_native


class OpsmithSiluAndMul(_Chosen, SiluAndMul):
    """SwiGLU's middle."""

    def __init__(self, *, compile_native: bool = True) -> None:
        super().__init__(compile_native=False)  # which would compile a call of one operator

    def mine(self, x: Tensor) -> Tensor:
        return ops.silu_mul(x)

    own = staticmethod(SiluAndMul.forward_native)


class OpsmithGeluAndMul(_Chosen, GeluAndMul):
    """GEGLU's middle."""

    def mine(self, x: Tensor) -> Tensor:
        return ops.gelu_mul(x, tanh=self.approximate == "tanh")

    own = GeluAndMul.forward_native


class _Rotary(_Chosen, RotaryEmbedding):
    """Rotary embedding on the table that vLLM's own class of that scaling has made."""

    def mine(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        positions = positions.flatten()
        cos, sin = self._match_cos_sin_cache_dtype(query).chunk(2, -1)  # [positions, rotary_dim / 2] each
        how = {"interleaved": not self.is_neox_style, "positions": positions, "rotary_dim": self.rotary_dim}
        q = query.view(positions.shape[0], -1, self.head_size)  # [T, H, D]
        if key is None:
            return ops.rope(q, cos, sin, **how).reshape(query.shape), None
        k = key.view(positions.shape[0], -1, self.head_size)
        q, k = ops.rope_qk(q, k, cos, sin, **how)
        return q.reshape(query.shape), k.reshape(key.shape)

    own = RotaryEmbedding.forward_cpu


# Those that differ from each other in the table alone.
_ROTARY = (
    RotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    LinearScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    NTKScalingRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


def _replace(own: type[CustomOp], ours: Any) -> None:
    ours.in_graphs = not measured()
    CustomOp.register_oot(ours, name=own.__name__)
    ours.name = own.name  # so that vLLM's custom_ops goes on to call it by the name that its users know


def norms() -> None:
    """Let models make our norms."""
    _replace(RMSNorm, OpsmithRMSNorm)
    _replace(GemmaRMSNorm, OpsmithGemmaRMSNorm)


def activations() -> None:
    """Let models make our gated activations."""
    _replace(SiluAndMul, OpsmithSiluAndMul)
    _replace(GeluAndMul, OpsmithGeluAndMul)


def rotary_classes() -> list[type[CustomOp]]:
    """Our rotary embeddings, in the order of vLLM's own."""
    return [
        type(f"Opsmith{own.__name__}", (_Rotary,) if own is RotaryEmbedding else (_Rotary, own), {})
        for own in _ROTARY
    ]


def rotary() -> None:
    """Let models make our rotary embeddings."""
    for own, ours in zip(_ROTARY, rotary_classes(), strict=True):
        _replace(own, ours)
