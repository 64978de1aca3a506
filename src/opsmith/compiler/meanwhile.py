"""Attributes that are others for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def meanwhile(objects: Iterable[Any], name: str, value: Any) -> Iterator[None]:
    """Give objects another value of an attribute, and then each its own again."""
    before = [(one, getattr(one, name)) for one in objects]
    try:
        for one, _ in before:
            setattr(one, name, value)
        yield
    finally:
        for one, own in before:
            setattr(one, name, own)
