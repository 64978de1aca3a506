"""What other packages bring: the objects that they name under an entry point of ours.

opsmith.operators   operators: modules that register cards when they are imported
opsmith.backends    back ends: objects of `opsmith.backends.Backend`
"""

from __future__ import annotations

import functools
import warnings
from importlib import metadata
from typing import Any


@functools.cache
def load_installed(what: str) -> tuple[Any, ...]:
    """Import the "operators" or "backends" of installed packages, once; returns what their entry points name.

    A package whose import fails is left out with a warning: it must not take the others along.

    >>> load_installed("operators") is load_installed("operators")
    True
    """
    loaded = []
    for point in sorted(metadata.entry_points(group=f"opsmith.{what}"), key=lambda point: point.name):
        try:
            loaded.append(point.load())
        except Exception as error:  # whatever a foreign module raises when it is imported
            warnings.warn(
                f"opsmith: the {what} of {point.value} are left out, as it cannot be imported: "
                f"{type(error).__name__}: {error}; upgrade or uninstall that package",
                RuntimeWarning,
                stacklevel=2,
            )
    return tuple(loaded)
