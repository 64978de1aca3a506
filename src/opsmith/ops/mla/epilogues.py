"""What follows each projection of MLA pre-processing: keys go into the cache, queries into the latent space.

Their cards are functions of tensors alone, with a fresh cache as a result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import EPS, Maybe, check_fit, check_number
from opsmith.call.dispatch import compiling, native, needs_grad, uncast
from opsmith.call.fast import direct
from opsmith.call.layouts import dense_rows, nbytes
from opsmith.kernels import libraries
from opsmith.operator import Cost, Make, Sample
from opsmith.ops.mla.cache import MLACache, check_cache_type, check_mapping, head_scales
from opsmith.ops.mla.call import REFUSALS, Pair, Rotation, in_float32, join, new_queries
from opsmith.ops.mla.cards import card, fresh_cache, fresh_rows, table
from opsmith.ops.mla.check import check_inference
from opsmith.ops.mla.names import either_name
from opsmith.ops.mla.reference import keys, queries
from opsmith.ops.pages import check_slots, some_slots


@either_name
def mla_kv_epilogue(
    a: Tensor,
    gamma2: Tensor,
    cos: Maybe,
    sin: Maybe,
    slot_mapping: Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    ctkv_scale: Tensor | float | None = None,
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
        eps: added to the mean square, under the root; 0 or more.
        interleaved: rotate neighbors and not halves.
        ctkv_scale: one number, for "int8_tiled" alone.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device or slot, before anything is written.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024.
    """
    op = "mla_kv_epilogue"
    rotation = Rotation(cos, sin, interleaved)
    check_cache_type(op, cache)
    if ctkv_scale is None and not compiling():
        try:
            kv_lora = gamma2.shape[0]
            rope = cache.rope_width(op, kv_lora)
            how = rope, interleaved, cache.mode == "tiled", eps, None, cache.latent, cache.rope
            if direct.new_mla_kv_epilogue(a, gamma2, cos, sin, slot_mapping, *how):
                cache.kv_lora = kv_lora
                return
        except REFUSALS:  # the checks say why
            pass
    check_fit(op, ("a", a, "T width"), ("gamma2", gamma2, "kv_lora", None, torch.float32))
    kv_lora = gamma2.shape[0]
    rope = cache.rope_width(op, kv_lora)
    if a.shape[1] < kv_lora + rope:
        raise ValueError(
            f"{op}: a must have shape [T, {kv_lora + rope} or more], kv_lora {kv_lora} and rope {rope}, "
            f"got {tuple(a.shape)}"
        )
    rotation.check(op, "a", a, rope)
    cache.check(op, kv_lora, rope, a)
    scale = cache.check_scales(op, ctkv_scale)[0]
    check_mapping(op, slot_mapping, a.shape[0], cache)
    check_slots(op, slot_mapping, cache.blocks, cache.block_size)
    check_number(op, "eps", eps, EPS)
    if scale is not None:
        check_inference(op, a, gamma2, cos, sin)
    if native(a, op) is True and not needs_grad(a, gamma2, cos, sin):
        torch.ops.opsmith.mla_kv_epilogue.default(
            dense_rows(a),
            gamma2.contiguous(),
            *rotation.rows(),
            slot_mapping,
            rope,
            interleaved,
            "tiled" in cache.mode,
            eps,
            in_float32(scale),
            latent=cache.latent,
            rope=cache.rope,
        )
        cache.kv_lora = kv_lora
    else:
        cache.write(slot_mapping, *keys(a, gamma2, rotation, rope, eps, scale))
    if scale is not None:
        cache.ctkv_scale = scale


@either_name
def mla_q_epilogue(
    q: Tensor,
    wuk: Tensor,
    cos: Maybe,
    sin: Maybe,
    *,
    interleaved: bool = False,
    joint: bool = False,
    q_nope_scale: Tensor | float | None = None,
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
    if q_nope_scale is None and not compiling():
        try:
            pair = new_queries(q, wuk, q.shape[2] - wuk.shape[1], joint)
            if wuk.numel() and direct.new_mla_q_epilogue(q, wuk, cos, sin, interleaved, None, *pair):
                return pair
        except REFUSALS:  # the checks say why
            pass
    check_fit(op, ("q", q, "T H width"), ("wuk", wuk, "H nope kv_lora"))
    rope, rotation = q.shape[2] - wuk.shape[1], Rotation(cos, sin, interleaved)
    if rope < 0 or not wuk.numel():
        raise ValueError(
            f"{op}: q must be [T, H, nope + rope] and wuk [H, nope, kv_lora], none of them 0, got {tuple(q.shape)} "
            f"and {tuple(wuk.shape)}"
        )
    rotation.check(op, "q", q, rope)
    scale = head_scales(op, q_nope_scale, q.shape[1], q.device)
    if scale is not None:
        if joint:
            raise ValueError(
                f"{op}: int8 queries and their rope part have two dtypes; leave joint or the scale out"
            )
        check_inference(op, q, wuk, cos, sin)
    if native(q, op) is not True or needs_grad(q, wuk, cos, sin):
        with uncast(q):
            return join(*queries(q, wuk, rotation, scale), joint)
    q_out, q_rope = new_queries(q, wuk, rope, joint, scale is not None)
    torch.ops.opsmith.mla_q_epilogue.default(
        dense_rows(q),
        wuk.contiguous(),
        *rotation.rows(),
        interleaved,
        in_float32(scale),
        q_out=q_out,
        q_rope=q_rope,
    )
    return q_out, q_rope


def kv_form(
    a: Tensor,
    gamma2: Tensor,
    cos: Maybe,
    sin: Maybe,
    slot_mapping: Tensor,
    *,
    mode: str,
    blocks: int,
    block_size: int,
    rope: int,
    eps: float = 1e-6,
    interleaved: bool = False,
    defined: bool = False,
) -> tuple[Tensor, ...]:
    """`mla_kv_epilogue` into a fresh cache of this mode, whose tensors are the result; `defined`: in plain PyTorch."""
    cache = fresh_cache("mla_kv_epilogue", mode, blocks, block_size, gamma2.shape[0], rope, a)
    if defined:
        cache.write(slot_mapping, *keys(a, gamma2, Rotation(cos, sin, interleaved), rope, eps))
    else:
        mla_kv_epilogue(a, gamma2, cos, sin, slot_mapping, cache, eps=eps, interleaved=interleaved)
    return fresh_rows(cache)


def q_form(
    q: Tensor,
    wuk: Tensor,
    cos: Maybe,
    sin: Maybe,
    *,
    interleaved: bool = False,
    joint: bool = False,
    defined: bool = False,
) -> tuple[Tensor, ...]:
    """`mla_q_epilogue`, whose result is one tensor where `joint`, else two; `defined`: in plain PyTorch."""
    if defined:
        pair = join(*queries(q, wuk, Rotation(cos, sin, interleaved)), joint)
    else:
        pair = mla_q_epilogue(q, wuk, cos, sin, interleaved=interleaved, joint=joint)
    return tuple(t for t in pair if t is not None)


def _kv_cost(
    a: Tensor, gamma2: Tensor, *given: Maybe, blocks: int, block_size: int, rope: int, **_: Any
) -> Cost:
    """Of the form, which makes its cache."""
    return _kv_work(a, gamma2, rope, given, blocks * block_size, a.element_size())


def _kv_entry_cost(a: Tensor, gamma2: Tensor, rope_size: int, **rest: Any) -> Cost:
    given = (rest[name] for name in ("cos", "sin", "slots"))
    return _kv_work(a, gamma2, rope_size, given, a.shape[0], rest["latent"].element_size())


def _kv_work(a: Tensor, gamma2: Tensor, rope: int, given: Iterable[Maybe], slots: int, held: int) -> Cost:
    """A norm and a rotation of each row, which then goes to its slot."""
    rows, width = a.shape[0], gamma2.shape[0] + rope
    read = rows * width * a.element_size() + nbytes(gamma2, *given)
    return Cost(rows * (4.0 * gamma2.shape[0] + 3.0 * rope), read + slots * width * held)


def _q_cost(
    q: Tensor, wuk: Tensor, cos: Maybe, sin: Maybe, q_out: Maybe = None, q_rope: Maybe = None, **_: Any
) -> Cost:
    """Queries brought into the latent space, and their rope part rotated."""
    tokens, (heads, nope, kv_lora) = q.shape[0], wuk.shape
    rope = q.shape[2] - nope
    written = (
        nbytes(q_out, q_rope) if q_out is not None else tokens * heads * (kv_lora + rope) * q.element_size()
    )
    return Cost(tokens * heads * (2.0 * nope * kv_lora + 3.0 * rope), nbytes(q, wuk, cos, sin) + written)


def _kv_samples(make: Make) -> Iterator[Sample]:
    def sample(
        name: str, tokens: int, kv_lora: int, rope: int, *, a: Any = None, turn: bool = True, **how: Any
    ) -> Sample:
        sizes: dict[str, Any] = {"mode": "split", "blocks": 3, "block_size": 16, "rope": rope, **how}
        slots = some_slots(make, tokens, sizes["blocks"] * sizes["block_size"])
        x = make(tokens, kv_lora + rope + 5) if a is None else a
        cos_sin = table(make, tokens, rope) if turn else (None, None)
        return Sample(name, (x, make(kv_lora, scale=0.3, shift=1.0), *cos_sin, slots), sizes)

    for tokens, kv_lora in ((2, 33), (7, 17), (40, 130)):
        yield sample(f"{tokens}x{kv_lora}", tokens, kv_lora, 8)
    yield sample("one token, joint", 1, 20, 6, mode="joint", blocks=2, block_size=1)
    yield sample("tiled", 9, 48, 32, mode="tiled", block_size=5)
    yield sample("interleaved", 9, 40, 12, mode="joint", interleaved=True)
    yield sample("no rotation", 9, 40, 12, turn=False)
    yield sample("strided", 9, 40, 12, a=make(70, 9).t())
    yield sample("near zero", 3, 24, 4, a=make(3, 30, scale=1e-4), eps=1e-5)
    yield sample("empty", 0, 16, 8)


def _kv_workloads(make: Make) -> Iterator[Sample]:
    for tokens in (4096, 4):
        blocks = max(1, tokens // 128)
        sizes = {"mode": "split", "blocks": blocks, "block_size": 128, "rope": 64}
        slots = some_slots(make, tokens, blocks * 128, skip=False)
        yield Sample(
            f"{tokens} tokens, V3", (make(tokens, 2112), make(512), *table(make, tokens, 64), slots), sizes
        )


def _q_samples(make: Make) -> Iterator[Sample]:
    def sample(
        name: str, tokens: int, heads: int, nope: int, rope: int, kv_lora: int, *, q: Any = None, **how: Any
    ) -> Sample:
        x = make(tokens, heads, nope + rope) if q is None else q
        weight = make(heads, nope, kv_lora, scale=nope**-0.5)
        return Sample(name, (x, weight, *table(make, tokens, rope)), how)

    for tokens, heads in ((2, 3), (5, 7), (33, 2)):
        yield sample(f"{tokens}x{heads}", tokens, heads, 12, 6, 37)
    yield sample("one token", 1, 1, 5, 2, 3)
    yield sample("joint", 9, 3, 16, 8, 32, joint=True)
    yield sample("interleaved", 9, 3, 16, 8, 32, interleaved=True)
    yield sample("strided", 9, 3, 16, 8, 32, q=make(9, 24, 3).transpose(1, 2))
    yield Sample("no rotation", (make(9, 3, 24), make(3, 16, 32), None, None), {"joint": False})
    yield sample("empty", 0, 3, 16, 8, 32)


def _q_workloads(make: Make) -> Iterator[Sample]:
    for tokens in (128, 1):
        args = (make(tokens, 128, 192), make(128, 128, 512, scale=0.09), *table(make, tokens, 64))
        yield Sample(f"{tokens} tokens, V3", args)


def _one_token_a_slot(*args: Any, **options: Any) -> bool:
    slots = args[4][args[4] >= 0]
    return bool(slots.unique().numel() == slots.numel())


CARD_KV = card(
    "mla_kv_epilogue",
    kv_form,
    cost=_kv_cost,
    samples=_kv_samples,
    workloads=_kv_workloads,
    domain=_one_token_a_slot,
    entries={"mla_kv_epilogue": _kv_entry_cost},
    schemas=(
        "mla_kv_epilogue(Tensor a, Tensor gamma2, Tensor? cos, Tensor? sin, Tensor slots, int rope_size, "
        "bool interleaved, bool tiled, float eps, Tensor? ctkv_scale, *, Tensor(a!) latent, "
        "Tensor(b!)? rope=None) -> ()",
    ),
)

CARD_Q = card(
    "mla_q_epilogue",
    q_form,
    cost=_q_cost,
    samples=_q_samples,
    workloads=_q_workloads,
    entries={"mla_q_epilogue": _q_cost},
    schemas=(
        "mla_q_epilogue(Tensor q, Tensor wuk, Tensor? cos, Tensor? sin, bool interleaved, Tensor? q_nope_scale, *, "
        "Tensor(a!) q_out, Tensor(b!)? q_rope) -> ()",
    ),
)

libraries.offer("mla", "mla_q_epilogue", "mla_kv_epilogue")
