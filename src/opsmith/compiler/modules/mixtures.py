"""Mixtures of experts in models of transformers: opsmith's implementation in the place of theirs, and theirs again."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from opsmith import decoding
from opsmith.operator import Tolerance

_CHOICE = "_experts_implementation"  # how a configuration calls what it chose
_REPLACED = (None, "eager", "batched_mm", "grouped_mm")  # others somebody has asked for
_FEW, _TOKENS = 3, 6  # experts and tokens that the proof looks at


class Mixtures:
    """Which experts of one model are opsmith's."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str | None]] = []
        self._taken = 0
        self._left: dict[str, int] = {}

    def take(self, model: nn.Module, verify: bool) -> None:
        """Have opsmith compute experts, where all that a configuration speaks for have its form, and it is proved."""
        found = list(_experts(model))
        if not found:
            return
        decoding.register(wanted=True)
        from opsmith.decoding.experts import unlike

        for config in {id(m.config): m.config for m in found}.values():
            its = [m for m in found if m.config is config]
            chosen = getattr(config, _CHOICE)
            if chosen not in _REPLACED:
                continue
            why = next(filter(None, (unlike(m, m.gate_up_proj) for m in its)), "")
            if not why and verify:
                why = next(filter(None, map(_wrong, its)), "")
            if why:
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
        return lines + [
            f"experts: {n} mixtures are left to transformers: {why}" for why, n in self._left.items()
        ]


def _experts(model: nn.Module) -> Iterator[Any]:
    """The modules that transformers lets choose who computes them."""
    if "transformers" not in sys.modules:
        return
    for module in model.modules():
        chooses = hasattr(module, "_apply_gate") and hasattr(getattr(module, "config", None), _CHOICE)
        if chooses and hasattr(module, "gate_up_proj") and hasattr(type(module).forward, "__wrapped__"):
            yield module


def _wrong(module: Any) -> str:
    """Why a few of a module's experts are not computed as its own code does, in float64; nothing where they are."""
    from opsmith.decoding.experts import mixed

    count = min(_FEW, module.num_experts)
    own, exact = (_some(module, count, dtype) for dtype in (module.gate_up_proj.dtype, torch.float64))
    like = own.gate_up_proj
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS, like.shape[1 if module.is_transposed else 2], generator=generator).to(like)
    ids = (torch.arange(_TOKENS) % count)[:, None].to(like.device)
    weights = torch.rand(_TOKENS, 1, generator=generator).to(like)
    code = type(module).forward.__wrapped__
    with torch.no_grad():
        right = code(exact, x.double(), ids, weights.double())
        verdict = Tolerance().check(mixed(own, x, ids, weights), code(own, x, ids, weights), right)
    return "" if verdict.ok else f"in float64 they differ, {verdict.why}"


def _some(module: Any, count: int, dtype: torch.dtype) -> Any:
    """A stand-in with the first of a module's experts alone."""
    one = copy.copy(module)
    one._parameters = {
        name: None if p is None else nn.Parameter(p.detach()[:count].to(dtype), requires_grad=False)
        for name, p in module._parameters.items()
    }
    one.num_experts = count
    return one
