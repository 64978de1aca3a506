"""Gradients of attention: how `attention_gradients.py` is launched."""

from __future__ import annotations

import torch
import triton

from opsmith.kernels.triton.common import launch
from opsmith.ops.attention.triton.gradients import deltas, of_keys, of_queries
from opsmith.ops.attention.triton.scores import blocks, mask_arguments, options, packed, strides


def _run(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    mask: torch.Tensor | None,
    starts: tuple[torch.Tensor, torch.Tensor] | None,
    settings: tuple[float, bool, int, float],
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    scale, _, window, softcap = settings
    batch, heads, queries, dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    if not heads or not queries:
        dk.zero_()
        dv.zero_()
        return
    special = options(q, v, mask, *settings)
    sizes = blocks(q, v, backward=True)
    delta = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    rows = 16 if q.dtype == torch.float32 else sizes["BM"]  # of a product whose diagonal alone is wanted
    launch(
        deltas,
        (triton.cdiv(queries, rows), batch * heads),
        *(dout, out, delta, queries, heads, *strides(dout, out), value_dim),
        BM=rows,
        BDV=special["BDV"],
    )
    sequences = 0 if starts is None else starts[0].numel() - 1
    memory, mask_strides = mask_arguments(mask)

    def grid(length: int, block: int, programs: int) -> tuple[int, int]:
        tiles = triton.cdiv(length, block) if starts is None else length // block + sequences
        return tiles if length else 0, programs

    inputs = (dout, q, k, v, memory, sums, delta)
    shape = (*(starts or (None, None)), sequences, queries, keys, heads)
    steps = (*strides(dout, q, k, v), *mask_strides, *strides(sums))
    numbers = (dim, value_dim, scale, window, softcap)
    special |= {"GROUP": heads // kv_heads, **sizes}
    launch(
        of_keys,
        grid(keys, sizes["BN"], batch * kv_heads),
        *inputs, dk, dv, *shape, *steps, *strides(dk, dv), *numbers, **special,
    )  # fmt: skip
    launch(
        of_queries,
        grid(queries, sizes["BM"], batch * heads),
        *inputs, dq, *shape, *steps, *strides(dq), *numbers, **special,
    )  # fmt: skip


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_sums: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    settings = (scale, causal, window, softcap)
    _run(dout, q, k, v, out, row_sums, mask, None, settings, dq, dk, dv)


def attention_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_sums: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    starts = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    settings = (scale, causal, window, softcap)
    dout, q, k, v, out, row_sums = map(packed, (dout, q, k, v, out, row_sums))
    _run(dout, q, k, v, out, row_sums, None, starts, settings, packed(dq), packed(dk), packed(dv))


KERNELS = {"attention_backward": attention_backward, "attention_varlen_backward": attention_varlen_backward}
