"""The memory of one layer's keys and values: blocks of a few tokens each, in one tensor for keys and one for values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opsmith.ops import reshape_and_cache

# Tokens that a first piece of memory has room for; what is not written takes none of the system's.
_AHEAD = 4096


class KeyValuePool:
    """Blocks `[blocks, block_size, heads, width]` of keys and of values, rounded to int8 where asked for.

    Args:
        key, value: of new tokens, [batch, heads, tokens, width]: what the memory is made for.
        block_size: tokens in a block.
        dtype: of the numbers as they are held; with int8, each row of a head has a float32 scale.
        ahead: how many blocks to have room for at first.
    """

    def __init__(self, key: Tensor, value: Tensor, block_size: int, dtype: torch.dtype, ahead: int = 0):
        self.block_size, self.dtype, self.given = block_size, dtype, key.dtype
        self._ahead, self._blocks = ahead or -(-_AHEAD // block_size), 0
        self.parts: dict[str, Any] = {}  # as the operators' arguments are called
        for name, x in (("k", key), ("v", value)):
            heads, width = x.shape[1], x.shape[3]
            self.parts[f"{name}_cache"] = x.new_empty((0, block_size, heads, width), dtype=dtype)
            if dtype == torch.int8:
                self.parts[f"{name}_scale"] = x.new_empty((0, block_size, heads), dtype=torch.float32)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeyValuePool:
        twin: KeyValuePool = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.parts = {name: t.new_empty(t.shape) for name, t in self.parts.items()}
        for name, t in twin.parts.items():  # what was never written stays unwritten
            t[: self._blocks] = self.parts[name][: self._blocks]
        return twin

    def fit(self, blocks: int) -> None:
        """Have so many blocks; more memory at once than that, so that what is held is seldom moved."""
        if blocks <= self._blocks:
            return
        held = len(self.parts["k_cache"])
        if blocks > held:
            size = max(blocks, 2 * held, self._ahead)
            with torch.inference_mode(False):  # what was made in it could not be written out of it
                for name, t in self.parts.items():
                    self.parts[name] = t.new_empty((size, *t.shape[1:]))
                    self.parts[name][: self._blocks] = t[: self._blocks]
        self._blocks = blocks

    def fits(self, key: Tensor, value: Tensor) -> bool:
        """Whether keys and values have the heads and widths that lie here."""
        cache = self.parts["k_cache"], self.parts["v_cache"]
        return all(
            (x.shape[1], x.shape[3]) == tuple(c.shape[2:]) and x.device == c.device
            for x, c in zip((key, value), cache, strict=True)
        )

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Put new rows [batch, heads, tokens, width] into their slots."""
        k, v = (self._rows(x) for x in (key, value))
        reshape_and_cache(k, v, slot_mapping=slots, **self.parts)

    def _rows(self, x: Tensor) -> Tensor:
        """[batch * tokens, heads, width] as they are to be held; of one token a view, for each layer asks for it."""
        rows = x.squeeze(2) if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
        if rows.requires_grad:
            rows = rows.detach()
        return rows if self.dtype in (rows.dtype, torch.int8) else rows.to(self.dtype)

    def read(self, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, columns, width] of slots [batch, columns]; zeros where the slot is -1."""
        there = (slots >= 0)[:, :, None, None]
        slots = slots.clamp(min=0)
        found = []
        for name in "kv":
            rows = self.parts[f"{name}_cache"].flatten(0, 1)[slots]  # [batch, columns, heads, width]
            if self.dtype == torch.int8:
                rows = rows.float() * self.parts[f"{name}_scale"].flatten(0, 1)[slots].unsqueeze(-1)
            found.append(rows.to(dtype).masked_fill_(~there, 0).transpose(1, 2))
        return found[0], found[1]

    def copy(self, new: list[int], old: list[int]) -> None:
        """Make blocks copies of others."""
        self.fit(1 + max(new))
        for t in self.parts.values():
            t[new] = t[old]
