"""Keys into the latent cache on an NPU: `mla_kv_epilogue.cpp`."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.kernels.ascend.launch import Launch
from opsmith.kernels.ascend.span import span

__all__ = ["launch", "whole_table"]

_TILES = {"int8_tiled": 32, "tiled": 16}
_ROPE_TILE = 16


def whole_table(t: torch.Tensor | None, rope: int) -> torch.Tensor | None:
    """A column for every element of a row, where the table has one for every pair."""
    if t is None:
        return None
    return (torch.cat((t, t), -1) if t.shape[-1] * 2 == rope else t).contiguous()


def launch(
    a: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: Any,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    ctkv_scale: torch.Tensor | float | None = None,
) -> Launch:
    """The call that `opsmith.ops.mla_kv_epilogue` makes, which has looked at the slots; it writes into the cache.

    `cache` is an `opsmith.ops.MLACache`: its mode, latent and rope are read.
    """
    kv_lora, tile = gamma2.shape[0], _TILES.get(cache.mode, 0)
    joint = cache.rope is None
    rope = (
        cache.latent.shape[3] - kv_lora
        if joint
        else cache.rope.shape[3] * (cache.rope.shape[1] if tile else 1)
    )
    a = a if a.stride(-1) == 1 else a.contiguous()
    latent = span(cache.latent)
    behind = None if joint else span(cache.rope)
    scale = (
        None
        if ctkv_scale is None
        else torch.as_tensor(ctkv_scale, dtype=torch.float32, device=a.device).reshape(1)
    )
    inputs = {
        "a": span(a),
        "gamma2": gamma2.contiguous(),
        "cos": whole_table(cos, rope),
        "sin": whole_table(sin, rope),
        "slots": slot_mapping.contiguous(),
        "ctkv": scale,
        "latent": latent,
        "rope": behind,
    }
    outputs = {"latent_out": latent, "rope_out": a.new_empty(0) if behind is None else behind}
    sizes = (
        a.shape[0],
        max(a.stride(0), kv_lora + rope),
        kv_lora,
        rope,
        cache.latent.shape[2 if tile else 1],
        cache.latent.stride(0),
        cache.latent.stride(0) if joint else cache.rope.stride(0),
        tile,
        _ROPE_TILE if tile else 0,
        joint,
        a.element_size(),
        cos is not None,
        interleaved,
        scale is not None,
        eps,
    )
    result = (cache.latent,) if joint else (cache.latent, cache.rope)
    return Launch("mla_kv_epilogue", inputs, outputs if a.shape[0] else {}, sizes, result)
