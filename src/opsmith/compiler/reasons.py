"""Why something takes no part, in words."""

from __future__ import annotations


def raised(error: Exception) -> str:
    """An exception as a reason: its kind and the first line of what it says."""
    lines = str(error).strip().splitlines() or [""]
    return f"raised {type(error).__name__}: {lines[0][:120]}"
