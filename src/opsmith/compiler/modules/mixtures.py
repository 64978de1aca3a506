"""Mixtures of experts in models of transformers: opsmith's implementation in the place of theirs, and theirs again.

Where a model is quantized, packed weights stand in for those of all experts of a layer.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from opsmith import decoding
from opsmith.call.dispatch import is_sharded
from opsmith.compiler.choose.ranks import Ranks, agreed
from opsmith.compiler.modules.linear_layers import layer_of
from opsmith.compiler.modules.stand_in import StandIn
from opsmith.operator import Tolerance
from opsmith.ops.packed_linear.module import PackedExperts, PackedLinear
from opsmith.ops.rounding import RoundingError

_CHOICE = "_experts_implementation"  # how a configuration calls what it chose
_REPLACED = (None, "eager", "batched_mm", "grouped_mm")  # others somebody has asked for
_FEW, _TOKENS = 3, 6  # experts and tokens that the proof looks at


class Mixtures:
    """Which experts of one model are opsmith's."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str | None]] = []
        self._taken = 0
        self._left: dict[str, int] = {}

    def take(self, model: nn.Module, verify: bool, ranks: Ranks | None = None) -> None:
        """Have opsmith compute experts, where all that a configuration speaks for have its form, and it is proved."""
        found = [module for _, module in experts_of(model)]
        if not found:
            return
        decoding.register(wanted=True)
        from opsmith.decoding.experts import unlike

        for config in {id(m.config): m.config for m in found}.values():
            its = [m for m in found if m.config is config]
            chosen = getattr(config, _CHOICE)
            if chosen not in _REPLACED:
                continue
            whys = (unlike(m, m.gate_up_proj.dtype) or (_wrong(m) if verify else "") for m in its)
            if why := agreed(ranks, next(filter(None, whys), "")):
                self._left[why] = self._left.get(why, 0) + len(its)
                continue
            setattr(config, f"{_CHOICE}_internal", decoding.NAME)
            self._before.append((config, chosen))
            self._taken += len(its)

    def take_out(self) -> None:
        """Give configurations back what they had chosen, unless they chose anew."""
        for config, chosen in self._before:
            if getattr(config, _CHOICE) == decoding.NAME:
                setattr(config, f"{_CHOICE}_internal", chosen)
        self._before.clear()

    def lines(self) -> list[str]:
        """What a report says of them."""
        lines = [f"experts: {self._taken} mixtures in one kernel each"] * bool(self._taken)
        lines += [f"experts: {n} mixtures are left to transformers: {why}" for why, n in self._left.items()]
        return lines


class PackedMixture(StandIn, nn.Module):
    """The packed weights of all experts of a layer, in the place of its own."""

    weights = ("gate_up_proj", "down_proj")

    def __init__(self, module: Any, format: str, verify: bool, **how: Any) -> None:
        """Of a module of transformers.

        Raises:
            ValueError: it is none that `opsmith.ops.experts` computes, or is seen to compute something else.
        """
        from opsmith.decoding.experts import unlike

        super().__init__()
        if why := unlike(module, module.gate_up_proj.dtype):
            raise ValueError(why)
        # Rows of the few tokens that an expert gets would not pay for being rounded.
        self.how = {"format": "int8" if format == "int8_dynamic" else format, **how}
        self.packed: Any = nn.ModuleList(self._packed(module))
        self.error, self.nbytes = _worse(*self.packed), sum(t.nbytes for t in self.buffers())
        if verify and (why := _wrong(module, self.packed)):
            raise ValueError(why)

    def compute(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the packed experts make of a call."""
        from opsmith.decoding.experts import mixed

        return mixed(self.owner, x, ids, weights, self.packed)

    def unpacked(self, dtype: torch.dtype) -> list[Tensor]:
        """Both weights as the module holds them."""
        first, last = (one.dequantize(dtype) for one in self.packed)
        return [first.mT, last.mT] if self.owner.is_transposed else [first, last]

    def again(self) -> RoundingError | None:
        """Pack both weights once more."""
        new = tuple(self._packed(self.owner))
        for mine, its in zip(self.packed, new, strict=True):
            mine.load_state_dict(its.state_dict())
        return _worse(*new)

    def _packed(self, module: Any) -> Iterator[PackedExperts]:
        for name in self.weights:
            weight = getattr(module, name).detach()
            each = map(layer_of, weight.mT if module.is_transposed else weight)
            yield PackedExperts.of((PackedLinear.from_linear(e, **self.how) for e in each), len(weight))


def _worse(first: PackedExperts, last: PackedExperts) -> RoundingError | None:
    return max((one.error for one in (first, last) if one.error), key=lambda e: e.relative, default=None)


def choose(model: Any) -> None:
    """Have opsmith compute all experts of a model."""
    decoding.register(wanted=True)
    model.set_experts_implementation(decoding.NAME)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules, with their names, that transformers lets choose who computes them."""
    if "transformers" not in sys.modules:
        return
    for name, module in model.named_modules():
        chooses = hasattr(module, "_apply_gate") and hasattr(getattr(module, "config", None), _CHOICE)
        own = {"gate_up_proj", "down_proj"} <= module._parameters.keys()
        if chooses and own and hasattr(type(module).forward, "__wrapped__"):
            yield name, module


def _wrong(module: Any, packed: Any = None) -> str:
    """Why a few of a module's experts are not computed as its own code does, in float64; nothing where they are."""
    from opsmith.decoding.experts import mixed

    if module.gate_up_proj.is_meta:
        return "their weights are on the device meta; optimize again once they have numbers"
    own, exact = (_some(module, packed, t) for t in (module.gate_up_proj.dtype, torch.float64))
    like, count = own.gate_up_proj, own.num_experts
    if not count:
        return ""  # all are other ranks'
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, like.shape[1 if module.is_transposed else 2], generator=generator).to(like)
    ids = (torch.arange(_TOKENS) % count)[:, None].to(like.device)
    weights = torch.rand(_TOKENS, 1, generator=generator).to(like)
    code = type(module).forward.__wrapped__
    with torch.no_grad():
        right = code(exact, x.double(), ids, weights.double())
        got = mixed(module, x, ids, weights, packed) if packed else mixed(own, x, ids, weights)
        verdict = Tolerance().check(got, code(own, x, ids, weights), right)
    return "" if verdict.ok else f"in float64 they differ, {verdict.why}"


def _some(module: Any, packed: Any, dtype: torch.dtype) -> Any:
    """A stand-in with the first of a rank's experts alone, or with what these are once they are packed."""
    one = copy.copy(module)
    parts = ((name, p.to_local() if is_sharded(p) else p) for name, p in module._parameters.items())
    held: dict[str, Any] = {n: None if p is None else p.detach()[:_FEW] for n, p in parts}
    one.num_experts = len(held["gate_up_proj"])
    for name, of in zip(PackedMixture.weights, packed or (), strict=False):
        some = torch.stack([of[e].dequantize() for e in range(one.num_experts)])
        held[name] = some.mT if module.is_transposed else some
    fixed = partial(nn.Parameter, requires_grad=False)
    one._parameters = {name: None if t is None else fixed(t.to(dtype)) for name, t in held.items()}
    return one
