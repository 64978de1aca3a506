"""Packed weights in a model's linear layers: put in before the model is captured, proved layer by layer, taken out."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.types import GuardFilterEntry

from opsmith.call.dispatch import always_native
from opsmith.compiler.capture.mutation import Effects
from opsmith.compiler.find.joined import join, side_by_side
from opsmith.compiler.find.site import Site
from opsmith.compiler.modules.linear_layers import as_linear, linear_layers, tensors
from opsmith.ops.packed_linear import CARD as PACKED_LINEAR
from opsmith.ops.packed_linear.module import PackedLinear

_ROWS = 8  # of a layer's input that prove it


@dataclass
class QuantizedLayer:
    """One linear layer: its format, or why it stays as it is, and what rounding its weight took."""

    name: str
    format: str
    status: str  # "packed", "left" or "rolled back"
    relative_error: float = 0.0
    largest_error: float = 0.0
    nbytes: int = 0
    why: str = ""
    released: int = 0  # bytes of its own weight that went back to the system
    joined: tuple[str, ...] = ()  # the layers, this one among them, whose packed weights lie side by side

    def __str__(self) -> str:
        if self.status != "packed":
            return f"{self.name} {self.status}: {self.why}"
        return f"{self.name}: {self.format}, relative error {self.relative_error:.2g}"


class Standing(PackedLinear):
    """The packed weight that stands in for a layer's own. A pickled layer is one that was never packed."""

    _owner: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no submodule
    record: QuantizedLayer

    @property
    def owner(self) -> Any:
        """The layer whose calls it takes over."""
        return self._owner[0]

    def stand_in(self, owner: nn.Module, record: QuantizedLayer) -> None:
        """Take over the calls of a layer."""
        self._owner, self.record = (owner,), record
        owner.forward = self.forward

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.owner.weight.is_meta:
            raise ValueError(
                "optimize: a layer whose weight was given back (quantize_release) has nothing left to be pickled; "
                "optimize without quantize_release, or keep PackedLinear modules' state_dict"
            )
        # Unpickled, the layer's `forward` is what this gives as an attribute of it: its class's own.
        return (_itself, (self.owner,))

    def __deepcopy__(self, memo: dict[int, Any]) -> Standing:
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


def _itself(layer: nn.Module) -> nn.Module:
    return layer


class Packing:
    """The layers of one model whose call goes to a packed weight.

    A layer stays the module it was, with its own weight: `state_dict` and whoever asks for `layer.weight` see no
    difference, and taking the packed one out brings back exactly what was there.
    """

    def __init__(self) -> None:
        self.layers: list[QuantizedLayer] = []
        self._packed: dict[str, Standing] = {}

    def pack(
        self, model: nn.Module, format: str, group_size: int, skip: Sequence[str], taken: Collection[str] = ()
    ) -> None:
        """Pack every linear layer whose name matches none of the patterns; those taken are another rewrite's."""
        for name, module in linear_layers(model):
            if name in taken:
                continue
            record = QuantizedLayer(name, format, "left")
            self.layers.append(record)
            pattern = next((p for p in skip if fnmatchcase(name, p)), None)
            if pattern is not None:
                record.why = f"its name matches {pattern!r} of quantize_skip"
            elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
                record.why = f"its class, {type(module).__name__}, may compute something else than nn.Linear"
            elif _replaced(module):
                record.why = "its forward is replaced already"
            else:
                try:
                    packed = Standing.from_linear(as_linear(module), format=format, group_size=group_size)
                except (TypeError, ValueError) as error:
                    record.why = str(error)
                    continue
                assert isinstance(packed, Standing)
                assert packed.error is not None
                record.status, record.nbytes = "packed", packed.nbytes
                record.relative_error, record.largest_error = packed.error.relative, packed.error.largest
                self._packed[name] = packed
                packed.stand_in(module, record)

    def join(self, graph: fx.GraphModule, effects: Effects, inputs: Sequence[Any]) -> list[Site]:
        """The groups of layers in a graph that one call can stand for; their packed weights then lie side by side."""
        of = {id(packed.weight): packed for packed in self._packed.values()}
        return join(graph, inputs, lambda t: of.get(id(t)), _lay, effects)

    def check(self, run: Callable[[], object]) -> None:
        """Hold each layer to the tolerance of its operator on the inputs that it gets while `run` runs the model.

        What it is held to is the float64 product with the weight as it was rounded: the rounding itself is the
        format's, and stands in the report.
        """
        names = {packed.owner: name for name, packed in self._packed.items()}
        seen: dict[str, torch.Tensor] = {}

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            name, x = names[module], args[0] if args else None
            if name not in seen and isinstance(x, torch.Tensor) and x.numel():
                seen[name] = x.detach().flatten(0, -2)[:_ROWS].clone()

        with ExitStack() as hooks, torch.no_grad():
            for owner in names:
                hooks.enter_context(owner.register_forward_pre_hook(keep))
            run()
        for name, x in seen.items():
            packed = self._packed[name]
            if why := _wrong(packed, x):
                packed.record.status, packed.record.why = "rolled back", why
                del packed.owner.forward, self._packed[name]

    def release(self, model: nn.Module) -> None:
        """Give the packed layers' own weights back to the system: what stands there has their shapes and no numbers.

        A weight whose memory somebody else in the model uses too, as an embedding may, stays.
        """
        users = Counter(t.untyped_storage().data_ptr() for t in tensors(model).values() if not t.is_meta)
        for packed in self._packed.values():
            module, record = packed.owner, packed.record
            weight = module.weight
            if users[weight.untyped_storage().data_ptr()] > 1:
                record.why = "its weight is kept: others in the model use it"
                continue
            record.released = weight.nbytes
            empty = torch.empty_like(weight, device="meta")
            module.weight = nn.Parameter(empty, requires_grad=False)

    @property
    def released(self) -> list[str]:
        """The layers whose own weights are gone."""
        return [record.name for record in self.layers if record.released]

    def refuse(self, what: str) -> None:
        """Say why something that needs a layer's own weight cannot be done.

        Raises:
            ValueError: where weights were released.
        """
        if gone := self.released:
            raise ValueError(
                f"{what}: the weights of {len(gone)} layers ({gone[0]}, ...) were given back to the system "
                "(quantize_release); load the model anew"
            )

    @property
    def modules(self) -> list[nn.Module]:
        """The layers that compute with a packed weight."""
        return [packed.owner for packed in self._packed.values()]

    def take_out(self) -> None:
        """Give every layer its own call back."""
        for module in self.modules:
            vars(module).pop("forward", None)
        self._packed.clear()


def _lay(layers: Sequence[Standing]) -> bool:
    """Whether layers' packed weights lie side by side now: not where one of them does so with others."""
    records = [layer.record for layer in layers]
    group = tuple(record.name for record in records)
    before = {record.joined for record in records}
    if before == {()}:
        side_by_side(layers)
        for record in records:
            record.joined = group
    return before in ({()}, {group})


def _replaced(module: nn.Module) -> bool:
    """Whether a layer's call is not its class's: what a pickled layer brings along is."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _wrong(packed: PackedLinear, x: torch.Tensor) -> str:
    """Why a layer's result is not the product it should be, or nothing."""
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    args = (packed.weight, packed.scale, packed.zero)
    options = {"format": packed.format, "group_size": packed.group_size}
    with torch.no_grad(), always_native():
        if not bool(x.isfinite().all()):
            return ""  # its results are NaN by definition
        got = packed(x)
        exact = PACKED_LINEAR.reference(x.double(), *args, None if bias is None else bias.double(), **options)
        return PACKED_LINEAR.tolerance.check(got, PACKED_LINEAR.eager(x, *args, bias, **options), exact).why


def needed(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Of what Dynamo would ask before every call, all but what is inside a packed layer, which nobody else changes."""
    inside = tuple(g.name + end for g in guards if g.has_value and type(g.value) is Standing for end in ".[")
    return [not g.name.startswith(inside) for g in guards]
