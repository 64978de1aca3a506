"""Decoding in Hugging Face models: `PagedCache`, and opsmith's attention and experts for their registries."""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from opsmith.decoding.cache import PagedCache as PagedCache

NAME = "opsmith"  # of the attention and its masks, and of the experts


class Unserved(Exception):
    """A model asks its cache for more than to hold keys and values."""


class NoState:
    """A cache that is the same at each call."""


class Laid(Protocol):
    """What is laid down for the layers of a model beside what passes through its graph: slots, tables, lengths."""

    def fixed(self) -> Hashable | None:
        """What of it is no tensor's numbers, memory included; None for a call that is like no other."""

    def tensors(self) -> list[torch.Tensor]:
        """Those of this call alone."""

    def of(self, tensors: list[torch.Tensor]) -> AbstractContextManager[None]:
        """Lay down the same with other tensors in the place of those."""


class _Call(threading.local):
    laid: Laid | None = None


call = _Call()


@contextmanager
def laying(laid: Laid) -> Iterator[None]:
    """Lay down what the layers find when the model runs, in this thread."""
    before, call.laid = call.laid, laid
    try:
        yield
    finally:
        call.laid = before


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
