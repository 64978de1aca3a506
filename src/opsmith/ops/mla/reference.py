"""The definition of MLA pre-processing, in plain PyTorch, written from its formulas alone.

In float64 it is exact; in the other dtypes it rounds where the operator does: after each matmul, and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from opsmith.ops.mla.projection import project
from opsmith.ops.rms_norm.quant import normalize, q8, wide

if TYPE_CHECKING:
    from opsmith.ops.mla.parts import Parts


class Defined(NamedTuple):
    """What one call gives: queries, and the rows that the cache gets."""

    q_out: torch.Tensor  # [T, H, kv_lora], int8 with q_nope_scale
    q_rope: torch.Tensor  # [T, H, rope]
    k_nope: torch.Tensor  # [T, kv_lora], int8 with ctkv_scale
    k_rope: torch.Tensor  # [T, rope]
    latent_q: torch.Tensor | None  # [T, q_lora], normalized


def rotate(
    x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, interleaved: bool
) -> torch.Tensor:
    """`x cos + rotated(x) sin` of [T, rope] or [T, H, rope]; columns i and i + rope/2 of the table are pair i's."""
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
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    kv_lora: int,
    rope: int,
    interleaved: bool,
    eps: float,
    ctkv_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache gets of `a`, whose rows begin with [ckv | k_pe]."""
    k_nope = normalize(a[:, :kv_lora], gamma2, eps=eps)
    k_rope = rotate(a[:, kv_lora : kv_lora + rope], cos, sin, interleaved)
    if ctkv_scale is None:
        return k_nope.to(a.dtype), k_rope
    return q8(k_nope / ctkv_scale.to(k_nope.dtype)).to(torch.int8), k_rope


def queries(
    q: torch.Tensor,
    wuk: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool,
    q_nope_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The absorbed queries and the rotated ones, of q [T, H, nope + rope]."""
    nope = wuk.shape[1]
    q_out = torch.einsum("thn,hnk->thk", q[..., :nope], wuk)
    q_rope = rotate(q[..., nope:], cos, sin, interleaved)
    if q_nope_scale is None:
        return q_out, q_rope
    return q8(wide(q_out) * q_nope_scale.to(wide(q_out).dtype).view(-1, 1)).to(torch.int8), q_rope


def define(
    x: torch.Tensor,
    w: Parts,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    eps: float = 1e-6,
    ctkv_scale: torch.Tensor | None = None,
    q_nope_scale: torch.Tensor | None = None,
) -> Defined:
    """All of it, but for the write into a cache."""
    y = normalize(x, w.gamma0, w.beta0, eps)
    a = project(y, w.down, w.quant, x.dtype)
    k_nope, k_rope = keys(
        a,
        w.gamma2,
        cos,
        sin,
        kv_lora=w.kv_lora,
        rope=w.rope,
        interleaved=w.interleaved,
        eps=eps,
        ctkv_scale=ctkv_scale,
    )
    latent_q = None
    if w.gamma1 is not None:
        y = normalize(a[:, w.kv_lora + w.rope :], w.gamma1, w.beta1, eps)
        latent_q = y.to(x.dtype)
    q = project(y, w.up, w.quant, x.dtype).unflatten(1, (w.heads, -1))
    q_out, q_rope = queries(q, w.wuk, cos, sin, interleaved=w.interleaved, q_nope_scale=q_nope_scale)
    return Defined(q_out, q_rope, k_nope, k_rope, latent_q)
