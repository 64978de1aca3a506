"""What stands in for a module of a model, its weights packed, and what is said of it."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from opsmith.compiler.choose.weights import Seen
from opsmith.compiler.modules.linear_layers import own
from opsmith.ops.rounding import RoundingError


@dataclass
class QuantizedLayer:
    """One layer: its format, or why it stays as it is, and what rounding its weight took."""

    name: str
    format: str
    status: str  # "packed", "left", "rolled back", or "kept" as the model has it
    relative_error: float = 0.0
    result_error: float | None = None  # relative, of its results on the calibration text
    nbytes: int = 0
    why: str = ""
    released: int = 0  # bytes of its own weight that went back to the system
    rows_of: str = ""  # of an embedding: the layer whose packed weight it reads, or itself
    what: str = "linear layer"  # or "mixture", or, of a model that has packed its own, "expert weight"
    joined: tuple[str, ...] = ()  # the layers, this one among them, whose packed weights lie side by side

    def __str__(self) -> str:
        if self.status == "kept":
            return f"{self.name}: {self.format}, as the model has it"
        if self.status != "packed":
            return f"{self.name} {self.status}: {self.why}"
        return f"{self.name}: {self.format}, relative error {self.relative_error:.2g}"

    @property
    def of_few_bits(self) -> bool:
        """Whether its weight is packed, by us or by whoever made the model."""
        return self.status in ("packed", "kept")

    def take(self, error: RoundingError) -> None:
        """What rounding the weight took."""
        self.relative_error, self.result_error = error.relative, error.result

    @property
    def lost(self) -> float:
        """What rounding took: of its results, where these were looked at, or of the weight."""
        return self.relative_error if self.result_error is None else self.result_error


def formats(layers: list[QuantizedLayer], to: str) -> str:
    """How many of each format."""
    counts = Counter((layer.format, layer.what) for layer in layers).most_common()
    return " and ".join(f"{n} {what}{'s' * (n > 1)} {to} {name}" for (name, what), n in counts)


class StandIn:
    """A module that another one's calls go to. A pickled one is the module that was never packed."""

    weights: tuple[str, ...] = ("weight",)  # what is packed of the owner
    compute: Any  # what the packed weights make of a call
    unpacked: Any  # in a dtype, what they stand for, as the owner holds it
    again: Any  # packs the owner's weights once more, in their place; what that took
    error: RoundingError | None
    record: QuantizedLayer
    _owner: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
    _seen: tuple[type, Seen]  # what of the owner is packed

    @property
    def owner(self) -> Any:
        """The module whose calls it takes over."""
        return self._owner[0]

    @property
    def held(self) -> list[Any]:
        """The owner's weights that are packed."""
        return [self.owner._parameters.get(name) for name in self.weights]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call. Who calls the optimized model has looked already; a part of it may be called alone."""
        if not torch.compiler.is_compiling() and not self.follow():
            return self.owner.forward(*args, **kwargs)
        return self.compute(*args, **kwargs)

    def stand_in(self, owner: nn.Module, record: QuantizedLayer) -> None:
        """Take over the calls of a module."""
        self._owner, self.record = (owner,), record
        owner.forward = self.forward
        self.look()

    def look(self) -> None:
        """Remember what is packed."""
        self._seen = type(self.owner), Seen(own(self.owner))

    def follow(self) -> bool:
        """Pack the weights again where they changed; False where the module has its own call back instead."""
        module: nn.Module = self.owner
        kind, seen = self._seen
        if type(module) is kind and not seen.changed(own(module)):
            return True
        self.look()
        try:
            if type(module) is not kind or any(type(held) is not nn.Parameter for held in self.held):
                raise TypeError("it is another layer now, or its weight another at each call or in parts")
            if self.held[0].is_meta:  # released
                return True
            with torch.inference_mode(next(self.buffers()).is_inference()), torch.no_grad():  # type: ignore[attr-defined]
                self.error = self.again()
            if self.error is not None:
                self.record.take(self.error)
        except (TypeError, ValueError) as error:
            self.record.status, self.record.why = "left", f"after a change: {error}"
            vars(module).pop("forward", None)
            return False
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        if any(held.is_meta for held in self.held):
            raise ValueError(
                "optimize: a layer whose weight was given back (quantize_release) has nothing left to be pickled; "
                "optimize without quantize_release, or keep PackedLinear modules' state_dict"
            )
        # Unpickled, the module's `forward` is what this gives as an attribute of it: its class's own.
        return (_itself, (self.owner,))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin: Any = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def _itself(module: nn.Module) -> nn.Module:
    return module
