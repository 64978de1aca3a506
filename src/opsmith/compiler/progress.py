"""What takes long, said on a terminal while it lasts; the log `opsmith` says afterwards what it was."""

from __future__ import annotations

import sys

_WIDTH = 72


def show(what: str = "") -> None:
    """Write one line in place of the one before; nothing takes it away."""
    if sys.stderr.isatty():
        line = f"opsmith: {what}" if what else ""
        sys.stderr.write(f"\r{line[:_WIDTH]:<{_WIDTH}}" + ("" if line else "\r"))
        sys.stderr.flush()
