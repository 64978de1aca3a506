"""Decoding in Hugging Face models: `PagedCache`, and opsmith's attention and experts for their registries."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opsmith.decoding.cache import PagedCache as PagedCache

NAME = "opsmith"  # of the attention and its masks, and of the experts


class Unserved(Exception):
    """A model asks its cache for more than to hold keys and values."""


class NoState:
    """A cache that is the same at each call."""


def attend(*args: Any, **kwargs: Any) -> Any:
    """What transformers calls: see `opsmith.decoding.attention.attend`."""
    from opsmith.decoding.attention import attend as attended

    return attended(*args, **kwargs)


def mask(*args: Any, **kwargs: Any) -> Any:
    """What transformers calls: see `opsmith.decoding.attention.mask`."""
    from opsmith.decoding.attention import mask as made

    return made(*args, **kwargs)


def mix(*args: Any, **kwargs: Any) -> Any:
    """What transformers calls: see `opsmith.decoding.experts.mixed`."""
    from opsmith.decoding.experts import mixed

    return mixed(*args, **kwargs)


def register(wanted: bool = False) -> None:
    """Tell transformers of opsmith's attention and experts: where it is loaded, or wanted. Loading it takes seconds."""
    if not wanted and "transformers" not in sys.modules:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, mix)
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def __getattr__(name: str) -> Any:
    if name != "PagedCache":
        raise AttributeError(f"module 'opsmith.decoding' has no attribute {name!r}")
    try:
        register(wanted=True)
    except ImportError as error:
        raise ImportError(
            "opsmith.PagedCache is a cache for models of transformers: pip install opsmith[hf]"
        ) from error
    from opsmith.decoding.cache import PagedCache

    return PagedCache
