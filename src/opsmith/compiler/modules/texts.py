"""Texts as tokens: what a caller gives as text or ids, and the tokenizer of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def beginning_and_rows(
    name: str, model: nn.Module, given: Any, tokenizer: Any = None
) -> tuple[Tensor, Tensor]:
    """Ids that every text begins with, none in front of ids that are given, and the others as [texts, tokens].

    Raises:
        TypeError, ValueError: for what is neither a text nor ids, and where a text's tokenizer is not found.
    """
    if not isinstance(given, str):
        return torch.empty(0, dtype=torch.int64), token_ids(name, given)
    tokenizer = tokenizer if tokenizer is not None else tokenizer_of(name, model)
    start = list(tokenizer("").input_ids)
    rows = torch.tensor([tokenizer(given).input_ids[len(start) :]])
    return torch.tensor(start, dtype=torch.int64), rows


def token_ids(name: str, given: Any) -> Tensor:
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
