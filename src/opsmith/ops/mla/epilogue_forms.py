"""The cards of the epilogues: functions of tensors alone, with a fresh cache as a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from opsmith.call.common import kernels, native, nbytes
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample, register
from opsmith.ops import entry_costs
from opsmith.ops.ascend import on_npu
from opsmith.ops.mla.cache import MLACache
from opsmith.ops.mla.epilogues import join, mla_kv_epilogue, mla_q_epilogue
from opsmith.ops.mla.reference import keys, queries
from opsmith.ops.rope.table import rope_table


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


def kv_launch(
    launch: Callable[..., Any],
    a: torch.Tensor,
    gamma2: torch.Tensor,
    *more: torch.Tensor | None,
    mode: str,
    blocks: int,
    block_size: int,
    rope: int,
    **options: Any,
) -> Any:
    """This form of the call, for a kernel that is launched by itself."""
    cache = fresh_cache("mla_kv_epilogue", mode, blocks, block_size, gamma2.shape[0], rope, a)
    return launch(a, gamma2, *more, cache, **options)


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
            *kernels(kv_form, lambda a, *more, **options: native(a, "mla_kv_epilogue"), takes_out=False),
            on_npu("mla_kv_epilogue", kv_launch),
            Implementation("eager", kv_reference),
        ],
        entries={"mla_kv_epilogue": entry_costs.mla_kv_epilogue},
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
        implementations=[
            *kernels(q_form, lambda q, *more, **options: native(q, "mla_q_epilogue"), takes_out=False),
            on_npu("mla_q_epilogue"),
            Implementation("eager", q_reference),
        ],
        entries={"mla_q_epilogue": entry_costs.mla_q_epilogue},
        schemas=(
            "mla_q_epilogue(Tensor q, Tensor wuk, Tensor? cos, Tensor? sin, bool interleaved, Tensor? q_nope_scale, *, "
            "Tensor(a!) q_out, Tensor(b!)? q_rope) -> ()",
        ),
        outputs=2,
        source="DeepSeek-AI, 2024",
    )
)
