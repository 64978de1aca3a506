"""The quantization method `opsmith`: weights of linear layers and of the head in 4 or 8 bits, packed when loaded.

LLM(model, quantization="opsmith")                                                      # int8
LLM(model, hf_overrides={"quantization_config": {"quant_method": "opsmith", "format": "int4"}})
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from opsmith import ops

NAME = "opsmith"
FORMATS = ("int8", "int8_dynamic", "int4")
GROUPS = (32, 64, 128)
_KEYS = ("quant_method", "format", "group_size", "symmetric", "ignore")

logger = init_logger(f"vllm.{__name__}")


class OpsmithConfig(QuantizationConfig):
    """What to pack, and how. The head is in int8 where layers are in int4, as `opsmith.optimize` has it.

    Args:
        format: "int8", "int8_dynamic" or "int4", as of `opsmith.ops.PackedLinear`.
        group_size, symmetric: of int4.
        ignore: layers that stay as they are, by a part of their name ("down_proj", "layers.0.").

    Raises:
        ValueError: for a format or a group size that there is not.
    """

    def __init__(
        self, format: str = "int8", group_size: int = 128, symmetric: bool = True, ignore: Sequence[str] = ()
    ) -> None:
        super().__init__()
        if format not in FORMATS:
            raise ValueError(
                f"quantization opsmith: format must be one of {', '.join(FORMATS)}, got {format!r}"
            )
        if group_size not in GROUPS:
            raise ValueError(
                f"quantization opsmith: group_size must be one of {', '.join(map(str, GROUPS))}, got {group_size!r}"
            )
        self.format, self.group_size, self.symmetric, self.ignore = format, group_size, symmetric, ignore

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1  # of GPUs, which take no part

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> OpsmithConfig:
        """The same from `quantization_config` of a model's config.

        Raises:
            ValueError: for a key that there is not.
        """
        unknown = [key for key in config if key not in _KEYS]
        if unknown:
            raise ValueError(
                f"quantization opsmith: quantization_config takes {', '.join(_KEYS)}, got {unknown[0]!r}"
            )
        return cls(**{key: value for key, value in config.items() if key != "quant_method"})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        ignored = any(part in prefix for part in self.ignore)
        if isinstance(layer, ParallelLMHead):
            return UnquantizedEmbeddingMethod() if ignored else OpsmithHeadMethod(self)
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if ignored else OpsmithLinearMethod(self)


class _Packed:
    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        p = layer.packed
        how = {"format": p.format, "group_size": p.group_size, "outer": p.outer}
        return ops.packed_linear(x, p.weight, p.scale, p.zero, bias, **how)


class OpsmithLinearMethod(_Packed, LinearMethodBase):
    """A linear layer that is loaded as the checkpoint has it, then packed."""

    def __init__(self, config: OpsmithConfig) -> None:
        self.config = config
        self.plain = UnquantizedLinearMethod()

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.plain.create_weights(layer, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        config = self.config
        how = {"group_size": config.group_size, "symmetric": config.symmetric}
        _pack(layer, release=True, format=config.format, **how)


class OpsmithHeadMethod(_Packed, UnquantizedEmbeddingMethod):
    """The head, packed beside the embedding where they share a weight: rows of that are looked up as they are."""

    def __init__(self, config: OpsmithConfig) -> None:
        self.format = "int8" if config.format == "int4" else config.format

    def tie_weights(self, layer: Any, embed_tokens: VocabParallelEmbedding) -> Any:
        layer.tied = True
        return super().tie_weights(layer, embed_tokens)

    def process_weights_after_loading(self, layer: Any) -> None:
        _pack(layer, release=not getattr(layer, "tied", False), format=self.format)


def _pack(layer: Any, *, release: bool, **how: Any) -> None:
    weight = layer.weight
    n, k = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(k, n, bias=False)
    linear.weight = nn.Parameter(weight.data, requires_grad=False)
    layer.packed = ops.PackedLinear.from_linear(linear, release=release, **how)
    # Those who look for a weight find one without memory.
    layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


def quantization() -> None:
    """Let `quantization="opsmith"` be known."""
    register_quantization_config(NAME)(OpsmithConfig)
