"""Queries into the latent space on an NPU: `mla_q_epilogue.cpp`."""

from __future__ import annotations

import torch

from opsmith.kernels.ascend.launch import Launch
from opsmith.kernels.ascend.mla_kv_epilogue import whole_table

__all__ = ["launch"]


def launch(
    q: torch.Tensor,
    wuk: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool = False,
    joint: bool = False,
    q_nope_scale: torch.Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.mla_q_epilogue` makes."""
    (tokens, heads, width), (_, nope, kv_lora) = q.shape, wuk.shape
    rope, quantize = width - nope, q_nope_scale is not None
    q, wuk = q.contiguous(), wuk.contiguous()
    held = torch.int8 if quantize else q.dtype
    q_out = torch.empty((tokens, heads, kv_lora + (rope if joint else 0)), dtype=held, device=q.device)
    q_rope = q.new_empty(0 if joint else (tokens, heads, rope))
    inputs = {
        "q": q,
        "wuk": wuk,
        "cos": whole_table(cos, rope),
        "sin": whole_table(sin, rope),
        "scale": None if q_nope_scale is None else q_nope_scale.float().contiguous(),
    }
    sizes = (
        tokens,
        heads,
        nope,
        rope,
        kv_lora,
        joint,
        q.element_size(),
        cos is not None,
        interleaved,
        quantize,
    )
    result = (q_out,) if joint else (q_out, q_rope)
    return Launch("mla_q_epilogue", inputs, {"q_out": q_out, "q_rope": q_rope}, sizes, result)
