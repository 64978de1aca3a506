"""Pages of a latent cache: the rows of all layers in blocks, by one table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opsmith.decoding.pages import Pages, Step
from opsmith.ops import MLACache


class LatentPages(Pages):
    """The block tables of one batch of sequences, and the caches of all layers that they are for."""

    def __init__(
        self,
        caches: list[MLACache],
        block_size: int,
        batch: int,
        device: torch.device,
        starts: Sequence[int] | None = None,
    ) -> None:
        self.caches = caches
        super().__init__(block_size)
        self.pools.append(self)
        self.reset(batch, device, starts)

    def begin(self, tokens: int) -> Step:
        step = super().begin(tokens)
        self._fit()
        return step

    def read(self, layer: int, columns: int) -> tuple[Tensor, Tensor]:
        """Rows [batch, columns, kv_lora] and [..., rope] as they were cached, zeros where there is padding."""
        cache, slots = self.caches[layer], self.slots(0, columns)
        assert cache.kv_lora is not None
        at = slots.clamp(min=0)
        block, offset = at // self.block_size, at % self.block_size
        nope, rope = (view[block, offset].flatten(2) for view in cache.rows(cache.kv_lora))
        if cache.ctkv_scale is not None:
            nope = nope.float().mul_(cache.ctkv_scale).to(rope.dtype)
        if not any(self.starts):
            return nope, rope
        keep = (slots >= 0).unsqueeze(-1)
        return torch.where(keep, nope, 0), torch.where(keep, rope, 0)

    def copy(self, new: list[int], old: list[int]) -> None:
        """Make these blocks copies of those, in every layer."""
        self._fit()
        for cache in self.caches:
            for held in (cache.latent, cache.rope):
                if held is not None:
                    held[new] = held[old]

    def _fit(self) -> None:
        """Memory for all blocks: new, half as large again, where it must be."""
        for cache in self.caches:
            cache.latent = self._grown(cache.latent)
            cache.rope = None if cache.rope is None else self._grown(cache.rope)

    def _grown(self, held: Tensor) -> Tensor:
        before = len(held)
        if self.capacity <= before:
            return held
        with torch.inference_mode(False):  # what was made in it could not be written out of it
            new = held.new_zeros((max(self.capacity, before + before // 2), *held.shape[1:]))
        new[:before] = held
        return new
