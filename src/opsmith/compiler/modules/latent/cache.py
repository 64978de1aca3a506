"""A layer of a Hugging Face cache that keeps latent rows in pages. Imported where there is such a cache to adopt.

To the library it is one more `DynamicLayer`: what it is asked for (lengths, keys and values, reordered beams, a crop
for rejected drafts) it answers in the library's own layout, `[batch, 1, columns, width]`, so that the model as it was
goes on with the same cache. All layers of one cache share their pages; the first of them speaks for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from opsmith.compiler.modules.latent.pages import LatentPages
from opsmith.decoding.cache import OnPages


class LatentLayer(OnPages):
    """One layer's share of the pages; `order` takes the library's order of rope dimensions to ours."""

    pages: LatentPages

    def __init__(self, pages: LatentPages, index: int, order: Tensor | None) -> None:
        self.pages, self.index, self.order = pages, index, order
        self.lead, self.is_initialized = index == 0, True

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.caches[self.index].dtype

    @property
    def device(self) -> torch.device:
        return self.pages.device

    @property
    def columns(self) -> int:  # type: ignore[override]
        """All layers have as many, once the last of them was given its rows."""
        return self.pages.columns

    def _rows(self, columns: int) -> tuple[Tensor, Tensor]:
        """Latent and rotated rows as the library would have them."""
        nope, rope = self.pages.read(self.index, columns)
        if self.order is not None:
            rope = rope[..., self.order.argsort()]
        return nope.unsqueeze(1), rope.unsqueeze(1)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to prepare."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The original attention goes on with this cache: its rows are written, and all rows are given back."""
        cache = self.pages.caches[self.index]
        if (key_states.shape[1], key_states.shape[3]) != (1, cache.kv_lora):
            raise ValueError(
                f"latent cache: expected latent rows [batch, 1, columns, {cache.kv_lora}], got "
                f"{tuple(key_states.shape)}: this version of transformers caches keys of heads; call the model with "
                "a cache of its own"
            )
        tokens = key_states.shape[2]
        step = self.pages.begin(tokens)
        nope, rope = key_states.flatten(0, 2), value_states.flatten(0, 2)
        if self.order is not None:
            rope = rope[:, self.order]
        if cache.ctkv_scale is not None:
            nope = (nope.float() / cache.ctkv_scale).round().clamp(-128, 127).to(torch.int8)
        cache.write(step.slots, nope, rope)
        if self.index == len(self.pages.caches) - 1:
            self.pages.commit(tokens)
        return self._rows(step.columns)


def unfit(cache: Any) -> str | None:
    """Why a cache cannot keep latent rows in pages; None where it can."""
    if not isinstance(cache, DynamicCache):
        return f"a {type(cache).__name__} is not a DynamicCache"
    if cache.offloading:
        return "the cache is offloaded"
    odd = next((x for x in cache.layers if type(x) not in (DynamicLayer, LatentLayer)), None)
    return None if odd is None else f"the cache has a {type(odd).__name__}"


def adopt(cache: Cache, pages: LatentPages, layers: Sequence[tuple[int, Tensor | None]]) -> None:
    """Put latent layers in the place of the library's; rows that these have move into the pages.

    Args:
        layers: of each that the pages are for its place in the cache, and the order in a row.
    """
    before = list(cache.layers)
    while len(cache.layers) <= max(at for at, _ in layers):
        cache.layers.append(DynamicLayer())
    for index, (at, order) in enumerate(layers):
        cache.layers[at] = LatentLayer(pages, index, order)
        if at < len(before) and before[at].get_seq_length():
            cache.layers[at].update(before[at].keys, before[at].values)
