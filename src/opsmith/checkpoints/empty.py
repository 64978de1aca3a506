"""Models of transformers without numbers, and giving them theirs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from opsmith.checkpoints.folder import quiet
from opsmith.checkpoints.header import CheckpointError


def model_of(config: Any, dtype: torch.dtype) -> Any:
    """The decoder of a configuration, whose parameters take no memory.

    Raises:
        CheckpointError: accelerate is not installed.
    """
    try:
        import transformers
        from accelerate import init_empty_weights
    except ImportError as error:
        raise CheckpointError(f'{error.name} is not installed: pip install "opsmith[llm]"') from error
    config.dtype = dtype
    with quiet(), init_empty_weights(include_buffers=False):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def put(model: nn.Module, path: str, what: nn.Module | nn.Parameter) -> None:
    """A module or a parameter at a place of a model."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, what)
