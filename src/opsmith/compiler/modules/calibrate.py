"""What the inputs of a model's linear layers are like on a text that its user gives."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.compiler.modules.linear_layers import as_linear
from opsmith.compiler.modules.texts import beginning_and_rows
from opsmith.ops.packed_linear.inputs import Inputs

_WINDOW = 512  # tokens that are read together
_MEMORY = 1 << 30  # bytes of sums that are gathered at a time

Calls = list[dict[str, Any]]


def calls_of(model: nn.Module, calibration: Any, tokenizer: Any = None) -> Calls:
    """Calls of a model by a caller's texts, ids, or inputs as a dictionary; or several of one kind.

    A text needs a tokenizer: the model's own, by its `name_or_path`, where none is given.

    Raises:
        TypeError, ValueError: for what is none of these, or holds nothing.
    """
    calls = [call for one in _several(calibration) for call in _calls(model, one, tokenizer)]
    if not calls:
        raise ValueError("calibration: there is no token in it; give some thousand tokens of text")
    return calls


def _several(calibration: Any) -> list[Any]:
    one = isinstance(calibration, str | Mapping | Tensor) or not isinstance(calibration, Sequence)
    return [calibration] if one or all(isinstance(t, int) for t in calibration) else list(calibration)


def _calls(model: nn.Module, given: Any, tokenizer: Any) -> Iterator[dict[str, Any]]:
    if isinstance(given, Mapping):
        yield dict(given)
        return
    before, rows = beginning_and_rows("calibration", model, given, tokenizer)
    for part in (part for row in rows for part in row.split(_WINDOW - len(before)) if len(part)):
        yield {"input_ids": torch.cat((before, part))[None]}


def gathered(model: nn.Module, calls: Calls, layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Inputs]]:
    """The inputs of layers by name, some layers at a time; those that no token reaches are left out.

    Layer by layer as a model is rounded: what is behind sees what rounding did before. Sums over inputs are as large as
    a layer is wide, squared. So they are gathered for some layers in a row, as many as memory should hold; these are
    rounded, and the model reads the text again for the next ones.
    """
    batch: dict[nn.Module, str] = {}
    held = 0
    for name, layer in layers.items():
        size = 4 * as_linear(layer).in_features ** 2
        if batch and held + size > _MEMORY:
            yield _gather(model, calls, batch)
            batch, held = {}, 0
        batch[layer] = name
        held += size
    if batch:
        yield _gather(model, calls, batch)


def _gather(model: nn.Module, calls: Calls, names: Mapping[nn.Module, str]) -> dict[str, Inputs]:
    found: dict[str, Inputs] = {}
    last: tuple[Any, Inputs | None] = (None, None)

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal last
        if not args:  # given by name, as nobody gives the input of a linear layer
            return
        name, x = names[module], args[0]
        # Queries, keys and values have one input, and so one sum.
        if last[1] is not None and x is last[0] and found.setdefault(name, last[1]) is last[1]:
            return
        if name not in found:
            found[name] = Inputs(x.shape[-1], x.device)
        found[name].add(x)
        last = (x, found[name])

    device = next(p.device for p in model.parameters())
    options = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # the output layer is packed without
    with ExitStack() as hooks, torch.no_grad():
        for layer in names:
            hooks.enter_context(layer.register_forward_pre_hook(look))
        for call in calls:
            here = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in call.items()}
            try:
                model._call_impl(**options | here)
            except Exception as error:  # any exception of a user's model is the answer here
                raise ValueError(f"calibration: the model does not take it: {error}") from error
            last = (None, None)
    return found
