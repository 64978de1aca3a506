"""The checks of dense and packed attention."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.arguments import alike, check_float, check_mask, check_number, short


def check(q: Any, k: Any, v: Any, mask: Any, scale: Any) -> None:
    check_number("attention", "scale", scale)
    if mask is None and _fits(q, k, v):
        return  # the usual call, found out in a third of the time
    for name, t in (("q", q), ("k", k), ("v", v)):
        check_float("attention", t, name, least_dim=4)
        if t.dim() != 4:
            raise ValueError(
                f"attention: {name} must have 4 dimensions [B, heads, length, D], got {tuple(t.shape)}"
            )
    check_alike("attention", q, k, v)
    batch, heads, rows, dim = q.shape
    kv_heads, columns = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != dim:
        raise ValueError(
            f"attention: k must have shape [{batch}, Hkv, S, {dim}] to fit q, got {tuple(k.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"attention: v must have shape [{batch}, {kv_heads}, {columns}, Dv] like k, got {tuple(v.shape)}"
        )
    check_heads("attention", heads, kv_heads)
    if mask is not None:
        check_mask("attention", mask, q, (batch, heads, rows, columns), "[B, H, L, S]")


def _fits(q: Any, k: Any, v: Any) -> bool:
    if not (isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return False
    shape, keys, values, dtype = q.shape, k.shape, v.shape, q.dtype
    return (
        len(shape) == len(keys) == len(values) == 4
        and (keys == values or keys[:3] == values[:3])
        and shape[0] == keys[0]
        and shape[3] == keys[3]
        and (shape[1] == keys[1] or (keys[1] > 0 and shape[1] % keys[1] == 0))
        and dtype.is_floating_point
        and k.dtype is dtype
        and v.dtype is dtype
        and q.device == k.device == v.device
    )


def check_alike(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse keys and values in another dtype or on another device than the queries."""
    if alike(k, q, k.shape) and alike(v, q, v.shape):
        return
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype:
            raise TypeError(
                f"{op}: {name} must be {short(q.dtype)} like q, got {short(t.dtype)}; cast it first"
            )
        if t.device != q.device:
            raise ValueError(f"{op}: {name} is on {t.device}, q on {q.device}; move one of them")


def check_heads(op: str, heads: int, kv_heads: int, of: str = "k and v") -> None:
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"{op}: q's {heads} heads must be a multiple of the {kv_heads} heads of {of}")


def check_limits(op: str, window: Any, softcap: Any) -> None:
    """Refuse a window or a cap of scores that is none."""
    if window is not None:
        check_number(op, "window", window, whole=True)
    if softcap is not None:
        check_number(op, "softcap", softcap)
    if window is not None and window < 1:
        raise ValueError(f"{op}: window must be at least 1, got {window}; pass None for no window")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap must be positive, got {softcap}; pass None for no cap")
