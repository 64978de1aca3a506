"""Texts as tokens: what a caller gives as text or ids, and the tokenizer of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def token_ids(name: str, given: Any) -> torch.Tensor:
    """Ids as [texts, tokens] int64.

    Raises:
        TypeError: for what holds no integers.
    """
    try:
        ids = torch.as_tensor(given)
        ids = ids if ids.numel() else ids.long()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a text or ids, got {type(given).__name__}") from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.dim() not in (1, 2):
        raise TypeError(
            f"{name}: ids must be integers [tokens] or [texts, tokens], got {ids.dtype} {tuple(ids.shape)}"
        )
    ids = ids.to("cpu", torch.int64)
    return ids if ids.dim() == 2 else ids[None]


def tokenizer_of(name: str, model: nn.Module) -> Any:
    """The tokenizer that lies where the model was loaded from.

    Raises:
        ValueError: where there is none.
    """
    where = getattr(model, "name_or_path", "")
    help = "give tokenizer=..., or ids instead of a text"
    if not where:
        raise ValueError(f"{name}: the model does not say where its tokenizer is; {help}")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(where, local_files_only=True)
    except Exception as error:  # transformers raises whatever a damaged or missing file leads to
        raise ValueError(f"{name}: no tokenizer was found in {where}; {help}") from error
