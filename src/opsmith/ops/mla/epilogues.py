"""What follows each projection of MLA pre-processing: keys go into the cache, queries into the latent space."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.common import check_float, check_like, compiling, native, needs_grad, short
from opsmith.kernels import calls
from opsmith.ops.mla.cache import MLACache, check_slots
from opsmith.ops.mla.check import (
    check_cache_type,
    check_dtype,
    check_inference,
    check_scales,
    check_table,
    head_scales,
    rope_width,
)
from opsmith.ops.mla.parts import rows_of
from opsmith.ops.mla.reference import keys, queries

Pair = tuple[torch.Tensor, torch.Tensor | None]


def mla_kv_epilogue(
    a: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    ctkv_scale: torch.Tensor | float | None = None,
) -> None:
    """Split, normalize, rotate and write the keys of the down-projection into their cache, in one pass over `a`.

    `cache[slot[t]] = (rms_norm(a[t, :kv_lora], gamma2, eps), rope(a[t, kv_lora:kv_lora + rope], cos, sin))`; nothing
    is written at slot -1. In an int8 cache the first is `rint(clamp(k / ctkv_scale))`, of the unrounded norm.

    >>> cache = MLACache.allocate("joint", 2, 16, kv_lora=32, rope=8, dtype=torch.float32)
    >>> cos, sin = rope_table(8, 3)
    >>> mla_kv_epilogue(torch.randn(3, 64), torch.ones(32), cos, sin, torch.tensor([5, -1, 17]), cache)
    >>> cache.latent[0, 5].abs().sum() > 0
    tensor(True)

    Args:
        a: [T, kv_lora + rope + ...], whose rows begin with [ckv | k_pe]; what follows is not read.
        gamma2: [kv_lora], in a's dtype or float32.
        cos, sin: [T, rope], each token's row of the table, in a's dtype or float32; None: no rotation.
        slot_mapping: [T] int32 or int64, each token's slot, -1 for none; two tokens must not share one.
        cache: what is written; its rope part says how wide rope is.
        eps: added to the mean square, under the root.
        interleaved: rotate neighbors and not halves.
        ctkv_scale: one number, for "int8_tiled" alone.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device or slot, before anything is written.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024.
    """
    op = "mla_kv_epilogue"
    if ctkv_scale is None and _keys_at_once(a, gamma2, cos, sin, slot_mapping, cache, eps, interleaved):
        return
    check_float(op, a, "a", least_dim=2)
    check_float(op, gamma2, "gamma2")
    check_cache_type(op, cache)
    kv_lora = gamma2.shape[0]
    rope = rope_width(op, cache, kv_lora)
    if a.dim() != 2 or a.shape[1] < kv_lora + rope:
        raise ValueError(
            f"{op}: a must have shape [T, {kv_lora + rope} or more], kv_lora {kv_lora} and rope {rope}, "
            f"got {tuple(a.shape)}"
        )
    check_like(op, gamma2, a, "gamma2", (kv_lora,), "kv_lora", like="a")
    check_dtype(op, "gamma2", gamma2, a.dtype)
    check_table(op, cos, sin, a, rope)
    cache.check(op, kv_lora, rope, a.dtype, a.device)
    scale = check_scales(op, cache, ctkv_scale, None)[0]
    check_slots(op, slot_mapping, a.shape[0], cache)
    if scale is not None:
        check_inference(op, a, gamma2, cos, sin)
    if native(a, op) is True and not needs_grad(a, gamma2, cos, sin):
        _write_keys(a, gamma2, cos, sin, slot_mapping, cache, rope, interleaved, eps, scale)
    else:
        k = keys(
            a,
            gamma2,
            cos,
            sin,
            kv_lora=kv_lora,
            rope=rope,
            interleaved=interleaved,
            eps=eps,
            ctkv_scale=scale,
        )
        cache.write(slot_mapping, *k)
    if scale is not None:
        cache.ctkv_scale = scale


def _keys_at_once(
    a: Any, gamma2: Any, cos: Any, sin: Any, slot_mapping: Any, cache: Any, eps: float, interleaved: bool
) -> bool:
    """Whether the kernel took the call as it is, which refuses what does not fit before anything is written."""
    if compiling() or type(cache) is not MLACache:
        return False
    mode = cache.mode
    try:
        kv_lora = calls.sizes(gamma2)[0]
        _, first, _, last = calls.sizes(cache.latent if mode == "joint" else cache.rope)
        rope = last - kv_lora if mode == "joint" else last if mode == "split" else first * last
        done = calls.new_mla_kv_epilogue(
            a,
            gamma2,
            cos,
            sin,
            slot_mapping,
            rope,
            interleaved,
            mode == "tiled",
            eps,
            None,
            cache.latent,
            cache.rope,
        )
    except (RuntimeError, TypeError, AttributeError, IndexError):  # the checks say why
        return False
    if done is None:
        return False
    cache.kv_lora = kv_lora
    return True


def _write_keys(
    a: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    rope: int,
    interleaved: bool,
    eps: float,
    ctkv_scale: torch.Tensor | None,
) -> None:
    """The kernel."""
    torch.ops.opsmith.mla_kv_epilogue.default(
        rows_of(a),
        gamma2.contiguous(),
        rows_of(cos),
        rows_of(sin),
        slot_mapping,
        rope,
        interleaved,
        "tiled" in cache.mode,
        eps,
        None if ctkv_scale is None else ctkv_scale.float(),
        latent=cache.latent,
        rope=cache.rope,
    )
    cache.kv_lora = gamma2.shape[0]


def mla_q_epilogue(
    q: torch.Tensor,
    wuk: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool = False,
    joint: bool = False,
    q_nope_scale: torch.Tensor | float | None = None,
) -> Pair:
    """Absorb the keys' up-projection into the queries, and rotate their other part.

    `q_out[t, h] = q[t, h, :nope] @ wuk[h]`; `q_rope[t, h] = rope(q[t, h, nope:], cos[t], sin[t])`. With
    `q_nope_scale`, `q_out` becomes int8: `rint(clamp(q_out * q_nope_scale[h]))`.

    >>> cos, sin = rope_table(8, 3)
    >>> q_out, q_rope = mla_q_epilogue(torch.randn(3, 4, 16 + 8), torch.randn(4, 16, 32), cos, sin)
    >>> q_out.shape, q_rope.shape
    (torch.Size([3, 4, 32]), torch.Size([3, 4, 8]))

    Args:
        q: [T, H, nope + rope], the up-projected queries.
        wuk: [H, nope, kv_lora], in q's dtype.
        cos, sin: [T, rope], in q's dtype or float32; None: no rotation.
        interleaved: rotate neighbors and not halves.
        joint: one result [T, H, kv_lora + rope], as a "joint" cache wants it, and None.
        q_nope_scale: [H], for an int8 cache.

    Returns:
        (q_out, q_rope).

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024.
    """
    op = "mla_q_epilogue"
    if q_nope_scale is None:
        done = _queries_at_once(q, wuk, cos, sin, interleaved, joint)
        if done is not None:
            return done
    check_float(op, q, "q", least_dim=3)
    check_float(op, wuk, "wuk", least_dim=3)
    nope = wuk.shape[1]
    if q.dim() != 3 or wuk.dim() != 3 or q.shape[1] != wuk.shape[0] or q.shape[2] < nope:
        raise ValueError(
            f"{op}: q must be [T, H, nope + rope] and wuk [H, nope, kv_lora], got {tuple(q.shape)} "
            f"and {tuple(wuk.shape)}"
        )
    if wuk.dtype != q.dtype or wuk.device != q.device:
        raise TypeError(
            f"{op}: wuk must be {short(q.dtype)} on {q.device} like q, got {short(wuk.dtype)} on {wuk.device}"
        )
    check_table(op, cos, sin, q, q.shape[2] - nope)
    scale = head_scales(op, q_nope_scale, q.shape[1], q.device)
    if scale is not None:
        if joint:
            raise ValueError(
                f"{op}: int8 queries and their rope part have two dtypes; leave joint or the scale out"
            )
        check_inference(op, q, wuk, cos, sin)
    if native(q, op) is True and not needs_grad(q, wuk, cos, sin):
        return _finish_queries(q, wuk, cos, sin, interleaved, joint, scale)
    return join(*queries(q, wuk, cos, sin, interleaved=interleaved, q_nope_scale=scale), joint)


def _queries_at_once(q: Any, wuk: Any, cos: Any, sin: Any, interleaved: bool, joint: bool) -> Pair | None:
    """What the kernel makes of the call as it is; None for one that it does not take."""
    if compiling():
        return None
    try:
        _, nope, kv_lora = calls.sizes(wuk)
        rope = calls.sizes(q)[2] - nope
        widths = (kv_lora + rope, None) if joint else (kv_lora, rope)
        made: Any = calls.new_mla_q_epilogue(q, wuk, cos, sin, interleaved, None, *widths)
    except (RuntimeError, TypeError, AttributeError, IndexError, ValueError):  # the checks say why
        return None
    return made if made is None or not joint else (made, None)


def _finish_queries(
    q: torch.Tensor,
    wuk: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    interleaved: bool,
    joint: bool,
    q_nope_scale: torch.Tensor | None,
) -> Pair:
    """The kernel."""
    q_out, q_rope = new_queries(q, q.shape[2] - wuk.shape[1], wuk.shape[2], joint, q_nope_scale is not None)
    torch.ops.opsmith.mla_q_epilogue.default(
        rows_of(q),
        wuk.contiguous(),
        rows_of(cos),
        rows_of(sin),
        interleaved,
        None if q_nope_scale is None else q_nope_scale.float().contiguous(),
        q_out=q_out,
        q_rope=q_rope,
    )
    return q_out, q_rope


def new_queries(like: torch.Tensor, rope: int, kv_lora: int, joint: bool, int8: bool, heads: int = 0) -> Pair:
    """Memory for the queries of `like`, [T, H, ...] or [T, ...]: two parts, or both as one and None."""
    shape = (like.shape[0], heads or like.shape[1])
    if joint:
        return like.new_empty((*shape, kv_lora + rope)), None
    # The same way twice: the second time its code is in cache.
    q_out = like.new_empty((*shape, kv_lora), dtype=torch.int8) if int8 else like.new_empty((*shape, kv_lora))
    return q_out, like.new_empty((*shape, rope))


def join(q_out: torch.Tensor, q_rope: torch.Tensor, joint: bool) -> Pair:
    """One tensor for a joint cache, two for the others."""
    return (torch.cat((q_out, q_rope), -1), None) if joint else (q_out, q_rope)
