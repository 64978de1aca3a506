"""MLA pre-processing in five launches, meant for one captured graph.

Norm of the tokens | down-projection | norm of the latent queries beside the keys' way into the cache | up-projection |
absorption beside the rotation of the queries. A launch of two stages gives each programs of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from opsmith.call.arguments import Maybe
from opsmith.kernels.triton.common import block_of, launch, processors, steps
from opsmith.ops.mla.triton.rows import layout, power, table_of
from opsmith.ops.mla.triton.stages import absorb_kernel, middle_kernel, project_kernel
from opsmith.ops.mla.weights import TENSORS, Parts
from opsmith.ops.rms_norm.triton_quant import normalize

_FORMS = (0, 1, 2, 0, 0)  # what activations become, for each form of weights


def project(x: Tensor, weight: Tensor, bias: Maybe, descale: Maybe, s: Maybe, y: Tensor, form: int) -> None:
    tokens, n, k = x.shape[0], weight.shape[0], x.shape[1]
    bm = min(power(tokens), 64)
    # Few tokens: a program at least for each multiprocessor, that has much of the weight on its way; many: tiles that
    # read it seldom.
    bn, bk, stages = 64, 64, 4
    if bm <= 32:
        least = processors(x)
        bn = 64 if n >= 128 * least else 32 if n >= 32 * least else 16
        bk = (256 if bn > 16 else 1024 if bm == 16 else 512) // max(weight.element_size(), x.element_size())
        stages = 3
    if form == 4:
        assert descale is not None
        bk = 2 * weight.shape[1] // max(1, descale.shape[1])
    launch(
        project_kernel,
        (triton.cdiv(tokens, bm) * triton.cdiv(n, bn),),
        *(x, weight, bias, descale, s, y),
        *(tokens, n, k, *steps(x, weight, descale, y)),
        BM=bm,
        BN=bn,
        BK=bk,
        FORM=form,
        num_warps=4,
        num_stages=stages,
    )


def kv_epilogue(
    a: Tensor,
    gamma2: Tensor,
    cos: Maybe,
    sin: Maybe,
    slots: Tensor,
    rope_size: int,
    interleaved: bool,
    tiled: bool,
    eps: float,
    ctkv_scale: Maybe,
    *,
    latent: Tensor,
    rope: Maybe = None,
    queries: tuple[Any, ...] | None = None,
) -> None:
    """Keys into the cache; beside them latent queries, where given: gamma1, beta1, z, s, scale, offset, plain, form."""
    kv_lora = gamma2.shape[0]
    *others, form = queries or (*[None] * 7, 0)
    z, plain = others[2], others[6]
    inner = 0 if z is None else z.shape[1]
    size = latent.shape[2 if tiled else 1]
    turn = latent[..., kv_lora:] if rope is None else rope  # within the latent's rows, where it has no tensor
    cos, sin, table, second = table_of(cos, sin, rope_size)
    launch(
        middle_kernel,
        (a.shape[0], 1 if queries is None else 2),
        *(a, *others),
        *(gamma2, cos, sin, slots, latent, turn, ctkv_scale),
        *(inner, kv_lora, rope_size // 2, latent.shape[0] * size, size, eps),
        *(*steps(a, z, plain), table, second),
        *(*layout(latent, tiled), *layout(turn, tiled)),
        BLOCK=block_of(inner, 8192),
        KV=power(kv_lora),
        PAIRS=power(rope_size // 2),
        FORM=form,
        INTERLEAVED=interleaved,
        num_warps=4,
    )


def q_epilogue(
    q: Tensor,
    wuk: Tensor,
    cos: Maybe,
    sin: Maybe,
    interleaved: bool,
    q_nope_scale: Maybe,
    *,
    q_out: Tensor,
    q_rope: Maybe,
) -> None:
    tokens, heads, _ = q.shape
    nope, kv_lora = wuk.shape[1:]
    rope = q.shape[2] - nope
    if q_rope is None:  # both parts are one tensor's
        q_out, q_rope = q_out[..., :kv_lora], q_out[..., kv_lora:]
    cos, sin, table, second = table_of(cos, sin, rope)
    bm, bn = min(power(tokens), 64), min(power(kv_lora), 128)
    launch(
        absorb_kernel,
        (triton.cdiv(tokens, bm), heads, triton.cdiv(kv_lora, bn) + 1),
        *(q, wuk, cos, sin, q_nope_scale, q_out, q_rope),
        *(tokens, nope, kv_lora, rope // 2),
        *(*q.stride()[:2], wuk.stride(0), table, second),
        *(*q_out.stride()[:2], *q_rope.stride()[:2]),
        BM=bm,
        BN=bn,
        BK=min(power(nope), 64),
        PAIRS=power(rope // 2),
        INTERLEAVED=interleaved,
        num_warps=4,
    )


def preprocess(
    x: Tensor,
    *given: Any,
    q_out: Tensor,
    q_rope: Maybe,
    latent: Tensor,
    rope: Maybe = None,
    latent_q: Maybe = None,
) -> None:
    w = Parts(*given[: len(TENSORS)])
    cos, sin, slots, quant, interleaved, tiled, eps, ctkv_scale, q_nope_scale = given[len(TENSORS) :]
    tokens, size = x.shape
    form = _FORMS[quant]
    held = torch.int8 if form else x.dtype

    def activations(n: int) -> tuple[Tensor, Maybe]:
        s = torch.empty(tokens, dtype=torch.float32, device=x.device) if form == 2 else None
        return torch.empty((tokens, n), dtype=held, device=x.device), s

    def normalized_for(scale: Maybe, offset: Maybe) -> tuple[Any, Any]:
        if form == 0 and w.gamma0 is None:
            return x, None
        y, s = activations(size)
        normalize(x, w.gamma0, w.beta0, eps, y, s, scale, offset, form)
        return y, s

    y, s = normalized_for(w.scale0, w.offset0)
    a = x.new_empty((tokens, w.wdqkv.shape[0]))
    project(y, w.wdqkv, w.bias0, w.descale0, s, a, quant)
    queries = None
    if w.q_lora is not None:
        z, z_s = activations(w.q_lora)
        queries = w.gamma1, w.beta1, z, z_s, w.scale1, w.offset1, latent_q, form
    else:
        z, z_s = (y, s) if form != 1 else normalized_for(w.scale1, w.offset1)
    turn = cos, sin, slots, w.rope, interleaved, tiled, eps, ctkv_scale
    kv_epilogue(a, w.gamma2, *turn, latent=latent, rope=rope, queries=queries)
    q = x.new_empty((tokens, w.wuq.shape[0]))
    project(z, w.wuq, w.bias1, w.descale1, z_s, q, quant)
    heads = q.unflatten(1, (w.heads, -1))
    q_epilogue(heads, w.wuk, cos, sin, interleaved, q_nope_scale, q_out=q_out, q_rope=q_rope)


KERNELS = {"mla_kv_epilogue": kv_epilogue, "mla_q_epilogue": q_epilogue, "mla_preprocess": preprocess}
