"""What follows each projection of MLA pre-processing: keys go into the cache, queries into the latent space."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample, register
from opsmith.ops.common import check_float, check_like, native, nbytes, needs_grad, short
from opsmith.ops.mla_cache import MLACache, check_slots
from opsmith.ops.mla_reference import keys, queries
from opsmith.ops.rope_table import rope_table

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
    scale = _head_scales(op, q_nope_scale, q.shape[1], q.device)
    if scale is not None:
        if joint:
            raise ValueError(
                f"{op}: int8 queries and their rope part have two dtypes; leave joint or the scale out"
            )
        check_inference(op, q, wuk, cos, sin)
    return join(*queries(q, wuk, cos, sin, interleaved=interleaved, q_nope_scale=scale), joint)


# --- what mla_preprocess checks too ----------------------------------------------------------------------------


def rows_of(t: Any) -> Any:
    """With a contiguous last dimension; itself, where it has one."""
    return t if t is None or t.shape[-1] < 2 or t.stride(-1) == 1 else t.contiguous()


def join(q_out: torch.Tensor, q_rope: torch.Tensor, joint: bool) -> Pair:
    """One tensor for a joint cache, two for the others."""
    return (torch.cat((q_out, q_rope), -1), None) if joint else (q_out, q_rope)


def check_cache_type(op: str, cache: Any) -> None:
    if not isinstance(cache, MLACache):
        raise TypeError(
            f"{op}: cache must be an MLACache, got {type(cache).__name__}; wrap memory with MLACache(mode, ...)"
        )


def rope_width(op: str, cache: MLACache, kv_lora: int) -> int:
    """How many elements of a row of this cache are the rotated ones."""
    if cache.rope is not None:
        return cache.rope.shape[3] * (cache.rope.shape[1] if "tiled" in cache.mode else 1)
    width = cache.latent.shape[3] - kv_lora
    if width < 0:
        raise ValueError(
            f"{op}: cache.latent must have shape [B, bs, 1, kv_lora + rope] with kv_lora {kv_lora}, got "
            f"{tuple(cache.latent.shape)}"
        )
    return width


def check_dtype(op: str, name: str, t: torch.Tensor, dtype: torch.dtype) -> None:
    if t.dtype not in (dtype, torch.float32):
        either = " or ".join(dict.fromkeys((short(dtype), "float32")))
        raise TypeError(f"{op}: {name} must be {either}, got {short(t.dtype)}; cast it")


def check_table(op: str, cos: Any, sin: Any, x: torch.Tensor, rope: int) -> None:
    """Refuse cosines and sines that are not one row of `rope` (or half of it) for each token of x."""
    if cos is None and sin is None:
        return
    tokens = x.shape[0]
    for name, t in (("cos", cos), ("sin", sin)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(
                f"{op}: {name} must be a tensor [T, rope], got {type(t).__name__}; both may be None"
            )
        if rope % 2 or tuple(t.shape) not in ((tokens, rope), (tokens, rope // 2)):
            raise ValueError(
                f"{op}: {name} must have shape ({tokens}, {rope}), a row for each token (rope must be even), got "
                f"{tuple(t.shape)}"
            )
        check_float(op, t, name)
        check_dtype(op, name, t, x.dtype)
        if t.device != x.device:
            raise ValueError(f"{op}: {name} is on {t.device}, the input on {x.device}; move one of them")
    if cos.shape != sin.shape:
        raise ValueError(f"{op}: cos and sin must be alike, got {tuple(cos.shape)} and {tuple(sin.shape)}")


def check_scales(
    op: str, cache: MLACache, ctkv_scale: Any, heads: tuple[Any, int] | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The scales of an int8 cache as tensors; refused where they are missing, or where the cache is not int8."""
    given = {"ctkv_scale": ctkv_scale} | ({} if heads is None else {"q_nope_scale": heads[0]})
    if cache.mode != "int8_tiled":
        for name, value in given.items():
            if value is not None:
                raise ValueError(f'{op}: {name} is for cache mode "int8_tiled", this one is "{cache.mode}"')
        return None, None
    for name, value in given.items():
        if value is None:
            raise ValueError(f'{op}: cache mode "int8_tiled" needs {name}')
    ctkv = _scale(ctkv_scale, cache.device)
    if ctkv.numel() != 1:
        raise ValueError(f"{op}: ctkv_scale must be one number, got shape {tuple(ctkv.shape)}")
    return ctkv.reshape(()), None if heads is None else _head_scales(op, *heads, cache.device)


def _head_scales(op: str, value: Any, heads: int, device: torch.device) -> torch.Tensor | None:
    if value is None:
        return None
    scale = _scale(value, device)
    if scale.numel() != heads:
        raise ValueError(
            f"{op}: q_nope_scale must have shape ({heads},), one for each head, got {tuple(scale.shape)}"
        )
    return scale.reshape(heads)


def _scale(value: Any, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        t = value if value.dtype in (torch.float32, torch.float64) else value.float()
        return t.detach().to(device)
    return torch.tensor(value, dtype=torch.float32, device=device)


def check_inference(op: str, *tensors: torch.Tensor | None) -> None:
    """Quantized forms have no gradient, and say so."""
    if needs_grad(*tensors):
        raise ValueError(
            f"{op}: the quantized form is inference only, and an argument requires gradients; call it under "
            "torch.no_grad(), or train the unquantized form"
        )


# --- the cards: with a fresh cache as a result -------------------------------------------------------------------


def fresh_cache(
    op: str, mode: str, blocks: int, block_size: int, kv_lora: int, rope: int, like: torch.Tensor
) -> MLACache:
    """A cache of zeros for a card's form, whose refusals are the operator's."""
    try:
        return MLACache.allocate(
            mode, blocks, block_size, kv_lora=kv_lora, rope=rope, dtype=like.dtype, device=like.device
        )
    except ValueError as refusal:
        raise ValueError(f"{op}: {refusal}") from None


def fresh_rows(cache: MLACache) -> tuple[torch.Tensor, ...]:
    return (cache.latent,) if cache.rope is None else (cache.latent, cache.rope)


def kv_form(
    a: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    mode: str,
    blocks: int,
    block_size: int,
    rope: int,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`mla_kv_epilogue` into a fresh cache of this mode, whose tensors are the result."""
    kv_lora = gamma2.shape[0]
    cache = fresh_cache("mla_kv_epilogue", mode, blocks, block_size, kv_lora, rope, a)
    mla_kv_epilogue(a, gamma2, cos, sin, slot_mapping, cache, eps=eps, interleaved=interleaved)
    return fresh_rows(cache)


def kv_reference(
    a: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    mode: str,
    blocks: int,
    block_size: int,
    rope: int,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The definition, in plain PyTorch."""
    kv_lora = gamma2.shape[0]
    cache = fresh_cache("mla_kv_epilogue", mode, blocks, block_size, kv_lora, rope, a)
    k = keys(a, gamma2, cos, sin, kv_lora=kv_lora, rope=rope, interleaved=interleaved, eps=eps)
    cache.write(slot_mapping, *k)
    return fresh_rows(cache)


def q_form(
    q: torch.Tensor,
    wuk: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool = False,
    joint: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`mla_q_epilogue`, whose result is one tensor where `joint`, else two."""
    pair = mla_q_epilogue(q, wuk, cos, sin, interleaved=interleaved, joint=joint)
    return tuple(t for t in pair if t is not None)


def q_reference(
    q: torch.Tensor,
    wuk: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    interleaved: bool = False,
    joint: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The definition, in plain PyTorch."""
    pair = join(*queries(q, wuk, cos, sin, interleaved=interleaved), joint)
    return tuple(t for t in pair if t is not None)


def _kv_cost(
    a: torch.Tensor,
    gamma2: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    blocks: int,
    block_size: int,
    rope: int,
    **options: Any,
) -> Cost:
    rows, width = a.shape[0], gamma2.shape[0] + rope
    held = blocks * block_size * width * a.element_size()  # this form makes its cache
    read = rows * width * a.element_size() + nbytes(gamma2, cos, sin, slot_mapping)
    return Cost(rows * (4.0 * gamma2.shape[0] + 3.0 * rope), read + held)


def _q_cost(
    q: torch.Tensor, wuk: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, **options: Any
) -> Cost:
    tokens, (heads, nope, kv_lora) = q.shape[0], wuk.shape
    rope = q.shape[2] - nope
    written = tokens * heads * (kv_lora + rope) * q.element_size()
    flops = tokens * heads * (2.0 * nope * kv_lora + 3.0 * rope)
    return Cost(flops, nbytes(q, wuk, cos, sin) + written)


def table(make: Make, tokens: int, rope: int, start: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a table for tokens at positions that do not begin at 0."""
    cos, sin = rope_table(rope, start + tokens, dtype=make.dtype, device=make.device)
    return cos[start:].contiguous(), sin[start:].contiguous()


def some_slots(make: Make, tokens: int, blocks: int, block_size: int, skip: bool = True) -> torch.Tensor:
    """Slots in no order, none twice, every fifth token without one."""
    order = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(7))[:tokens].clone()
    if skip:
        order[1::5] = -1
    return order.to(make.device)


def _kv_samples(make: Make) -> Iterator[Sample]:
    def sample(
        name: str, tokens: int, kv_lora: int, rope: int, *, a: Any = None, turn: bool = True, **options: Any
    ) -> Sample:
        sizes: dict[str, Any] = {"mode": "split", "blocks": 3, "block_size": 16, "rope": rope, **options}
        slots = some_slots(make, tokens, sizes["blocks"], sizes["block_size"])
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
        sizes: dict[str, Any] = {
            "mode": "split",
            "blocks": max(1, tokens // 128),
            "block_size": 128,
            "rope": 64,
        }
        slots = some_slots(make, tokens, sizes["blocks"], 128, skip=False)
        yield Sample(
            f"{tokens} tokens, V3", (make(tokens, 2112), make(512), *table(make, tokens, 64), slots), sizes
        )


def _q_samples(make: Make) -> Iterator[Sample]:
    def sample(
        name: str,
        tokens: int,
        heads: int,
        nope: int,
        rope: int,
        kv_lora: int,
        *,
        q: Any = None,
        **options: Any,
    ) -> Sample:
        x = make(tokens, heads, nope + rope) if q is None else q
        weight = make(heads, nope, kv_lora, scale=nope**-0.5)
        return Sample(name, (x, weight, *table(make, tokens, rope)), options)

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


CARD_KV = register(
    Operator(
        name="mla_kv_epilogue",
        kind=Kind.MLA,
        function=kv_form,
        reference=kv_reference,
        cost=_kv_cost,
        samples=_kv_samples,
        workloads=_kv_workloads,
        domain=_one_token_a_slot,
        implementations=[
            Implementation(
                "native", kv_form, "cpu", lambda a, *more, **options: native(a, "mla_kv_epilogue")
            ),
            Implementation("eager", kv_reference),
        ],
        schemas=(
            "mla_kv_epilogue(Tensor a, Tensor gamma2, Tensor? cos, Tensor? sin, Tensor slots, int rope_size, "
            "bool interleaved, bool tiled, float eps, Tensor? ctkv_scale, *, Tensor(a!) latent, "
            "Tensor(b!)? rope=None) -> ()",
        ),
        outputs=2,
        source="DeepSeek-AI, 2024",
    )
)

CARD_Q = register(
    Operator(
        name="mla_q_epilogue",
        kind=Kind.MLA,
        function=q_form,
        reference=q_reference,
        cost=_q_cost,
        samples=_q_samples,
        workloads=_q_workloads,
        implementations=[Implementation("eager", q_reference)],
        outputs=2,
        source="DeepSeek-AI, 2024",
    )
)
