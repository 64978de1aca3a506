"""What the cards of MLA's operators share: implementations, and what they are called with.

A card's function is one of tensors alone, whose results are all that a call changes, a fresh cache among them: so what
holds an operator to its card (verify, gradcheck, captured graphs, benchmarks) can hold these too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from opsmith.call.dispatch import kernels, native
from opsmith.operator import Implementation, Kind, Make, Operator, register
from opsmith.ops.mla.cache import MLACache
from opsmith.ops.rope.table import rope_table


def card(name: str, form: Callable[..., Any], **more: Any) -> Operator:
    """The card of an operator whose form is the definition, which eager PyTorch runs, where it is called `defined`."""
    definition = partial(form, defined=True)
    return register(
        Operator(
            name=name,
            kind=Kind.MLA,
            function=form,
            reference=definition,
            implementations=implementations(name, form, definition),
            source="DeepSeek-AI, 2024",
            **more,
        )
    )


def implementations(kernel: str, ours: Callable[..., Any], eager: Callable[..., Any]) -> list[Implementation]:
    """By a kernel of ours, whose first argument says whether it can, and by PyTorch's operators."""
    by_kernel = kernels(ours, lambda x, *more, **options: native(x, kernel), takes_out=False)
    return [*by_kernel, Implementation("eager", eager)]


def fresh_cache(
    op: str, mode: str, blocks: int, block_size: int, kv_lora: int, rope: int, like: Tensor
) -> MLACache:
    """A cache of zeros for a card's form, whose refusals are the operator's."""
    try:
        return MLACache.allocate(
            mode, blocks, block_size, kv_lora=kv_lora, rope=rope, dtype=like.dtype, device=like.device
        )
    except ValueError as refusal:
        raise ValueError(f"{op}: {refusal}") from None


def fresh_rows(cache: MLACache) -> tuple[Tensor, ...]:
    return (cache.latent,) if cache.rope is None else (cache.latent, cache.rope)


def table(make: Make, tokens: int, rope: int, start: int = 3) -> tuple[Tensor, Tensor]:
    """Rows of a table for tokens at positions that do not begin at 0."""
    cos, sin = rope_table(rope, start + tokens, dtype=make.dtype, device=make.device)
    return cos[start:].contiguous(), sin[start:].contiguous()
