"""Which of Dynamo's guards are asked for a model that its owner promised not to change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from opsmith.compiler.modules.latent.site import Switch


def keep_input_guards(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on a call's inputs and on PyTorch's own state; ask nothing about the model and the code.

    A `guard_filter_fn` of `torch.compile`: for a model whose code, attributes, mode (`train`, `eval`), hooks,
    submodules and parameters' dtypes, devices and `requires_grad` stay as they are. Other shapes, dtypes or devices
    of inputs, gradients switched on or off, and autocast are noticed as ever.

    >>> fast = torch.compile(model, backend="opsmith", options={"guard_filter_fn": opsmith.keep_input_guards})

    Args:
        guards: what Dynamo would ask before every call (`GuardFilterEntry`: name, type, value).

    Returns:
        For each guard whether it is asked.

    Source: "Reducing Guard Overhead" in PyTorch's documentation of `torch.compile`.
    """
    modules = (g.name for g in guards if g.has_value and isinstance(g.value, nn.Module))
    models = {name for name in modules if name.isidentifier()}
    about_a_model = re.compile(rf"\b({'|'.join(map(re.escape, models))})\b") if models else None
    # Latent attention is switched on for each call that it serves: no attribute that a user sets.
    ours = tuple(f"{g.name}." for g in guards if g.has_value and isinstance(g.value, Switch))
    return [
        bool(ours and g.name.startswith(ours))
        or not (g.is_global or (about_a_model is not None and about_a_model.search(g.name)))
        for g in guards
    ]
