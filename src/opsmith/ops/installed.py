"""Operators of other packages: those that an installed package names under the entry points `opsmith.operators`."""

from __future__ import annotations

import functools
import warnings
from importlib import metadata

__all__ = ["GROUP", "load_installed"]

GROUP = "opsmith.operators"


@functools.cache
def load_installed() -> tuple[str, ...]:
    """Import the operators of installed packages, once, which registers their cards; returns the entry points' names.

    A package whose import fails is left out with a warning: it must not take the others along.

    >>> load_installed() is load_installed()
    True
    """
    loaded = []
    for point in sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name):
        try:
            point.load()
        except Exception as error:  # whatever a foreign module raises when it is imported
            warnings.warn(
                f"opsmith: the operators of {point.value} are left out, as it cannot be imported: "
                f"{type(error).__name__}: {error}; upgrade or uninstall that package",
                RuntimeWarning,
                stacklevel=2,
            )
        else:
            loaded.append(point.name)
    return tuple(loaded)
