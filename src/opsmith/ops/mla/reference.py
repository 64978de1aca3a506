"""The definition of MLA pre-processing, in plain PyTorch, written from its formulas alone; and as models write it.

The definition is exact in float64; in the other dtypes it rounds where the operator does: after each matmul, and
nowhere else.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.call.arguments import Maybe
from opsmith.ops.mla.call import Call, Result, Rotation
from opsmith.ops.mla.projection import eager_projection, project
from opsmith.ops.mla.weights import Parts
from opsmith.ops.rms_norm.quant import normalize, q8, wide


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Maybe]:
    """All of a call, but for the write into a cache: the queries' two parts, those of the keys, and the latent queries.

    They are [T, H, kv_lora], int8 with a query scale, [T, H, rope]; [T, kv_lora], int8 with a latent scale, [T, rope];
    and, normalized, [T, q_lora].
    """
    y = normalize(x, w.gamma0, w.beta0, eps)
    a = project(y, w.down, w.quant, x.dtype)
    k_nope, k_rope = keys(a, w.gamma2, rotation, w.rope, eps, latent_scale)
    latent_q = None
    if w.gamma1 is not None:
        y = normalize(w.split(a)[1], w.gamma1, w.beta1, eps)
        latent_q = y.to(x.dtype)
    q = project(y, w.up, w.quant, x.dtype).unflatten(1, (w.heads, -1))
    return (*queries(q, w.wuk, rotation, query_scale), k_nope, k_rope, latent_q)


def eager(c: Call) -> Result:
    """As models write it, of PyTorch's own operators on checked arguments: what ours are measured against."""
    w = c.w
    y = _norm(c.x, w.gamma0, w.beta0, c.eps)
    ckv, latent_q = w.split(eager_projection(y, w.down, w.quant))
    k_nope, k_rope = ckv.split((w.kv_lora, w.rope), dim=1)
    z = y if w.gamma1 is None else _norm(latent_q, w.gamma1, w.beta1, c.eps)
    q = eager_projection(z, w.up, w.quant).unflatten(1, (w.heads, -1))
    q_nope, q_rope = q.split((w.nope, w.rope), dim=2)
    q_out = torch.einsum("thn,hnk->thk", q_nope, w.wuk)
    k_nope = _norm(k_nope, w.gamma2, None, c.eps)
    q_rope, k_rope = c.rotation.rotate(q_rope), c.rotation.rotate(k_rope)
    if c.latent_scale is not None and c.query_scale is not None:
        k_nope = q8(k_nope / c.latent_scale).to(torch.int8)
        q_out = q8(q_out * c.query_scale.view(-1, 1)).to(torch.int8)
    return c.finish(q_out, q_rope, k_nope, k_rope, z)


def _norm(x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    if gamma is None:
        return x
    y = F.rms_norm(x, gamma.shape, gamma.to(x.dtype), eps)
    return y if beta is None else y + beta.to(x.dtype)
