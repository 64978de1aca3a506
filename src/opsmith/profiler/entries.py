"""What a call is and costs: of ours by their cards, of a dispatcher entry of ours too, and of PyTorch's by its name.

A kernel that a program calls by itself shows in the profiler as an entry with the shapes of its arguments. Its cost is,
in this order: the formula that its card's `entries` names; the card's own, where the entry's arguments are all that it
needs; and of an operator bound by memory, the bytes of what it was given, since it writes into its arguments.
"""

from __future__ import annotations

import functools
import inspect
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith.call.layouts import nbytes
from opsmith.operator import Cost, Kind, Operator, registry
from opsmith.profiler import costs, data
from opsmith.profiler.costs import Inputs
from opsmith.profiler.data import Row
from opsmith.proof.replay import spell

Estimate = tuple[Cost | None, str]  # a cost where one is known, and what went wrong in a card's formula

# Classes are called as kinds are, but for these two.
_OTHERS = {Kind.CACHE: data.COPIES, Kind.MLA: data.ATTENTION}
_OF_KIND: dict[Kind, str] = {kind: _OTHERS.get(kind) or getattr(data, kind.name) for kind in Kind}


def kind_of(name: str) -> str | None:
    """The class of an operator by its name; None for one that nothing is known of."""
    if "::" not in name:
        return None
    card = card_of(name)
    return _OF_KIND[card.kind] if card is not None else costs.class_of(name)


def card_of(name: str) -> Operator | None:
    """The card of a dispatcher operator: of ours by the card's schemas, of a project's by its namespace."""
    if name.startswith(("aten::", "autograd::")):
        return None
    return _cards(tuple(registry())).get(name if name.startswith("opsmith::") else name.partition("::")[0])


@functools.lru_cache(maxsize=2)
def _cards(names: tuple[str, ...]) -> dict[str, Operator]:
    cards = registry()
    mine = {
        f"opsmith::{schema.split('(', 1)[0].split('::')[-1]}": card
        for card in cards.values()
        for schema in card.schemas
    }
    return {**cards, **mine}


def cost(card: Operator, call: dict[str, Any]) -> Estimate:
    """What the card says of a call; nothing where the call is not known in full."""
    return _estimate(card, card.cost, call)


def described(card: Operator, call: dict[str, Any]) -> Row:
    """A call as the bill names it: what it is, what it costs, and how to time it by itself."""
    estimate, fault = cost(card, call)
    parts = [f"{n} {costs.sizes(v)}" for n, v in call.items() if torch.is_tensor(v)]
    parts += [f"{n}={v}" for n, v in call.items() if isinstance(v, bool | str) and v]
    ordered = map(call.get, inspect.signature(card.function).parameters)  # x before the scales of its weight
    wide = [v.dtype for v in ordered if isinstance(v, Tensor) and v.is_floating_point()]
    row = Row(_OF_KIND[card.kind], card.name, ", ".join(parts), fault=fault, replay=replay(card, call))
    row.dtype = str(wide[0]).removeprefix("torch.") if wide else ""
    row.charge(estimate)
    return row


def replay(card: Operator, call: dict[str, Any]) -> str:
    """What to type to time a call of a card by itself; "" where its integers mean what random ones could not."""
    text = spell(card, call) if call else None
    if text is None:
        return ""
    try:
        inspect.signature(card.function).bind(**call)
    except TypeError:
        return ""  # the call is not known in full
    return f"opsmith bench {shlex.quote(_named(card))} --shape {shlex.quote(text)}"


def _named(card: Operator) -> str:
    """What the command line knows an operator by: a project that was loaded from a folder by that folder."""
    module = sys.modules.get(str(getattr(card.reference, "__module__", "")))
    if module is not None and module.__name__.startswith("opsmith_project_") and module.__file__:
        return str(Path(module.__file__).parent)
    return card.name


def _estimate(card: Operator, formula: Callable[..., Cost], call: dict[str, Any]) -> Estimate:
    try:
        inspect.signature(formula).bind(**call)
    except TypeError:
        return None, ""
    try:
        return formula(**call), ""
    except NotImplementedError:
        return None, ""  # a card that has no formula for this call says so
    except Exception as error:  # whatever a card's author got wrong: the report names it
        if any(isinstance(v, Tensor) and v.is_meta for v in call.values()) and "meta" in str(error):
            return None, ""  # it depends on values, and there are none
        lines = str(error).splitlines() or [""]
        return None, f"the cost of {card.name} raised {type(error).__name__}: {lines[0]}"


def cost_of(name: str, inputs: Inputs) -> Estimate:
    """The cost of a call by itself."""
    card = card_of(name)
    if card is None:
        return costs.cost_of(name, inputs), ""
    call = named(name, inputs)
    if call is None:
        return None, ""
    entry = name.rpartition("::")[2]
    if entry in card.entries:
        return _estimate(card, card.entries[entry], call)
    parts = costs.tensors(inputs)
    kind = _OF_KIND[card.kind]
    if "backward" not in entry and (mine := _of_card(card, call)) is not None:
        return _estimate(card, card.cost, mine)
    if kind in (data.ATTENTION, data.MATMUL) or not parts:
        return None, ""
    return Cost(float(parts[0].numel()), nbytes(*parts)), ""


def _of_card(card: Operator, call: dict[str, Any]) -> dict[str, Any] | None:
    """The call as the card's own formula takes it; None where the entry's arguments do not say it all."""
    parameters = inspect.signature(card.cost).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if any(p.default is p.empty and p.name not in call for p in named):
        return None
    # Settings that an entry writes as numbers, the function as words or None: only tensors are sure to mean the same.
    return {p.name: call[p.name] for p in named if isinstance(call.get(p.name), Tensor | float)}


def named(name: str, inputs: Inputs) -> dict[str, Any] | None:
    """An entry's arguments by the names of its schema, tensors without memory; None where they are not all known."""
    space, _, entry = name.rpartition("::")
    try:
        schema = getattr(getattr(torch.ops, space), entry).default._schema
    except AttributeError:
        return None
    if len(schema.arguments) != len(inputs):
        return None
    return {a.name: value for a, value in zip(schema.arguments, inputs, strict=True)}
