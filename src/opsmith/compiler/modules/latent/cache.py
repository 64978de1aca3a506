"""A layer of a Hugging Face cache that keeps latent rows in pages. Imported where there is such a cache to adopt.

To the library it is one more `DynamicLayer`: what it is asked for (lengths, keys and values, reordered beams, a crop
for rejected drafts) it answers in the library's own layout, `[batch, 1, columns, width]`, so that the model as it was
goes on with the same cache. All layers of one cache share their pages; the first of them speaks for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from opsmith.compiler.modules.latent.pages import LatentPages


class LatentLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer's share of the pages; `order` takes the library's order of rope dimensions to ours."""

    def __init__(self, pages: LatentPages, index: int, order: torch.Tensor | None) -> None:
        self.pages, self.index, self.order = pages, index, order
        self.is_initialized = True

    @property
    def dtype(self) -> torch.dtype:
        return self.pages.caches[self.index].dtype

    @property
    def device(self) -> torch.device:
        return self.pages.device

    def _rows(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        nope, rope = self.pages.read(self.index, columns)
        if self.order is not None:
            rope = rope[..., self.order.argsort()]
        return nope.unsqueeze(1), rope.unsqueeze(1)

    @property
    def keys(self) -> torch.Tensor | None:
        """The latent rows as the library would have them."""
        return self._rows(self.pages.columns)[0] if self.pages.columns else None

    @property
    def values(self) -> torch.Tensor | None:
        """The rotated rows as the library would have them."""
        return self._rows(self.pages.columns)[1] if self.pages.columns else None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """There is nothing to prepare."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
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

    def get_seq_length(self) -> int:
        return self.pages.columns

    def reset(self) -> None:
        if self.index == 0:
            self.pages.reset(0, self.pages.device)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop: expected a negative number of columns to remove, got {tokens_to_remove}")
        if self.index == 0 and tokens_to_remove:
            self.pages.crop(max(0, self.pages.columns + tokens_to_remove))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self.index == 0 and self.pages.columns:
            self.pages.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index == 0 and self.pages.columns:
            self.pages.select([i for i in range(self.pages.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if self.index == 0 and self.pages.columns:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self.pages.select([int(i) % self.pages.batch for i in rows.tolist()])

    def offload(self) -> None:
        """Pages stay where they are."""

    def prefetch(self) -> None:
        """Pages stay where they are."""


def unfit(cache: Any) -> str | None:
    """Why a cache cannot keep latent rows in pages; None where it can."""
    if not isinstance(cache, Cache) or not isinstance(cache, DynamicCache):
        return f"a {type(cache).__name__} is not a DynamicCache"
    if cache.offloading:
        return "the cache is offloaded"
    odd = next((x for x in cache.layers if type(x) not in (DynamicLayer, LatentLayer)), None)
    return None if odd is None else f"the cache has a {type(odd).__name__}"


def adopt(cache: Cache, pages: LatentPages, layers: Sequence[tuple[int, torch.Tensor | None]]) -> None:
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
