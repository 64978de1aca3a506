"""Gradients of attention: how `attention_gradients.py` is launched."""

from __future__ import annotations

import torch
import triton

from opsmith.kernels.triton.common import launch
from opsmith.ops.attention.triton.gradients import deltas, of_keys, of_queries
from opsmith.ops.attention.triton.scores import Sequences, blocks, mask_arguments, options, strides


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    row_sums: torch.Tensor,
    mask: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    *,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
) -> None:
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k)
    dout, q, k, v, out, row_sums = map(sequences.dense, (dout, q, k, v, out, row_sums))
    dq, dk, dv = map(sequences.dense, (dq, dk, dv))
    batch, heads, queries, dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    if not heads or not queries:
        dk.zero_()
        dv.zero_()
        return
    special = options(q, v, mask, scale, causal, window, softcap)
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
    memory, mask_strides = mask_arguments(mask)
    inputs = (dout, q, k, v, memory, row_sums, delta)
    shape = (*sequences.arguments, queries, keys, heads)
    steps = (*strides(dout, q, k, v), *mask_strides, *strides(row_sums))
    numbers = (dim, value_dim, scale, window, softcap)
    special |= {"GROUP": heads // kv_heads, **sizes}
    launch(
        of_keys,
        (sequences.tiles(keys, sizes["BN"]), batch * kv_heads),
        *inputs, dk, dv, *shape, *steps, *strides(dk, dv), *numbers, **special,
    )  # fmt: skip
    launch(
        of_queries,
        (sequences.tiles(queries, sizes["BM"]), batch * heads),
        *inputs, dq, *shape, *steps, *strides(dq), *numbers, **special,
    )  # fmt: skip


KERNELS = {"attention_backward": attention_backward}
