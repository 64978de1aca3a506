"""The definition of MLA pre-processing, in plain PyTorch, written from its formulas alone.

In float64 it is exact; in the other dtypes it rounds where the operator does: after each matmul, and nowhere else.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opsmith.call.arguments import Maybe
from opsmith.ops.mla.call import Rotation
from opsmith.ops.mla.projection import project
from opsmith.ops.mla.weights import Parts
from opsmith.ops.rms_norm.quant import normalize, q8, wide


class Defined(NamedTuple):
    """What one call gives: queries, and the rows that the cache gets."""

    q_out: Tensor  # [T, H, kv_lora], int8 with a query scale
    q_rope: Tensor  # [T, H, rope]
    k_nope: Tensor  # [T, kv_lora], int8 with a latent scale
    k_rope: Tensor  # [T, rope]
    latent_q: Maybe  # [T, q_lora], normalized


def keys(
    a: Tensor, gamma2: Tensor, rotation: Rotation, rope: int, eps: float = 1e-6, latent_scale: Maybe = None
) -> tuple[Tensor, Tensor]:
    """What the cache gets of `a`, whose rows begin with [ckv | k_pe]."""
    kv_lora = gamma2.shape[0]
    k_nope = normalize(a[:, :kv_lora], gamma2, eps=eps)
    k_rope = rotation.rotate(a[:, kv_lora : kv_lora + rope], wider=True)
    if latent_scale is None:
        return k_nope.to(a.dtype), k_rope
    return q8(k_nope / latent_scale.to(k_nope.dtype)).to(torch.int8), k_rope


def queries(q: Tensor, wuk: Tensor, rotation: Rotation, query_scale: Maybe = None) -> tuple[Tensor, Tensor]:
    """The absorbed queries and the rotated ones, of q [T, H, nope + rope]."""
    nope = wuk.shape[1]
    q_out = torch.einsum("thn,hnk->thk", q[..., :nope], wuk)
    q_rope = rotation.rotate(q[..., nope:], wider=True)
    if query_scale is None:
        return q_out, q_rope
    return q8(wide(q_out) * query_scale.to(wide(q_out).dtype).view(-1, 1)).to(torch.int8), q_rope


def define(
    x: Tensor,
    w: Parts,
    rotation: Rotation,
    eps: float = 1e-6,
    latent_scale: Maybe = None,
    query_scale: Maybe = None,
) -> Defined:
    """All of a call, but for the write into a cache."""
    y = normalize(x, w.gamma0, w.beta0, eps)
    a = project(y, w.down, w.quant, x.dtype)
    k_nope, k_rope = keys(a, w.gamma2, rotation, w.rope, eps, latent_scale)
    latent_q = None
    if w.gamma1 is not None:
        y = normalize(w.split(a)[1], w.gamma1, w.beta1, eps)
        latent_q = y.to(x.dtype)
    q = project(y, w.up, w.quant, x.dtype).unflatten(1, (w.heads, -1))
    return Defined(*queries(q, w.wuk, rotation, query_scale), k_nope, k_rope, latent_q)
