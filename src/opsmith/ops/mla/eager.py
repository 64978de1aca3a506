"""MLA pre-processing as models write it, of PyTorch's own operators: what ours are measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from opsmith.ops.mla.call import Call, Result
from opsmith.ops.mla.projection import eager_projection
from opsmith.ops.rms_norm.quant import q8


def eager(c: Call) -> Result:
    """PyTorch's operators on checked arguments."""
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
