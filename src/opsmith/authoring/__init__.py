"""From a prototype to an operator: what a person writes is a signature and a formula; the rest is generated."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`load`, without which `opsmith new` starts in a tenth of the time: it needs no torch."""
    if name == "load":
        from opsmith.authoring.project import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
