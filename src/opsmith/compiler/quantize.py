"""Packed weights in a model's linear layers: put in before the model is captured, proved layer by layer, taken out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from opsmith.operator import registry
from opsmith.ops.common import always_native
from opsmith.ops.packed_module import PackedLinear

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

    def __str__(self) -> str:
        if self.status != "packed":
            return f"{self.name} {self.status}: {self.why}"
        return f"{self.name}: {self.format}, relative error {self.relative_error:.2g}"


class Packing:
    """The layers of one model whose call goes to a packed weight.

    A layer stays the module it was, with its own weight: `state_dict` and whoever asks for `layer.weight` see no
    difference, and taking the packed one out brings back exactly what was there.
    """

    def __init__(self) -> None:
        self.layers: list[QuantizedLayer] = []
        self._packed: dict[str, tuple[nn.Linear, PackedLinear]] = {}

    def put_in(
        self,
        model: nn.Module,
        format: str,
        group_size: int,
        skip: Sequence[str],
        taken: Collection[str] = (),
    ) -> None:
        """Pack every linear layer whose name matches none of the patterns; those taken are another rewrite's."""
        for name, module in _linears(model):
            if name in taken:
                continue
            record = QuantizedLayer(name, format, "left")
            self.layers.append(record)
            pattern = next((p for p in skip if fnmatchcase(name, p)), None)
            if pattern is not None:
                record.why = f"its name matches {pattern!r} of quantize_skip"
            elif "forward" in vars(module):
                record.why = "its forward is replaced already"
            else:
                try:
                    packed = PackedLinear.from_linear(module, format=format, group_size=group_size)
                except (TypeError, ValueError) as error:
                    record.why = str(error)
                    continue
                assert packed.error is not None
                record.status, record.nbytes = "packed", packed.nbytes
                record.relative_error, record.largest_error = packed.error.relative, packed.error.largest
                self._packed[name] = (module, packed)
                module.forward = packed.forward  # type: ignore[method-assign]

    def prove(self, run: Callable[[], object]) -> None:
        """Hold each layer to the tolerance of its operator on the inputs that it gets while `run` runs the model.

        What it is held to is the float64 product with the weight as it was rounded: the rounding itself is the
        format's, and stands in the report.
        """
        seen: dict[str, torch.Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
                if name not in seen and args and isinstance(args[0], torch.Tensor) and args[0].numel():
                    seen[name] = args[0].detach().flatten(0, -2)[:_ROWS].clone()

            return hook

        hooks = [module.register_forward_pre_hook(keep(name)) for name, (module, _) in self._packed.items()]
        try:
            with torch.no_grad():
                run()
        finally:
            for hook in hooks:
                hook.remove()
        for record in self.layers:
            if record.name in seen:
                module, packed = self._packed[record.name]
                why = _wrong(packed, seen[record.name])
                if why:
                    record.status, record.why = "rolled back", why
                    del module.forward, self._packed[record.name]

    @property
    def modules(self) -> list[nn.Module]:
        """The layers that compute with a packed weight."""
        return [module for module, _ in self._packed.values()]

    def take_out(self) -> None:
        """Give every layer its own call back."""
        for module, _ in self._packed.values():
            if "forward" in vars(module):
                del module.forward
        self._packed.clear()


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers whose arithmetic is `nn.Linear`'s own; a subclass may compute something else."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module.weight.numel() and not module.weight.is_meta:
            yield name, module


def _wrong(packed: PackedLinear, x: torch.Tensor) -> str:
    """Why a layer's result is not the product it should be, or nothing."""
    card = registry()["packed_linear"]
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    args = (packed.weight, packed.scale, packed.zero)
    options = {"format": packed.format, "group_size": packed.group_size}
    with torch.no_grad(), always_native():
        if not bool(x.isfinite().all()):
            return ""  # its results are NaN by definition
        got = packed(x)
        exact = card.reference(x.double(), *args, None if bias is None else bias.double(), **options)
        return card.tolerance.check(got, card.eager(x, *args, bias, **options), exact).why
