"""`opsmith bench-llm`: a decoder's first token and those after it, beside other ways to run the same model."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from opsmith.cli import CommandError, pictures
from opsmith.cli.common import Json, Output, size_of, speedup, time_of, told
from opsmith.cli.llm import AGAINST, DTYPES, FORMATS

LLAMACPP = "OPSMITH_LLAMACPP"


def run(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a .gguf file, gemma, or llama-1b.")
    ],
    format: Annotated[
        list[str] | None,
        typer.Option("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}; may be repeated."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="DTYPE", help="What the model computes in, if not what it is saved in."),
    ] = None,
    prompt: Annotated[int, typer.Option(min=2, help="Tokens of the prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 64,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences at a time; may be repeated.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=2, help="Generate behind so many tokens as well; may be repeated.")
    ] = None,
    against: Annotated[str, typer.Option(metavar="NAMES", help=f"With commas: {', '.join(AGAINST)}.")] = "hf",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each contestant, in turns.")] = 3,
    llamacpp: Annotated[
        Path | None,
        typer.Option(metavar="PYTHON", envvar=LLAMACPP, help="A Python that has llama-cpp-python."),
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves into FILE.")] = None,
    json: Json = None,
) -> None:
    """Time a decoder: seconds to the first token, tokens a second, part of the read roof, memory.

    Each contestant generates in a process of its own, and they run in turns, beside measurements of the read roof.
    Before that each is held to the model's exact logits, in a wider dtype, along its greedy text: an error above twice
    eager's own, beside the exact model with the same rounded weights, is a fault, and nothing is timed.

    Example: opsmith bench-llm gemma --format float32 --format int8 --against hf,llamacpp
    Example: opsmith bench-llm ./my-model --batch 1 --batch 4 --context 2048 --svg curves.svg
    """
    import torch

    from opsmith import measure
    from opsmith.cli.llm import source
    from opsmith.cli.llm.bench import Bench

    output = Output(json)
    others = [name for name in (one.strip() for one in against.split(",")) if name]
    for option, given, known in (("--against", others, AGAINST), ("--format", format or [], FORMATS)):
        if wrong := [name for name in given if name not in known]:
            raise CommandError(f"{option}: {wrong[0]!r} is not known; there are: {', '.join(known)}")
    if dtype is not None and dtype not in DTYPES:
        raise CommandError(f"--dtype: {dtype!r} is not known; there are: {', '.join(DTYPES)}")
    if svg is not None:
        pictures.check_file("--svg", svg)
    python = _python(llamacpp) if "llamacpp" in others else None
    cells = [(b, prompt) for b in dict.fromkeys(batch or [1])]
    cells += [(cells[0][0], c) for c in dict.fromkeys(context or []) if (cells[0][0], c) not in cells]
    with tempfile.TemporaryDirectory(prefix="opsmith-bench-") as workspace:
        with output.console.status("preparing the model"), told():
            found = source.resolve(model, Path(workspace))
        longest = getattr(found.config.get_text_config(), "max_position_embeddings", None)
        if longest and (most := max(length for _, length in cells)) + new_tokens > longest:
            raise CommandError(
                f"{most} tokens and {new_tokens} after them are more than the model's {longest} positions; "
                "name fewer by --prompt, --context and --new-tokens"
            )
        needs = [("--against llamacpp", python is not None), ("--format gguf", "gguf" in (format or []))]
        if found.gguf is None and (what := next((name for name, asked in needs if asked), None)):
            raise CommandError(f"{what}: needs a .gguf file; name one as MODEL, or gemma")
        computed = dtype or str(found.dtype).removeprefix("torch.")
        bench = Bench(output.console, found, Path(workspace), computed, new_tokens, rounds)
        formats = format or [computed]
        with told("bench-llm: ", measure.WrongResult):
            results = bench.run(cells, ["hf", *(o for o in others if o != "hf")], formats, python)
    data = {
        "model": model,
        "dtype": computed,
        "new_tokens": new_tokens,
        "machine": measure.describe().to_json(),
        "versions": {"torch": torch.__version__, **bench.about},
        "cells": results,
    }
    for cell in results:
        _print(output.console, cell)
    if svg is not None:
        pictures.curves(data, svg)
    output.finish(data)


def _python(path: Path | None) -> str:
    """A Python with llama-cpp-python: the one named, that of `make llamacpp`, or this one."""
    made = Path(".venv-llamacpp/bin/python")
    python = str(path or (made.absolute() if made.exists() else sys.executable))
    if shutil.which(python) is None:
        raise CommandError(f"--llamacpp: there is no Python {python}; name one that has llama-cpp-python")
    asked = subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, text=True)
    if asked.returncode:
        raise CommandError(
            f"--against llamacpp: {python} has no llama-cpp-python; run `make llamacpp`, or name a Python that has it "
            f"with --llamacpp or {LLAMACPP}"
        )
    return python


def _print(console: Console, cell: dict[str, Any]) -> None:
    rows = cell["contestants"]
    bases = [name for name in rows if name in AGAINST]
    title = f"batch {cell['batch']}, prompt {cell['prompt']}"
    heads = (title, "first token", "tokens/s", "spread", "of the read roof", "memory", "error")
    table = Table(*heads, *(f"tokens × {base}" for base in bases), box=None, pad_edge=False)
    for name, row in rows.items():
        table.add_row(
            name,
            time_of(row["first_seconds"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['spread']:.0%}",
            f"{row['of_read_roof']:.0%}",
            size_of(row["peak_bytes"]),
            f"{row['error']:.1e}",
            *(speedup(row["ratios"][base]["token"]) if base in row["ratios"] else "" for base in bases),
        )
    console.print(table)
    console.print(f"read roof {cell['read_bandwidth'] / 1e9:.1f} GB/s, measured between the rounds")
    if any(row["of_read_roof"] > 1 for row in rows.values()):
        why = "other work slowed the machine while its roof was measured, or the weights lie in its caches"
        console.print(f"above 100 %: {why}; no such number is a record", style="yellow")
    console.print()
