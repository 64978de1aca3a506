"""Attention on pages in a captured graph: one opaque operator a layer, which depends on nothing that grows.

What belongs to a call of the model (slots, tables, lengths, what is held) does not pass through the graph. Whoever
calls the model lays it down before, as `Calling`, for the thread that calls; the cache that the graph sees has no
state. So a step of decoding is the same graph at every length, and run again it writes the same rows again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from opsmith import decoding
from opsmith.call.arguments import Maybe
from opsmith.call.fast import direct
from opsmith.decoding import NoState, Unserved, laying
from opsmith.decoding.attention import FEW, on_pages
from opsmith.decoding.cache import PagedLayer
from opsmith.decoding.pages import Pages, Step

NAME = "opsmith_step"  # of this attention in transformers' registry


class _Stateless(CacheLayerMixin):  # type: ignore[misc]  # transformers has no types
    """A layer that gives new keys and values back as they came; the attention knows where the others are."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise Unserved("its masks are made by the sizes of its cache")

    def get_seq_length(self) -> int:
        raise Unserved("it asks its cache for a length")

    def get_max_length(self) -> int:
        return -1


class Stateless(Cache, NoState):  # type: ignore[misc]  # transformers has no types
    """The cache that a captured graph sees."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[_Stateless() for _ in range(layers)])


@dataclass
class Calling:
    """A call of a model: its layers, and the step that the pages of each take."""

    layers: Sequence[PagedLayer]
    steps: dict[Pages, Step]

    @classmethod
    @contextmanager
    def on(cls, layers: Sequence[PagedLayer], tokens: int) -> Iterator[None]:
        """Lay down a call with so many new columns, which count as there once it is done."""
        steps = {pages: pages.begin(tokens) for pages in dict.fromkeys(layer.pages for layer in layers)}
        with laying(cls(layers, steps)):
            yield
        for pages in steps:
            pages.commit(tokens)
        for layer in layers:
            layer.columns = layer.pages.columns

    def fixed(self) -> Hashable | None:
        """Sizes, and where the blocks lie; None where attention is told of padding, or of what was before many tokens,
        by other means than tensors."""
        found: list[Hashable] = []
        for layer in self.layers:
            step = self.steps[layer.pages]
            if layer.pool is None or (step.tokens > FEW if step.past else any(layer.pages.starts)):
                return None
            layer.pool.fit(layer.pages.capacity)
            found += [(t.data_ptr(), t.shape) for t in layer.pool.parts.values()]
            found.append((step.tokens, bool(step.past), step.tables.shape))
        return tuple(found)

    def tensors(self) -> list[Tensor]:
        return [t for step in self.steps.values() for t in (step.slots, step.tables, step.lens)]

    def of(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """The same call with these."""
        given = iter(tensors)
        steps = {
            pages: replace(step, slots=next(given), tables=next(given), lens=next(given))
            for pages, step in self.steps.items()
        }
        return laying(Calling(self.layers, steps))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Maybe,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Maybe = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer whose keys and values lie in pages, as transformers calls it."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    at: int = module.layer_idx  # type: ignore[assignment]
    (batch, heads, tokens), width = query.shape[:3], value.shape[3]
    y = query.new_empty((batch, tokens, heads, width))
    torch.ops.opsmith.paged_layer.default(query, key, value, s_aux, at, scale, softcap or 0.0, y=y)
    return y, None


_LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
_LIBRARY.define(
    "paged_layer(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, float scale, float softcap, *, "
    "Tensor(y!) y) -> ()"
)


def _run(
    q: Tensor, k: Tensor, v: Tensor, sinks: Maybe, layer: int, scale: float, softcap: float, *, y: Tensor
) -> None:
    call = decoding.call.laid
    if not isinstance(call, Calling):
        raise RuntimeError("opsmith: a model was called on pages, and nothing was prepared for the call")
    held = call.layers[layer]
    if held.pool is not None and held.pool.given is not k.dtype and not held.columns:
        held.pool = None  # of a cache before this one
    pages, pool = held.pages, held.pool
    step = call.steps[pages]
    if pool is not None:
        pool.fit(pages.capacity)
        # One call: of a layer whose weights have just emptied the caches, each view that Python makes costs 20 us.
        if step.past and step.tokens <= FEW and q.is_cpu:
            at = step.slots, step.tables, step.lens, sinks, scale, pages.window or 0, softcap
            try:
                direct.paged_step(q, k, v, *at, y=y, **pool.parts)
                return
            except RuntimeError:  # there is no kernel for these: what follows computes it, or says why not
                pass
    if (q.shape[0], q.shape[2]) != (pages.batch, step.tokens):
        raise ValueError(
            f"opsmith: a call was prepared for {pages.batch} x {step.tokens} tokens, and got "
            f"{q.shape[0]} x {q.shape[2]}"
        )
    if pool is None:
        held.lazy_initialization(k, v)
        held.held.fit(pages.capacity)
    held.held.write(k, v, step.slots)
    how = {"scale": scale, "softcap": softcap or None, "sinks": sinks}
    found = on_pages(held, step, q, k, v, pages.window, how, y)
    if found is not y:
        y.copy_(found)


_LIBRARY.impl("paged_layer", _run, "CompositeExplicitAutograd")
torch.library.register_fake("opsmith::paged_layer", lambda *args, **results: None, lib=_LIBRARY)
direct.offer("paged_layer", _run)
