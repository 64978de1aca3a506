"""`opsmith new`: a project for an operator, from its prototype."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from opsmith.backends import OWN, installed
from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output


def run(
    prototype: Annotated[Path, typer.Argument(metavar="PROTOTYPE.json", help="The operator's prototype.")],
    op: Annotated[
        str | None, typer.Option(metavar="NAME", help="The operator, where the file holds several.")
    ] = None,
    backends: Annotated[
        str, typer.Option(metavar=",".join((*OWN, *installed())), help="What kernels are for.")
    ] = "cpu,triton",
    folder: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="The folder to make.")
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="The definition, where the prototype has no formula."),
    ] = None,
    backward: Annotated[
        bool,
        typer.Option("--backward", help="Begin a gradient kernel to write by hand, if none can be derived."),
    ] = False,
    json: Json = None,
) -> None:
    """Write a project: card, kernels that compute the prototype's formula, test, benchmark.

    Nothing is left to fill in for it to build and pass, and nothing is ever overwritten.

    Example: opsmith new rope.json --backends cpu,triton -o rope_op
    """
    from opsmith.authoring.formula import FormulaError
    from opsmith.authoring.new import create

    output = Output(json)
    chosen = [b.strip() for b in backends.split(",") if b.strip()]
    try:
        made, files, notes = create(
            prototype, folder, op=op, backends=chosen, reference=reference, by_hand=backward
        )
    except FormulaError as wrong:
        first, *picture = str(wrong).splitlines()
        for line in picture:
            print(line, file=sys.stderr)
        raise CommandError(f"{prototype}: {first}") from wrong
    except ValueError as wrong:
        raise CommandError(str(wrong)) from wrong
    except OSError as wrong:
        raise CommandError(
            f"{wrong.filename or prototype}: {wrong.strerror}; name another file or folder"
        ) from wrong
    for line in (*map(str, files), *notes):
        output.console.print(line, soft_wrap=True)
    steps = [f"opsmith {verb} {made}" for verb in ("build", "verify", "bench")]
    output.console.print(f"Next: {'; '.join(steps)}", soft_wrap=True)
    output.finish({"folder": str(made), "files": list(map(str, files)), "notes": notes})
