"""The weights of a graph that packed copies and programs were made of, and whether they are what they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Weights:
    """Some arguments of a graph that stay from call to call."""

    def __init__(self, examples: Sequence[Any]):
        self._places = [
            i for i, e in enumerate(examples) if isinstance(e, torch.nn.Parameter) and not e.is_inference()
        ]
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._held: list[torch.Tensor] = []

    def unknown(self) -> bool:
        """True where there are weights that were not looked at yet."""
        return bool(self._places) and not self._versions

    def changed(self, args: Sequence[Any]) -> bool:
        """True when one is no longer what it was: loaded anew, trained, replaced or moved."""
        weights = [args[i] for i in self._places]
        return [w._version for w in weights] != self._versions or [
            w.data_ptr() for w in weights
        ] != self._addresses

    def hold(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Take those of this call for what they are; returns them by address."""
        weights = [args[i] for i in self._places]
        self._versions, self._addresses = [w._version for w in weights], [w.data_ptr() for w in weights]
        # While these are held, no other weight can come to stand at the same address.
        self._held = [w.detach() for w in weights]
        return {w.data_ptr(): w for w in weights}

    def release(self) -> None:
        """Let go of them."""
        self._versions, self._addresses, self._held = [], [], []
