"""What the operators of multi-head latent attention refuse: caches, tables, scales, gradients of quantized forms."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.common import check_float, needs_grad, short
from opsmith.ops.mla.cache import MLACache


def check_cache_type(op: str, cache: Any) -> None:
    if not isinstance(cache, MLACache):
        raise TypeError(
            f"{op}: cache must be an MLACache, got {type(cache).__name__}; wrap memory with MLACache(mode, ...)"
        )


def rope_width(op: str, cache: MLACache, kv_lora: int) -> int:
    """How many elements of a row of this cache are the rotated ones."""
    if cache.rope is not None:
        return cache.rope.shape[3] * (cache.rope.shape[1] if "tiled" in cache.mode else 1)
    width = cache.latent.shape[3] - kv_lora
    if width < 0:
        raise ValueError(
            f"{op}: cache.latent must have shape [B, bs, 1, kv_lora + rope] with kv_lora {kv_lora}, got "
            f"{tuple(cache.latent.shape)}"
        )
    return width


def check_dtype(op: str, name: str, t: torch.Tensor, dtype: torch.dtype) -> None:
    if t.dtype not in (dtype, torch.float32):
        either = " or ".join(dict.fromkeys((short(dtype), "float32")))
        raise TypeError(f"{op}: {name} must be {either}, got {short(t.dtype)}; cast it")


def check_table(op: str, cos: Any, sin: Any, x: torch.Tensor, rope: int) -> None:
    """Refuse cosines and sines that are not one row of `rope` (or half of it) for each token of x."""
    if cos is None and sin is None:
        return
    tokens = x.shape[0]
    for name, t in (("cos", cos), ("sin", sin)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(
                f"{op}: {name} must be a tensor [T, rope], got {type(t).__name__}; both may be None"
            )
        if rope % 2 or tuple(t.shape) not in ((tokens, rope), (tokens, rope // 2)):
            raise ValueError(
                f"{op}: {name} must have shape ({tokens}, {rope}), a row for each token (rope must be even), got "
                f"{tuple(t.shape)}"
            )
        check_float(op, t, name)
        check_dtype(op, name, t, x.dtype)
        if t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, the input on {x.device}; move one of them")
    if cos.shape != sin.shape:
        raise ValueError(f"{op}: cos and sin must be alike, got {tuple(cos.shape)} and {tuple(sin.shape)}")


def check_scales(
    op: str, cache: MLACache, ctkv_scale: Any, heads: tuple[Any, int] | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of an int8 cache as tensors; refused where they are missing, or where the cache is not int8."""
    given = {"ctkv_scale": ctkv_scale} | ({} if heads is None else {"q_nope_scale": heads[0]})
    if cache.mode != "int8_tiled":
        for name, value in given.items():
            if value is not None:
                raise ValueError(f'{op}: {name} is for cache mode "int8_tiled", this one is "{cache.mode}"')
        return None, None
    for name, value in given.items():
        if value is None:
            raise ValueError(f'{op}: cache mode "int8_tiled" needs {name}')
    ctkv = _scale(op, "ctkv_scale", ctkv_scale, cache.device)
    if ctkv.numel() != 1:
        raise ValueError(f"{op}: ctkv_scale must be one number, got shape {tuple(ctkv.shape)}")
    return ctkv.reshape(()), None if heads is None else head_scales(op, *heads, cache.device)


def head_scales(op: str, value: Any, heads: int, device: torch.device) -> torch.Tensor | None:
    if value is None:
        return None
    scale = _scale(op, "q_nope_scale", value, device)
    if scale.numel() != heads:
        raise ValueError(
            f"{op}: q_nope_scale must have shape ({heads},), one for each head, got {tuple(scale.shape)}"
        )
    return scale.reshape(heads)


def _scale(op: str, name: str, value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        t = value if value.dtype in (torch.float32, torch.float64) else value.float()
        return t.detach().to(device)
    if isinstance(value, int | float):
        return torch.full((), float(value), device=device)  # no copy to a GPU, which cannot be captured
    try:
        return torch.tensor(value, dtype=torch.float32, device=device)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be a tensor or a number, got {value!r}") from None


def check_inference(op: str, *tensors: torch.Tensor | None) -> None:
    """Quantized forms have no gradient, and say so."""
    if needs_grad(*tensors):
        raise ValueError(
            f"{op}: the quantized form is inference only, and an argument requires gradients; call it under "
            "torch.no_grad(), or train the unquantized form"
        )
