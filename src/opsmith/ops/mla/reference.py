"""The definition of MLA pre-processing, in plain PyTorch, written from its formulas alone.

In float64 it is exact; in the other dtypes it rounds where the operator does: after each matmul, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from opsmith.ops.mla.call import Rotation
from opsmith.ops.mla.projection import project
from opsmith.ops.mla.weights import Parts
from opsmith.ops.rms_norm.quant import normalize, q8, wide


class Defined(NamedTuple):
    """What one call gives: queries, and the rows that the cache gets."""

    q_out: torch.Tensor  # [T, H, kv_lora], int8 with a query scale
    q_rope: torch.Tensor  # [T, H, rope]
    k_nope: torch.Tensor  # [T, kv_lora], int8 with a latent scale
    k_rope: torch.Tensor  # [T, rope]
    latent_q: torch.Tensor | None  # [T, q_lora], normalized


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """`x cos + rotated(x) sin` of [T, rope] or [T, H, rope]; columns i and i + rope/2 of the table are pair i's."""
    cos, sin, interleaved = rotation
    if cos is None or sin is None:
        return x
    v, half = wide(x), x.shape[-1] // 2
    columns = []
    for table in (cos, sin):
        t = table.to(v.dtype)
        first, second = (t, t) if t.shape[-1] == half else (t[..., :half], t[..., half:])
        t = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
        columns.append(t.unsqueeze(1) if x.dim() == 3 else t)
    if interleaved:
        turned = torch.stack((-v[..., 1::2], v[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-v[..., half:], v[..., :half]), -1)
    return (v * columns[0] + turned * columns[1]).to(x.dtype)


def keys(
    a: torch.Tensor,
    kv_norm: torch.Tensor,
    rotation: Rotation,
    rope: int,
    eps: float = 1e-6,
    latent_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache gets of `a`, whose rows begin with [ckv | k_pe]."""
    kv_lora = kv_norm.shape[0]
    k_nope = normalize(a[:, :kv_lora], kv_norm, eps=eps)
    k_rope = rotate(a[:, kv_lora : kv_lora + rope], rotation)
    if latent_scale is None:
        return k_nope.to(a.dtype), k_rope
    return q8(k_nope / latent_scale.to(k_nope.dtype)).to(torch.int8), k_rope


def queries(
    q: torch.Tensor, k_up: torch.Tensor, rotation: Rotation, query_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The absorbed queries and the rotated ones, of q [T, H, nope + rope]."""
    nope = k_up.shape[1]
    q_out = torch.einsum("thn,hnk->thk", q[..., :nope], k_up)
    q_rope = rotate(q[..., nope:], rotation)
    if query_scale is None:
        return q_out, q_rope
    return q8(wide(q_out) * query_scale.to(wide(q_out).dtype).view(-1, 1)).to(torch.int8), q_rope


def define(
    x: torch.Tensor,
    w: Parts,
    rotation: Rotation,
    eps: float = 1e-6,
    latent_scale: torch.Tensor | None = None,
    query_scale: torch.Tensor | None = None,
) -> Defined:
    """All of a call, but for the write into a cache."""
    y = normalize(x, w.input_norm, w.input_shift, eps)
    a = project(y, w.down, w.quant, x.dtype)
    k_nope, k_rope = keys(a, w.kv_norm, rotation, w.rope, eps, latent_scale)
    latent_q = None
    if w.q_norm is not None:
        y = normalize(w.split(a)[1], w.q_norm, w.q_shift, eps)
        latent_q = y.to(x.dtype)
    q = project(y, w.up, w.quant, x.dtype).unflatten(1, (w.heads, -1))
    return Defined(*queries(q, w.k_up, rotation, query_scale), k_nope, k_rope, latent_q)
