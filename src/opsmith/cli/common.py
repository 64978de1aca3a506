"""What the verbs share: choosing operators, and printing for people or for machines."""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from opsmith.cli import CommandError
from opsmith.files import written

if TYPE_CHECKING:
    import torch

    from opsmith.measure import Ratio
    from opsmith.operator import Operator

Json = Annotated[
    str | None, typer.Option("--json", metavar="[FILE]", help="Print JSON for machines, or write it to FILE.")
]
Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME|FOLDER", help="Operators, as `opsmith ops` lists them, or projects' folders."
    ),
]
All = Annotated[bool, typer.Option("--all", help="Every operator.")]

Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", metavar="DTYPE", help="Only this dtype; may be repeated.")
]


class Output:
    """Tables for people on `console`; the same result as JSON where `--json` asked for it.

    JSON on stdout stands there alone, with the console quiet; JSON in a file leaves the console as it is.
    """

    def __init__(self, json_to: str | None):
        self.json_to = json_to
        if json_to is not None and json_to != "-":
            check_target("--json", Path(json_to))
        width = None if sys.stdout.isatty() else 240  # a file or pipe has none: as the widest table
        self.console = Console(quiet=json_to == "-", highlight=False, markup=False, width=width)

    def keep(self, data: Any) -> None:
        """Write into a file what there is so far: who stops long work loses nothing of it."""
        if self.json_to != "-":
            self.finish(data)

    def finish(self, data: Any) -> None:
        """Write the JSON, where it was asked for."""
        if self.json_to is None:
            return
        text = json.dumps(_plain(data), indent=2, allow_nan=False)
        if self.json_to == "-":
            print(text)
            return
        with told():
            written("--json", text + "\n", self.json_to)


@contextlib.contextmanager
def told(head: str = "", refusal: type[Exception] = ValueError) -> Iterator[None]:
    """What is refused inside becomes the command's one line, behind `head`."""
    try:
        yield
    except refusal as error:
        raise CommandError(f"{head}{error}") from error


def check_target(option: str, file: Path) -> None:
    """Refuse a file that cannot be written before the work is done, not after it."""
    if file.is_dir():
        raise CommandError(f"{option}: {file} is a folder; name a file in it")
    if not file.parent.is_dir():
        raise CommandError(
            f"{option}: cannot write {file} (there is no folder {file.parent}); name another file"
        )
    place = file.resolve()
    if not os.access(place if place.exists() and not place.is_file() else place.parent, os.W_OK):
        raise CommandError(f"{option}: cannot write {file} (permission denied); name another file")


def _plain(value: Any) -> Any:
    """The same data in JSON's own types; infinities and NaN, which it lacks, become null."""
    if hasattr(value, "to_json"):  # what was measured says itself what is plain of it
        return _plain(value.to_json())
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def speedup(ratio: Ratio) -> str:
    """How many times faster, paired by round, with its interval."""
    return f"{ratio.speedup:.2f} [{1 / ratio.hi:.2f}, {1 / ratio.lo:.2f}] {ratio.verdict}"


def time_of(seconds: float) -> str:
    """Seconds with three digits: `12.3 ms`."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def size_of(count: int) -> str:
    """Bytes with three digits: `3 MiB`."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.3g} {unit}"
    return f"{count} B"


def choose(names: list[str] | None, everything: bool) -> list[Operator]:
    """The cards of the named operators, those of a named project, or all; anything else is an error that lists what
    there is. A project's code runs because its folder was named."""
    import opsmith.ops  # noqa: F401  (its cards register themselves)
    from opsmith.installed import load_installed
    from opsmith.operator import registry

    load_installed("operators")
    cards = registry()
    if found := {name: _project(name) for name in folders(names) if name not in cards}:
        names = [one for name in names or () for one in found.get(name, [name])]
        cards = registry()
    if everything:
        if names:
            raise CommandError("give names or --all, not both")
        return list(cards.values())
    if not names:
        raise CommandError(f"name an operator, or say --all; there are: {', '.join(cards)}")
    for name in names:
        if name not in cards:
            there = [*cards, *(sorted(file.parent.name for file in Path().glob("*/operator.py")))]
            close = difflib.get_close_matches(name, there, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(there)}"
            raise CommandError(f"no operator, and no folder with an operator.py, is called {name!r}; {hint}")
    return [cards[name] for name in names]


def folders(names: list[str] | None) -> list[str]:
    """Those that are written as a path, or name a folder with an operator.py here."""
    return [n for n in names or () if "/" in n or n == "." or Path(n, "operator.py").is_file()]


def _project(folder: str) -> list[str]:
    """The names of a project's operators, which it registers."""
    from opsmith.authoring.project import cards_of, load

    with told():
        found = [card.name for card in cards_of(load(folder))]
    if not found:
        raise CommandError(
            f"{folder}: operator.py registers no operator; make a card there, as `opsmith new` does"
        )
    return found


def dtypes_of(card: Operator, names: list[str] | None) -> list[torch.dtype]:
    """The dtypes of a card, or those of them that were asked for; an unknown one is an error."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in card.dtypes}
    for name in names or ():
        if name not in known:
            raise CommandError(f"{card.name} takes no {name!r}; it takes {', '.join(known)}")
    return [known[name] for name in names or known]


def _device_of(name: str) -> str:
    """The device of that name; one that is not here is an error."""
    import torch

    from opsmith import backends

    known = ("cpu", "cuda", *(one.device for one in backends.installed().values()))
    if name not in known:
        raise CommandError(f"--device: no device is called {name!r}; there are: {', '.join(known)}")
    if (other := backends.taking(name)) and (why := other.here()) is not True:
        raise CommandError(f"--device: {why}")
    if name == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device: this PyTorch finds no GPU; leave --device out, or see `opsmith doctor`")
    return name


Device = Annotated[
    str, typer.Option(metavar="cpu|cuda", help="Where the operators run.", callback=_device_of)
]
