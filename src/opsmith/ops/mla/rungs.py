"""MLA pre-processing on three rungs: thirteen operators, two fused chains, one operator.

All take the arguments of `mla_preprocess` and give the same results. `RUNGS` names them, for benchmarks and examples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from opsmith.ops.linear import linear
from opsmith.ops.mla.cache import MLACache
from opsmith.ops.mla.epilogues import join, mla_kv_epilogue, mla_q_epilogue
from opsmith.ops.mla.parts import Parts
from opsmith.ops.mla.preprocess import Result, check, mla_preprocess
from opsmith.ops.mla.projection import Projection, dequantize_int4
from opsmith.ops.mla.weights import MLAWeights
from opsmith.ops.rms_norm import rms_norm
from opsmith.ops.rms_norm.quant import rms_norm_quant
from opsmith.ops.rope import rope as rope_op


def thirteen_in_pytorch(
    x: torch.Tensor,
    w: MLAWeights,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: Any = None,
    q_nope_scale: Any = None,
) -> Result:
    """As models write it, of PyTorch's own operators: the baseline."""
    parts = w.parts()
    scales = check(
        "mla_preprocess", x, parts, cos, sin, slot_mapping, cache, ctkv_scale, q_nope_scale, return_latent_q
    )
    return eager(x, parts, cos, sin, slot_mapping, cache, eps, return_latent_q, *scales)


def thirteen_of_ours(
    x: torch.Tensor,
    w: MLAWeights,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
) -> Result:
    """The same steps, each an operator of this library where there is one; unquantized weights and caches."""
    p = w.parts()
    check("mla_preprocess", x, p, cos, sin, slot_mapping, cache)
    if p.quant is not None or cache.mode == "int8_tiled":
        raise ValueError(
            "thirteen_of_ours: expected unquantized weights and cache; the other rungs take them"
        )
    y = _norm(x, p.gamma0, p.beta0, eps)
    a = linear(y, p.down.weight, p.down.bias)
    ckv, k_pe, ql = a.split((p.kv_lora, p.rope, a.shape[1] - p.kv_lora - p.rope), dim=1)
    z = y if p.gamma1 is None else _norm(ql, p.gamma1, p.beta1, eps)
    q = linear(z, p.up.weight, p.up.bias).unflatten(1, (p.heads, -1))
    q_nope, q_rope = q.split((p.nope, p.rope), dim=2)
    q_out = torch.einsum("thn,hnk->thk", q_nope, p.wuk)
    k_nope, k_rope = _norm(ckv, p.gamma2, None, eps), k_pe
    if cos is not None and sin is not None and p.rope:
        q_rope = rope_op(q_rope, cos, sin, interleaved=p.interleaved)
        k_rope = rope_op(k_pe.unsqueeze(1), cos, sin, interleaved=p.interleaved).squeeze(1)
    cache.write(slot_mapping, k_nope, k_rope)
    return join(q_out, q_rope, cache.mode == "joint")


def two_chains(
    x: torch.Tensor,
    w: MLAWeights,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: Any = None,
    q_nope_scale: Any = None,
) -> Result:
    """The vector operators of both chains fused around the matmuls: norm (and quantization), epilogues."""
    p = w.parts()
    check("mla_preprocess", x, p, cos, sin, slot_mapping, cache, ctkv_scale, q_nope_scale, return_latent_q)
    a = normalize_and_project(x, p.gamma0, p.beta0, p.down, p.quant, eps)
    mla_kv_epilogue(
        a, p.gamma2, cos, sin, slot_mapping, cache, eps=eps, interleaved=p.interleaved, ctkv_scale=ctkv_scale
    )
    ql = a[:, p.kv_lora + p.rope :]
    if p.gamma1 is None:
        q = normalize_and_project(x, p.gamma0, p.beta0, p.up, p.quant, eps)
    else:
        q = normalize_and_project(ql, p.gamma1, p.beta1, p.up, p.quant, eps)
    pair = mla_q_epilogue(
        q.unflatten(1, (p.heads, -1)),
        p.wuk,
        cos,
        sin,
        interleaved=p.interleaved,
        joint=cache.mode == "joint",
        q_nope_scale=q_nope_scale,
    )
    if ctkv_scale is not None:
        cache.q_nope_scale = torch.as_tensor(q_nope_scale, dtype=torch.float32)
    return (*pair, _norm(ql, p.gamma1, p.beta1, eps)) if return_latent_q else pair


RUNGS: dict[str, Callable[..., Result]] = {
    "thirteen operators, PyTorch": thirteen_in_pytorch,
    "thirteen operators, ours": thirteen_of_ours,
    "two fused chains": two_chains,
    "one operator": mla_preprocess,
}


def eager(
    x: torch.Tensor,
    p: Parts,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: torch.Tensor | None = None,
    q_nope_scale: torch.Tensor | None = None,
) -> Result:
    """PyTorch's operators on checked arguments."""
    y = _eager_norm(x, p.gamma0, p.beta0, eps)
    a = _eager_projection(y, p.down, p.quant)
    ckv, k_pe, ql = a.split((p.kv_lora, p.rope, a.shape[1] - p.kv_lora - p.rope), dim=1)
    z = y if p.gamma1 is None else _eager_norm(ql, p.gamma1, p.beta1, eps)
    q = _eager_projection(z, p.up, p.quant).unflatten(1, (p.heads, -1))
    q_nope, q_pe = q.split((p.nope, p.rope), dim=2)
    q_out = torch.einsum("thn,hnk->thk", q_nope, p.wuk)
    k_nope = _eager_norm(ckv, p.gamma2, None, eps)
    q_rope, k_rope = q_pe, k_pe
    if cos is not None and sin is not None:
        q_rope = _eager_rope(q_pe, cos, sin, p.interleaved)
        k_rope = _eager_rope(k_pe, cos, sin, p.interleaved)
    if ctkv_scale is not None and q_nope_scale is not None:
        k_nope = _eager_q8(k_nope / ctkv_scale)
        q_out = _eager_q8(q_out * q_nope_scale.view(-1, 1))
        cache.ctkv_scale, cache.q_nope_scale = ctkv_scale, q_nope_scale
    cache.write(slot_mapping, k_nope, k_rope)
    pair = join(q_out, q_rope, cache.mode == "joint")
    return (*pair, z) if return_latent_q else pair


def _eager_norm(
    x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if gamma is None:
        return x
    y = F.rms_norm(x, gamma.shape, gamma.to(x.dtype), eps)
    return y if beta is None else y + beta.to(x.dtype)


def _eager_q8(v: torch.Tensor) -> torch.Tensor:
    return v.round().clamp(-128, 127).to(torch.int8)


def _eager_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
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


def _eager_projection(y: torch.Tensor, p: Projection, quant: str | None) -> torch.Tensor:
    if quant is None:
        return F.linear(y, p.weight, p.bias)
    assert p.descale is not None
    if quant == "weight_int8":
        return F.linear(y, (p.weight * p.descale[:, None]).to(y.dtype), p.bias)
    if quant == "weight_int4":
        return F.linear(y, dequantize_int4(p, y.shape[1]).to(y.dtype), p.bias)
    if p.scale is not None and p.offset is not None:
        return _integer_linear(_eager_q8(y / p.scale + p.offset), None, p).to(y.dtype)
    s = y.float().abs().amax(-1, keepdim=True) / 127 if y.shape[1] else y.new_zeros((y.shape[0], 1)).float()
    q = _eager_q8(y / torch.where(s > 0, s, 1.0))
    return _integer_linear(q, s, p).to(y.dtype)


def _integer_linear(q: torch.Tensor, s: torch.Tensor | None, p: Projection) -> torch.Tensor:
    """int8 times int8 in int32, scaled in float32; `s` a factor for each row."""
    assert p.descale is not None
    sums = (
        torch._int_mm(q, p.weight.t())
        if q.numel()
        else q.new_zeros((q.shape[0], p.weight.shape[0]), dtype=torch.int32)
    )
    a = (sums if p.bias is None else sums + p.bias) * p.descale
    return a if s is None else a * s


def _norm(x: torch.Tensor, gamma: torch.Tensor | None, beta: torch.Tensor | None, eps: float) -> torch.Tensor:
    if gamma is None:
        return x
    y = rms_norm(x, gamma, eps)
    assert isinstance(y, torch.Tensor)
    return y if beta is None else y + beta


def normalize_and_project(
    x: torch.Tensor,
    gamma: torch.Tensor | None,
    beta: torch.Tensor | None,
    p: Projection,
    quant: str | None,
    eps: float,
) -> torch.Tensor:
    """A norm, where there is a gamma, and the projection behind it, in any form of quantization."""
    if quant is None:
        return linear(_norm(x, gamma, beta, eps), p.weight, p.bias)
    if quant.startswith("weight"):
        return _eager_projection(_norm(x, gamma, beta, eps), p, quant)
    if p.scale is not None:
        q = rms_norm_quant(x, gamma, beta, eps, scale=p.scale, offset=p.offset)
        assert isinstance(q, torch.Tensor)
        return _integer_linear(q, None, p).to(x.dtype)
    q, s = rms_norm_quant(x, gamma, beta, eps)
    return _integer_linear(q, s.unsqueeze(-1), p).to(x.dtype)
