"""What is shown while the compiler runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from opsmith.kernels.compiler import Watch

__all__ = ["shown"]


@contextlib.contextmanager
def shown(title: str, steps: int, watch: Watch | None) -> Iterator[Watch]:
    """The one who watches, or a line on the terminal; nothing where nobody does."""
    if watch is not None or not sys.stderr.isatty():
        yield watch or (lambda done, total, file: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=steps)
        yield lambda done, total, file: bar.update(task, completed=done, total=total)
