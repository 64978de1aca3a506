"""MLA pre-processing as models write it, of PyTorch's own operators: what ours are measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from opsmith.ops.mla.call import Call, Result, Rotation
from opsmith.ops.mla.projection import eager_projection, eager_q8


def eager(c: Call) -> Result:
    """PyTorch's operators on checked arguments."""
    w = c.w
    y = _norm(c.x, w.input_norm, w.input_shift, c.eps)
    ckv, latent_q = w.split(eager_projection(y, w.down, w.quant))
    k_nope, k_rope = ckv.split((w.kv_lora, w.rope), dim=1)
    z = y if w.q_norm is None else _norm(latent_q, w.q_norm, w.q_shift, c.eps)
    q = eager_projection(z, w.up, w.quant).unflatten(1, (w.heads, -1))
    q_nope, q_rope = q.split((w.nope, w.rope), dim=2)
    q_out = torch.einsum("thn,hnk->thk", q_nope, w.k_up)
    k_nope = _norm(k_nope, w.kv_norm, None, c.eps)
    q_rope, k_rope = _rope(q_rope, c.rotation), _rope(k_rope, c.rotation)
    if c.latent_scale is not None and c.query_scale is not None:
        k_nope = eager_q8(k_nope / c.latent_scale)
        q_out = eager_q8(q_out * c.query_scale.view(-1, 1))
    return c.finish(q_out, q_rope, k_nope, k_rope, z)


def _norm(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float) -> torch.Tensor:
    if gamma is None:
        return x
    y = F.rms_norm(x, gamma.shape, gamma.to(x.dtype), eps)
    return y if beta is None else y + beta.to(x.dtype)


def _rope(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    cos, sin, interleaved = rotation
    if cos is None or sin is None:
        return x
    half = x.shape[-1] // 2
    if cos.shape[-1] == half:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    if interleaved:
        cos, sin = (torch.stack((t[:, :half], t[:, half:]), -1).flatten(-2) for t in (cos, sin))
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (x * cos + turned * sin).to(x.dtype)
