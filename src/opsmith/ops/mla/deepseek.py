"""Reads the weights of Hugging Face's DeepSeek attention, by its structure: names of layers, never of classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_NEEDED = ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim")


def read(module: nn.Module) -> dict[str, Any]:
    """The arguments of MLAWeights: queries after keys, kv_b_proj split, rope rows still as they were."""
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    direct = getattr(module, "q_proj", None)
    chain = [getattr(module, name, None) for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")]
    if missing or (direct is None and None in chain):
        lacks = ", ".join(missing) or "q_proj, or q_a_proj with q_a_layernorm and q_b_proj"
        raise TypeError(
            f"MLAWeights.from_deepseek: {type(module).__name__} is no multi-head latent attention, it lacks {lacks}; "
            "pass the self_attn of a DeepSeek-V2 or V3 layer, or build MLAWeights from its tensors"
        )
    m: Any = module
    nope, rope = int(m.qk_nope_head_dim), int(m.qk_rope_head_dim)
    kv_lora = int(m.kv_a_layernorm.weight.shape[0])
    of_kv = m.kv_b_proj.weight.detach()
    values = int(m.v_head_dim)
    heads = of_kv.shape[0] // (nope + values)
    wuk, wuv = of_kv.view(heads, nope + values, kv_lora).split((nope, values), dim=1)
    first = [m.kv_a_proj_with_mqa]
    if direct is None:
        first.append(m.q_a_proj)
    second = m.q_b_proj if direct is None else m.q_proj
    return {
        "wdqkv": torch.cat([layer.weight.detach() for layer in first]),
        "wuq": second.weight.detach().clone(),
        "wuk": wuk.contiguous(),
        "wuv": wuv.contiguous(),
        "gamma1": None if direct is not None else m.q_a_layernorm.weight.detach().clone(),
        "gamma2": m.kv_a_layernorm.weight.detach().clone(),
        "bias0": _biases(first),
        "bias1": None if second.bias is None else second.bias.detach().clone(),
        "heads": heads,
        "nope": nope,
        "rope": rope,
        "kv_lora": kv_lora,
        "q_lora": None if direct is not None else int(m.q_a_layernorm.weight.shape[0]),
        # V2 always rotates neighbors; V3's configuration may say that its checkpoint was permuted.
        "interleaved": bool(getattr(getattr(m, "config", None), "rope_interleave", True)),
    }


def _biases(layers: list[Any]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    filled = [
        layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias.detach()
        for layer in layers
    ]
    return torch.cat(filled)
