"""Pictures that commands draw: without a display, the same for the same numbers, of names as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from opsmith.cli import CommandError
from opsmith.cli.common import check_target

_KINDS = (".svg", ".png")


def check_file(option: str, file: Path) -> None:
    """Refuse what cannot be drawn before the work is done, not after it."""
    if file.suffix not in _KINDS:
        raise CommandError(f"{option}: {file} is no {' or '.join(_KINDS)} file; name one")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"{option}: matplotlib draws the picture; pip install 'opsmith[plots]'")
    check_target(option, file)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "opsmith", "svg.fonttype": "none", "font.size": 9, "text.parse_math": False}
    )
    from matplotlib import pyplot

    return pyplot


def save(option: str, figure: Any, file: Path) -> None:
    """Write a figure, and let it go."""
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise CommandError(f"{option}: cannot write {file} ({error.strerror}); name another file") from error
    finally:
        pyplot().close(figure)
