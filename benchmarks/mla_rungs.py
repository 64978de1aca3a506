"""MLA pre-processing on three rungs: thirteen operators, two fused chains, one operator.

All take the arguments of `mla_preprocess` and give the same results; `RUNGS` names them. The example times them:
`python examples/mla_preprocess.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from opsmith.ops import (
    MLACache,
    MLAWeights,
    linear,
    mla_kv_epilogue,
    mla_preprocess,
    mla_q_epilogue,
    rope as rope_op,
)
from opsmith.ops.mla.call import Call, Result
from opsmith.ops.mla.preprocess import call_of
from opsmith.ops.mla.projection import norm, normalize_and_project
from opsmith.ops.mla.reference import eager
from opsmith.ops.pages import check_slots


def thirteen_in_pytorch(*args: Any, **options: Any) -> Result:
    """As models write it, of PyTorch's own operators: the baseline."""
    return eager(_checked(*args, **options))


def thirteen_of_ours(*args: Any, **options: Any) -> Result:
    """The same steps, each an operator of this library where there is one; unquantized weights and caches."""
    c = _checked(*args, **options)
    w, (cos, sin, interleaved) = c.w, c.rotation
    if w.quant is not None or c.cache.mode == "int8_tiled":
        raise ValueError(
            "thirteen_of_ours: expected unquantized weights and cache; the other rungs take them"
        )
    y = norm(c.x, w.gamma0, w.beta0, c.eps)
    keys, latent_q = w.split(linear(y, w.down.weight, w.down.bias))
    ckv, k_rope = keys.split((w.kv_lora, w.rope), dim=1)
    z = y if w.gamma1 is None else norm(latent_q, w.gamma1, w.beta1, c.eps)
    q = linear(z, w.up.weight, w.up.bias).unflatten(1, (w.heads, -1))
    q_nope, q_rope = q.split((w.nope, w.rope), dim=2)
    q_out = torch.einsum("thn,hnk->thk", q_nope, w.wuk)
    k_nope = norm(ckv, w.gamma2, None, c.eps)
    if cos is not None and sin is not None and w.rope:
        q_rope = rope_op(q_rope, cos, sin, interleaved=interleaved)
        k_rope = rope_op(k_rope.unsqueeze(1), cos, sin, interleaved=interleaved).squeeze(1)
    return c.finish(q_out, q_rope, k_nope, k_rope, z)


def two_chains(*args: Any, **options: Any) -> Result:
    """The vector operators of both chains fused around the matmuls: norm (and quantization), epilogues."""
    c = _checked(*args, **options)
    w, (cos, sin, interleaved) = c.w, c.rotation
    a = normalize_and_project(c.x, w.gamma0, w.beta0, w.down, w.quant, c.eps)
    turned = {"interleaved": interleaved}
    mla_kv_epilogue(a, w.gamma2, cos, sin, c.slots, c.cache, eps=c.eps, ctkv_scale=c.latent_scale, **turned)
    latent_q = w.split(a)[1]
    if w.gamma1 is None:
        q = normalize_and_project(c.x, w.gamma0, w.beta0, w.up, w.quant, c.eps)
    else:
        q = normalize_and_project(latent_q, w.gamma1, w.beta1, w.up, w.quant, c.eps)
    heads = q.unflatten(1, (w.heads, -1))
    pair = mla_q_epilogue(heads, w.wuk, cos, sin, joint=c.joint, q_nope_scale=c.query_scale, **turned)
    c.remember()
    return (*pair, norm(latent_q, w.gamma1, w.beta1, c.eps)) if c.return_latent_q else pair


def _checked(
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
) -> Call:
    options = eps, return_latent_q, ctkv_scale, q_nope_scale
    call = call_of(x, w, cos, sin, slot_mapping, cache, *options).checked("mla_preprocess")
    check_slots("mla_preprocess", slot_mapping, cache.blocks, cache.block_size)
    return call


RUNGS: dict[str, Callable[..., Result]] = {
    "thirteen operators, PyTorch": thirteen_in_pytorch,
    "thirteen operators, ours": thirteen_of_ours,
    "two fused chains": two_chains,
    "one operator": mla_preprocess,
}
