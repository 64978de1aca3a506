"""A graph's weights: whether they are what they were, and the forms of them that programs read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from opsmith import measure
from opsmith.compiler.steps.slots import memory
from opsmith.operator import Implementation

# Asked of every weight at every call.
_version = torch._C.TensorBase.__dict__["_version"].__get__
_address = Tensor.data_ptr
_ADD = torch.ops.aten.add.Tensor
_MAKING = (torch.ops.aten.to.dtype, _ADD)


@dataclass(frozen=True, eq=False)
class _Packed:
    """A packed weight with the one that it was made of: while that is held, no other can stand at its address."""

    weight: Tensor
    packed: Tensor


# What graphs packed of weights that they hold: those of one model, a prompt's and that of its example, pack alike. Few
# rows may want another layout than many. A program may outlive its weights, and is not asked.
_SHARED: weakref.WeakValueDictionary[tuple[Any, ...], _Packed] = weakref.WeakValueDictionary()
_FEW = 64
_NEAR = 1 << 20  # bytes: so few weights stay close to the cores
_LARGE = 7 << 26  # bytes: weights of more, than an encoder of base size has, are not held twice


class Seen:
    """Weights as they are now, with their memory: while that is held, no other weight can stand at its address.

    What PyTorch does not count, as peft's merge, changes some bytes in the middle of each matrix, as a rule.
    """

    def __init__(self, weights: Sequence[Tensor] = ()) -> None:
        self.held = [w.detach() for w in weights]
        self._state = _state(weights)
        plain = [w for w in self.held if type(w) is Tensor and w.device.type == "cpu"]
        flat = [w.flatten() for w in plain if w.dim() == 2 and w.is_contiguous()]
        self._parts = [w[len(w) // 2 :][:16].view(torch.uint8) for w in flat]
        self.bytes = torch.cat([torch.empty(0, dtype=torch.uint8), *self._parts])

    def changed(self, weights: Sequence[Tensor], copied: bool = True) -> bool:
        """Whether these are others, or hold other numbers; bytes are asked where there are copies of these."""
        if _state(weights) != self._state:
            return True
        return copied and bool(self._parts) and not torch.equal(torch.cat(self._parts), self.bytes)


def _state(weights: Sequence[Tensor]) -> tuple[list[int], list[int]] | None:
    """Versions and addresses; of tensors of inference mode, which count nothing, None."""
    try:
        return list(map(_version, weights)), list(map(_address, weights))
    except RuntimeError:
        return None


class Weights:
    """The weights among a graph's inputs, and what was packed or made of them, once for each use.

    Copies are right for as long as no weight changes; with `take` all of it begins anew. They hold the memory of the
    weights and not the parameters: once one of these is gone, so is the model, and `gone` is called.
    """

    def __init__(self, examples: Sequence[Any] = (), gone: Callable[[], None] = lambda: None) -> None:
        self._gone = gone
        self.at = [i for i, e in enumerate(examples) if isinstance(e, nn.Parameter) and not e.is_inference()]
        self.clear()

    def others(self, examples: Sequence[Any]) -> list[int]:
        """Where inputs are tensors and no weights."""
        return [i for i, e in enumerate(examples) if isinstance(e, Tensor) and i not in self.at]

    def clear(self) -> None:
        """Let go of all weights."""
        self._parameters: list[weakref.ref[Any]] = []
        self._seen = Seen()
        self._known: dict[int, Tensor] = {}  # by address: the weights, and what is made of them
        self._packed: dict[tuple[Any, ...], _Packed] = {}
        self._made: dict[tuple[int, Any], Tensor] = {}
        self._bytes = 0

    def changed(self, args: Sequence[Any]) -> bool:
        """True when a weight is not the one that was taken: loaded anew, trained, replaced or moved."""
        return self._seen.changed([args[i] for i in self.at], bool(self._packed or self._made))

    def take(self, args: Sequence[Any]) -> None:
        """The weights as they are in this call."""
        self.clear()
        weights = [args[i] for i in self.at]
        self._parameters = [weakref.ref(w, lambda _: self._gone()) for w in weights]
        self._seen = Seen(weights)
        self._known = {w.data_ptr(): w for w in self._seen.held}
        self._bytes = sum(w.nbytes for w in self._known.values())

    @property
    def ids(self) -> set[int]:
        """What tells these weights from others while they live."""
        return {id(w) for ref in self._parameters if (w := ref()) is not None}

    @property
    def gone(self) -> bool:
        """Whether there were any, which nobody holds now."""
        return bool(self.at) and not self._parameters

    @property
    def places(self) -> set[int]:
        """The memory of all of them."""
        return {memory(w) for w in self._known.values()}

    def _own(self, call: Mapping[str, Any]) -> Tensor | None:
        """The weight of a call, where it is one of these."""
        weight = call.get("weight")
        return weight if isinstance(weight, Tensor) and weight.data_ptr() in self._known else None

    def refused(self, implementation: Implementation, call: Mapping[str, Any]) -> bool:
        """Whether an implementation would hold a copy of a weight where these are too large for that."""
        return implementation.prepack is not None and self._bytes > _LARGE and self._own(call) is not None

    def swapped(self, implementation: Implementation, call: dict[str, Any]) -> dict[str, Any]:
        """The call as this implementation wants it: with a weight of ours in its packed form."""
        if implementation.prepack is None or (weight := self._own(call)) is None:
            return call
        key = (weight.data_ptr(), weight.shape, weight.stride(), implementation.name)
        if key not in self._packed:
            rows = rows_of(call)
            version = None if weight.is_inference() else _version(weight)
            many = rows > _FEW and not implementation.packs_alike
            shared = (*key, weight.dtype, version, many, bytes(Seen([weight]).bytes.tolist()))
            packed = _SHARED.get(shared) if version is not None else None
            if packed is None:
                own = weight.detach()
                packed = _SHARED[shared] = _Packed(own, implementation.prepack(own, rows))
            self._packed[key] = packed
        return {**call, "weight": self._packed[key].packed}

    def among(self, call: Mapping[str, Any]) -> int:
        """Bytes of the weights that this call's is one of, at most what caches hold; 0 where it or none fills them."""
        weight, most = self._own(call), measure.describe().last_level_cache
        if weight is None or weight.is_cuda:
            return 0
        return 0 if weight.nbytes > most // 2 or self._bytes < _NEAR else min(self._bytes, most)

    def between(self, call: Mapping[str, Any]) -> list[Tensor]:
        """What a model reads before it comes back to this weight: the others, as many as caches hold."""
        most = self.among(call)
        others = [w for at, w in self._known.items() if at != call["weight"].data_ptr()]
        before = accumulate((w.nbytes for w in others), initial=0)
        return [w for w, read in zip(others, before, strict=False) if read < most]

    def drop(self, call: Mapping[str, Any], chosen: str) -> None:
        """Let go of the weight as other implementations than the chosen one pack it: they have lost."""
        weight = self._own(call)
        if weight is not None:
            at = weight.data_ptr()
            self._packed = {k: v for k, v in self._packed.items() if k[0] != at or k[-1] == chosen}

    def made(self, node: Node, args: Sequence[Any]) -> Tensor | None:
        """What this call of a graph makes of a weight, itself a weight then; None for other calls.

        A weight in another dtype, and a vector with a number added, as norms have that keep theirs less one.
        """
        if node.target not in _MAKING or node.kwargs or len(args) != 2:
            return None
        value, other = args
        if not isinstance(value, Tensor) or not isinstance(other, torch.dtype | int | float):
            return None
        weight = self._known.get(value.data_ptr())
        # At one address may stand another view of it.
        if weight is None or (weight.dtype, weight.shape) != (value.dtype, value.shape):
            return None
        if weight.stride() != value.stride() or (node.target is _ADD and weight.dim() != 1):
            return None
        key = (weight.data_ptr(), other)
        if key not in self._made:
            self._made[key] = node.target(weight, other)
            self._known[self._made[key].data_ptr()] = self._made[key]
        return self._made[key]


def rows_of(call: Mapping[str, Any]) -> int:
    x: Tensor = call["x"]
    return x.numel() // max(x.shape[-1], 1)
