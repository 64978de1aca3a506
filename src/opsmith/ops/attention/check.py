"""The checks that dense, packed and paged attention share."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.arguments import check_number

INTEGERS = (torch.int32, torch.int64)


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
