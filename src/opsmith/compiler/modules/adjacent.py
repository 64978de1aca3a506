"""Weights of a model laid side by side, so that one product reads those of all layers of one input as they are.

Large ones, those of a layer by itself too, lie in pages of 2 MB then: a decoder's token spends up to a quarter of its
time on looking up where smaller pages are.

The parameters stay the objects that they were and become views of the shared memory: nothing is held twice, and an
optimizer's steps, `load_state_dict` and `state_dict` find in each what they always did. One that gets other memory
(`to`, `load_state_dict(assign=True)`) is laid beside its neighbors again when its graph is next called.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from opsmith.compiler.find.joined import adjacent, lay
from opsmith.compiler.modules.linear_layers import tensors
from opsmith.compiler.steps.slots import memory
from opsmith.measure.pages import Read


class Adjacent:
    """The weights of one model that lie side by side."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self.read = Read()  # where they lay before
        self._laid: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}  # by id, with the memory of each

    def of(self, model: nn.Module) -> None:
        """From now on the weights of this model may be laid side by side; before that, nobody's are."""
        self._model = weakref.ref(model)

    def lay(self, weights: Sequence[nn.Parameter]) -> bool:
        """Whether weights lie side by side now, in large pages: not where one's memory is somebody else's too."""
        if adjacent(0, weights) is not None and (len(weights) > 1 or self._is_laid(weights[0])):
            return True
        model = None if self._model is None else self._model()
        if model is None or not all(self._is_laid(w) or _alone_in_memory(w) for w in weights):
            return False
        own, places = {id(w) for w in weights}, set(map(memory, weights))
        if any(id(t) not in own and memory(t) in places for t in tensors(model).values()):
            return False
        lay(0, weights, self.read.add)
        self._laid |= {id(w): (weakref.ref(w), memory(w)) for w in weights}
        return True

    def take_out(self) -> None:
        """Give each weight memory of its own again."""
        for weight in [ref() for ref, _ in self._laid.values()]:
            if weight is not None and self._is_laid(weight):
                weight.data = weight.data.clone()
        self._laid.clear()

    def _is_laid(self, weight: nn.Parameter) -> bool:
        """Whether a weight is where it was laid."""
        ref, place = self._laid.get(id(weight), (None, None))
        return ref is not None and ref() is weight and memory(weight) == place


def _alone_in_memory(weight: Tensor) -> bool:
    """Whether a weight is all of its memory, and that no other process's: a part of a larger one is its owner's."""
    whole = weight.is_contiguous() and weight.untyped_storage().nbytes() == weight.nbytes
    return whole and not weight.is_shared()
