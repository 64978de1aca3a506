"""Models of transformers without numbers, and giving them theirs."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from opsmith.checkpoints.folder import quiet
from opsmith.checkpoints.header import CheckpointError
from opsmith.compiler.modules.mixtures import choose
from opsmith.ops import PackedExperts


def model_of(config: Any, dtype: torch.dtype) -> Any:
    """The decoder of a configuration, whose parameters take no memory."""
    config.dtype = dtype
    return empty(lambda: import_module("transformers").AutoModelForCausalLM.from_config(config, dtype=dtype))


def empty(make: Callable[[], Any]) -> Any:
    """A model of transformers as it is made, but for its parameters, which take no memory.

    Raises:
        CheckpointError: accelerate is not installed.
    """
    try:
        from accelerate import init_empty_weights
    except ImportError as error:
        raise CheckpointError(f'{error.name} is not installed: pip install "opsmith[llm]"') from error
    with quiet(), init_empty_weights(include_buffers=False):
        return make()


def put_experts(model: Any, path: str, gate_up: Any, down: Any) -> None:
    """The weights of a mixture; where they are packed, nobody but opsmith computes it."""
    for name, what in (("gate_up_proj", gate_up), ("down_proj", down)):
        delattr(model.get_submodule(path), name)  # a parameter, in whose place no module is put
        put(model, f"{path}.{name}", what)
    if isinstance(gate_up, PackedExperts):
        choose(model)


def put(model: nn.Module, path: str, what: nn.Module | nn.Parameter) -> None:
    """A module or a parameter at a place of a model."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, what)
