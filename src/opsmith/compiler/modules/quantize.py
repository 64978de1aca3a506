"""Packed weights in a model's linear layers: put in before the model is captured, proved layer by layer, taken out."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.types import GuardFilterEntry

from opsmith.call.dispatch import always_native, is_sharded
from opsmith.compiler.capture.mutation import Effects
from opsmith.compiler.choose.ranks import Ranks, agreed
from opsmith.compiler.choose.weights import Seen
from opsmith.compiler.config import Config
from opsmith.compiler.find.joined import join, side_by_side
from opsmith.compiler.find.site import Site
from opsmith.compiler.modules.calibrate import Calls, gathered
from opsmith.compiler.modules.linear_layers import as_linear, linear_layers, output_layer, own, tensors
from opsmith.compiler.modules.mixtures import PackedMixture, experts_of
from opsmith.compiler.modules.stand_in import QuantizedLayer, StandIn, formats
from opsmith.measure.pages import Read
from opsmith.ops.packed_linear import CARD as PACKED_LINEAR
from opsmith.ops.packed_linear.inputs import Inputs
from opsmith.ops.packed_linear.module import PackedExperts, PackedLinear
from opsmith.ops.packed_linear.weight import in_parts, quantize
from opsmith.ops.rounding import RoundingError

_ROWS = 8  # of a layer's input that prove it


class Standing(StandIn, PackedLinear):
    """The packed weight that stands in for a linear layer's own."""

    def compute(self, input: Tensor) -> Tensor:
        """What the packed weight makes of a layer's input."""
        return PackedLinear.forward(self, input)

    def unpacked(self, dtype: torch.dtype) -> list[Tensor]:
        """The weight as the layer holds it."""
        weight = self.dequantize(dtype)
        return [weight if isinstance(self.owner, nn.Linear | nn.Embedding) else weight.t()]

    def again(self) -> RoundingError:
        """Pack the layer's weight once more."""
        (held,), bias = self.held, self.owner._parameters.get("bias")
        weight = held if isinstance(self.owner, nn.Linear | nn.Embedding) else held.t()
        if weight.shape != (self.out_features, self.in_features) or (bias is None) is not (self.bias is None):
            raise ValueError("its weight or bias has another shape now")
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)
        return quantize(weight, self.format, self.group_size, self.packed)


class Packing:
    """The layers of one model whose call goes to a packed weight.

    A layer stays the module it was, with its own weight: `state_dict` and whoever asks for `layer.weight` see no
    difference, and taking the packed one out brings back exactly what was there.
    """

    def __init__(self) -> None:
        self.layers: list[QuantizedLayer] = []
        self.packed: dict[str, StandIn] = {}  # by the names of what they stand for
        self.adopted: dict[PackedLinear, QuantizedLayer] = {}  # layers that the model has packed itself
        self._seen: tuple[list[type], Seen] = [], Seen()  # of all layers, when they were last looked at

    def pack(
        self, model: nn.Module, config: Config, taken: Collection[str] = (), calibration: Calls | None = None
    ) -> None:
        """Pack every linear layer and mixture but those whose name is to be skipped; those taken are another rewrite's.

        With calls for calibration, the layers of int4 are rounded for the inputs that they then get, in the model's
        order.
        """
        head = output_layer(model)
        kernels = any(i.available() is True for i in PACKED_LINEAR.implementations if i.device == "cpu")
        modules: dict[str, nn.Module] = {}
        mixtures = dict(experts_of(model))
        for name, module in (*linear_layers(model), *mixtures.items()):
            if name in taken:
                continue
            weight: Any = module.gate_up_proj if name in mixtures else module.weight
            record = QuantizedLayer(name, _format(name, module is head, config), "left")
            self.layers.append(record)
            pattern = next((p for p in config.quantize_skip if fnmatchcase(name, p)), None)
            if weight.device.type == "cpu" and not kernels:
                record.why = (
                    "without kernels each call would unpack it: opsmith doctor says why there are none"
                )
            elif pattern is not None:
                record.why = f"its name matches {pattern!r} of quantize_skip"
            elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
                record.why = f"its class, {type(module).__name__}, may compute something else than nn.Linear"
            elif is_sharded(weight):
                record.why = "its weight is spread over ranks"
            elif _replaced(module):
                record.why = "its forward is replaced already"
            else:
                modules[name] = module
        records = {record.name: record for record in self.layers}
        read = Read()

        def stand_in(name: str, inputs: Inputs | None = None) -> None:
            record, module = records[name], modules[name]
            how: Any = {"group_size": config.quantize_group, "symmetric": config.quantize_symmetric}
            packed: Any
            try:
                if name in mixtures:
                    record.what = "mixture"
                    packed = PackedMixture(module, record.format, config.verify, **how)
                    record.format = packed.how["format"]
                else:
                    how |= {"format": record.format, "inputs": inputs}
                    packed = Standing.from_linear(as_linear(module), **how)
            except (TypeError, ValueError) as error:
                record.why = str(error)
                return
            record.status, record.nbytes = "packed", packed.nbytes
            record.take(packed.error)
            self.add(name, packed, module, record)
            for weight in packed.held:
                read.add(weight)

        rounded = {
            name: module
            for name, module in modules.items()
            if calibration and records[name].format == "int4" and not (module is head or name in mixtures)
        }
        for found in gathered(model, calibration or [], rounded):
            for name, inputs in found.items():
                stand_in(name, inputs)
        for name in modules:
            if name not in self.packed:
                stand_in(name)
        read.give_back()

    def adopt(self, model: nn.Module) -> None:
        """Take note of the packed layers that a model has itself, as one that was loaded from a file of few bits does.

        They stay as they are; but layers of one input are one call of them, too.
        """
        for name, module in model.named_modules():
            if type(module) in (PackedLinear, PackedExperts):
                what = "linear layer" if type(module) is PackedLinear else "expert weight"
                record = QuantizedLayer(name, module.format, "kept", nbytes=module.nbytes, what=what)
                self.layers.append(record)
                self.adopted[module] = record

    def add(self, name: str, packed: StandIn, module: nn.Module, record: QuantizedLayer) -> None:
        """Let a packed weight take over the calls of a module."""
        self.packed[name] = packed
        packed.stand_in(module, record)

    def of(self, weight: Tensor) -> Standing | None:
        """What was packed of this very weight, where something was."""
        return next((p for p in self._layers.values() if p.owner.weight is weight), None)

    @property
    def _layers(self) -> dict[str, Standing]:
        """The packed weights that multiply, by the names of their layers."""
        return {name: packed for name, packed in self.packed.items() if type(packed) is Standing}

    def join(self, graph: fx.GraphModule, effects: Effects, inputs: Sequence[Any]) -> list[Site]:
        """The groups of layers in a graph that one call can stand for; their packed weights then lie side by side."""
        of = {id(packed.weight): packed for packed in (*self._layers.values(), *self.adopted)}
        return join(graph, inputs, lambda t: of.get(id(t)), self._lay, effects)

    def _lay(self, layers: Sequence[PackedLinear]) -> bool:
        """Whether layers' packed weights lie side by side now: not where one of them does so with others."""
        records = [layer.record if isinstance(layer, Standing) else self.adopted[layer] for layer in layers]
        group = tuple(record.name for record in records)
        before = {record.joined for record in records}
        if before == {()}:
            side_by_side(layers)
            for record in records:
                record.joined = group
        return before in ({()}, {group})

    def check(self, run: Callable[[], object], ranks: Ranks | None = None) -> None:
        """Hold each layer to the tolerance of its operator on the inputs that it gets while `run` runs the model.

        What it is held to is the float64 product with the weight as it was rounded: the rounding itself is the
        format's, and stands in the report.
        """
        names = {packed.owner: name for name, packed in self._layers.items()}
        seen: dict[str, Tensor] = {}

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            name, x = names[module], args[0] if args else None
            if name not in seen and isinstance(x, Tensor) and x.numel():
                seen[name] = x.detach().flatten(0, -2)[:_ROWS].clone()

        with ExitStack() as hooks, torch.no_grad():
            for owner in names:
                hooks.enter_context(owner.register_forward_pre_hook(keep))
            run()
        for name, x in seen.items():
            packed = self._layers[name]
            if why := agreed(ranks, _wrong(packed, x)):
                packed.record.status, packed.record.why = "rolled back", why
                del packed.owner.forward, self.packed[name]

    def follow(self) -> None:
        """Pack anew what changed since; a layer that its packed weight cannot stand for gets its own call back."""
        if not self.packed or torch.compiler.is_compiling():  # on weights that have no numbers
            return
        owners = [packed.owner for packed in self.packed.values()]
        kinds, seen = self._seen
        if list(map(type, owners)) == kinds and not seen.changed(own(*owners)):
            return
        self.packed = {name: packed for name, packed in self.packed.items() if packed.follow()}
        self._seen = list(map(type, self.modules)), Seen(own(*self.modules))

    def train(self) -> None:
        """Say once that packed weights do not learn, where a model that trains would have them learn."""
        learning = sum(any(t.requires_grad for t in packed.held) for packed in self.packed.values())
        if learning:
            warnings.warn(
                f"opsmith: the weights of {learning} quantized layers get no gradient, and do not learn: "
                "opsmith.restore(model) before it trains, or requires_grad_(False) for them",
                stacklevel=5,
            )

    def unpack(self, model: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
        """Give a model, this one or a copy of it, the weights that the packed ones stand for.

        Returns:
            The layers whose inputs are rounded, too.
        """
        modules = dict(model.named_modules())
        for name, packed in self.packed.items():
            module: Any = modules[name]
            vars(module).pop("forward", None)
            for weight, t in zip(packed.weights, packed.unpacked(dtype), strict=True):
                setattr(module, weight, nn.Parameter(t, requires_grad=False))
        return [modules[name] for name, packed in self._layers.items() if packed.format == "int8_dynamic"]

    def lines(self) -> list[str]:
        """What a plan says of them."""
        packed = [layer for layer in self.layers if layer.status == "packed"]
        return [f"packed: {formats(packed, 'to')}"] if packed else []

    def release(self, model: nn.Module) -> None:
        """Give the packed layers' own weights back to the system: what stands there has their shapes and no numbers.

        A weight whose memory somebody else in the model uses too, as an embedding may, stays.
        """
        users = Counter(t.untyped_storage().data_ptr() for t in tensors(model).values() if not t.is_meta)
        ours = Counter(t.untyped_storage().data_ptr() for p in self.packed.values() for t in p.held)
        empty: dict[int, nn.Parameter] = {}  # what stands for each weight: tied ones stay tied
        for packed in self.packed.values():
            record = packed.record
            for name, weight in zip(packed.weights, packed.held, strict=True):
                memory = weight.untyped_storage().data_ptr()
                if users[memory] > ours[memory]:
                    record.why = "its weight is kept: others in the model use it"
                    continue
                if memory not in empty:
                    record.released += weight.nbytes
                    empty[memory] = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
                setattr(packed.owner, name, empty[memory])
            packed.look()
        self._seen = [], Seen()
        # The class's own would end in an error about meta tensors; `load` gives a model one that knows them.
        if empty and hasattr(model, "save_pretrained") and "save_pretrained" not in vars(model):
            model.save_pretrained = lambda *_, **__: self.refuse("save_pretrained")  # type: ignore[assignment]

    def refuse(self, what: str) -> None:
        """Say why something that needs a layer's own weight cannot be done.

        Raises:
            ValueError: where weights were released.
        """
        if gone := [record.name for record in self.layers if record.released]:
            raise ValueError(
                f"{what}: the weights of {len(gone)} layers ({gone[0]}, ...) were given back to the system "
                "(quantize_release); load the model anew, or write what is packed by opsmith.save"
            )

    @property
    def modules(self) -> list[nn.Module]:
        """The layers that compute with a packed weight."""
        return [packed.owner for packed in self.packed.values()]

    @property
    def held(self) -> list[Tensor]:
        """The weights that others were packed of."""
        return [t for packed in self.packed.values() for t in packed.held]

    def take_out(self) -> None:
        """Give every layer its own call back."""
        for module in self.modules:
            vars(module).pop("forward", None)
        self.packed.clear()
        self.adopted.clear()


def _format(name: str, last: bool, config: Config) -> str:
    """The format of a layer: by its name, and of the output layer int8 where others are int4.

    Four bits of it cost as much quality as those of all other layers together (docs/decisions/024-four-bits.md).
    """
    named = next((f for pattern, f in config.quantize_formats.items() if fnmatchcase(name, pattern)), None)
    assert config.quantize is not None
    return named or ("int8" if last and config.quantize == "int4" else config.quantize)


def _replaced(module: nn.Module) -> bool:
    """Whether a layer's call is not its class's: what a pickled layer brings along is."""
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _wrong(packed: PackedLinear, x: Tensor) -> str:
    """Why a layer's result is not the product it should be, or nothing."""
    card, bias = PACKED_LINEAR, None if packed.bias is None else packed.bias.to(x.dtype)
    options = {"format": packed.format, "group_size": packed.group_size}
    with torch.no_grad(), always_native():
        if not bool(x.isfinite().all()):
            return ""  # its results are NaN by definition
        got, wide = packed(x), x.double()
        parts = in_parts(packed.weight, packed.scale, packed.zero, bias, packed.outer, k=packed.in_features)
        return card.tolerance.check_parts(
            (
                got[..., at],
                card.eager(x, *tensors, b, outer=outer, **options),
                card.reference(wide, *tensors, None if b is None else b.double(), outer=outer, **options),
            )
            for at, (*tensors, b, outer) in parts
        ).why


def needed(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """All that Dynamo would ask before a call but what is inside packed layers, and PyTorch's leave for a fast path."""
    packed = (g.name for g in guards if g.has_value and isinstance(g.value, PackedLinear))
    inside = tuple(name + end for name in packed for end in ".[")
    return [not g.name.startswith(inside) and not g.name.endswith("._is_fastpath_enabled") for g in guards]
