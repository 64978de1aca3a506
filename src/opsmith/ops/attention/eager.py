"""Attention in plain PyTorch: the definition, and PyTorch's own fused kernels where they compute the same.

Arguments are the kernel's: no window and no soft cap are 0. Packed sequences are taken apart before (varlen.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import Maybe


def definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Maybe,
    at: Maybe,
    keys_at: Maybe,
    sinks: Maybe,
    alibi: Maybe,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> Tensor:
    """The definition, in plain PyTorch."""
    groups = q.shape[1] // max(k.shape[1], 1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    s = (q @ k.mT) * scale  # [B, H, L, S]
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi is not None:
        mask = biased(mask, alibi, distances(q, k))
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask
    seen = visible(q, k, causal, window)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:  # as one key more, without a value
        s = torch.cat((s, sinks.view(-1, 1, 1).expand(*s.shape[:-1], 1)), -1)
    # A query that sees nothing is set to zeros before and after, so that no NaN reaches the gradient either.
    dead = (s == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return p[..., : k.shape[-2]].to(v.dtype) @ v


def distances(q: Tensor, k: Tensor) -> Tensor:
    """[L, S]: how far behind a query's position a key stands, less than 0 in front of it."""
    rows, columns = q.shape[-2], k.shape[-2]
    here = torch.arange(rows, device=q.device)[:, None] + (columns - rows)
    return torch.arange(columns, device=q.device) - here


def biased(mask: Maybe, alibi: Tensor, distances: Tensor) -> Tensor:
    """ALiBi as an additive mask [..., H, L, S], together with the mask there is; in float32 at least."""
    slopes = alibi.to(torch.promote_types(alibi.dtype, torch.float32))
    bias = slopes.view(-1, 1, 1) * distances
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask


def visible(q: Tensor, k: Tensor, causal: bool, window: int) -> Maybe:
    """[L, S], True where causal rule and window let a query see a key; None when neither is asked for."""
    rows, columns = q.shape[-2], k.shape[-2]
    if not causal and not window:
        return None
    seen = torch.ones(rows, columns, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(columns - rows)
    if window:
        seen = seen.triu(columns - rows - window + 1)
        seen = seen if causal else seen.tril(columns - rows + window - 1)
    return seen


def hides(q: Tensor, causal: bool) -> bool:
    """Whether the causal rule hides anything: the last query sees every key. No symbol, which PyTorch's refuses."""
    if q.shape[2] <= 1:
        return False
    return causal


def default_scale(q: Tensor) -> float:
    return 1.0 / math.sqrt(q.shape[-1] or 1)


def eager(*given: Any) -> Tensor:
    """PyTorch's fused attention where it can express the call, else the definition."""
    q, k, v, mask, at, keys_at, sinks, alibi, scale, causal, window, softcap = given
    if mask is not None and mask.dim() < 2:  # which PyTorch's does not broadcast
        mask = mask.expand(q.shape[2], k.shape[2])
    if softcap or sinks is not None:
        return definition(*given)
    if alibi is not None:
        mask = biased(mask, alibi, distances(q, k))
    # On a GPU PyTorch takes a mask in q's dtype alone, in which a bias of thousands of positions is no longer exact.
    if mask is not None and q.is_cuda and mask.dtype not in (torch.bool, q.dtype):
        return definition(q, k, v, mask, at, keys_at, None, None, scale, causal, window, softcap)
    grouped = q.shape[1] != k.shape[1]
    causal = hides(q, causal)
    if mask is None and not window and not causal and not grouped:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)  # each argument more takes time to parse
    plain_causal = causal and not window and mask is None
    if q.shape[2] != k.shape[2]:
        plain_causal = False
    seen = None if plain_causal else visible(q, k, causal, window)
    if mask is None or seen is None:
        both = seen if mask is None else mask
    else:
        both = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=both, is_causal=plain_causal, scale=scale, enable_gqa=grouped
    )


def sdpa(values: Sequence[Any]) -> Tensor:
    """PyTorch's fused attention on a GPU, for the calls that `sdpa_supports`."""
    q, k, v, _, _, _, _, _, scale, causal, *_ = values
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=hides(q, causal), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def sdpa_supports(values: Sequence[Any]) -> bool | str:
    """True where PyTorch's flash, cuDNN or memory-efficient kernel computes this very call on a GPU."""
    q, k, v, mask, _, _, sinks, alibi, _, causal, window, softcap = values
    if not (sinks is None and alibi is None):
        return "PyTorch's fused kernels know neither sinks nor ALiBi"
    if mask is not None:
        return "PyTorch does not promise zeros for a row that a mask hides wholly"
    if window or softcap:
        return "PyTorch's fused kernels know neither window nor softcap"
    if causal and q.shape[2] not in (1, k.shape[2]):
        return "PyTorch aligns the causal rule to the first key, opsmith to the last"
    grouped = q.shape[1] != k.shape[1]
    if torch.compiler.is_dynamo_compiling():  # which cannot ask PyTorch's kernels: what flash attention takes
        flash = q.dtype != torch.float32 and q.shape[3] == v.shape[3] and q.shape[3] <= 256
        return flash or "a compiled graph takes PyTorch's kernel for 16 bits and heads up to 256 only"
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, hides(q, causal), grouped)
    fused = (
        torch.backends.cuda.can_use_flash_attention(asked)
        or torch.backends.cuda.can_use_cudnn_attention(asked)
        or torch.backends.cuda.can_use_efficient_attention(asked)
    )
    return (
        fused
        or "none of PyTorch's fused kernels takes this call, and the unfused one builds the L x S matrix"
    )


def has_gpu() -> bool | str:
    return torch.cuda.is_available() or "there is no GPU here"
