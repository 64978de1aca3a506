"""`opsmith build`: compile a project's kernels, or pack them into a wheel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from opsmith import backends
from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output, told


def _targets() -> dict[str, backends.Backend]:
    """What back ends make beside kernels, and who makes it."""
    return {target: one for one in backends.installed().values() for target in one.targets}


def _without() -> str:
    targets = " or ".join(_targets())
    return f"; only --backend {targets} needs none" if targets else ""


def run(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help=f"A project, as `opsmith new` writes it{_without()}."),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="|".join((*backends.OWN, *backends.installed(), *_targets())),
            help="Only this one; may be repeated.",
        ),
    ] = None,
    aot: Annotated[
        Path | None,
        typer.Option("--aot", metavar="DIR", help="Write a wheel with built kernels into this folder."),
    ] = None,
    json: Json = None,
) -> None:
    """Compile the kernels of a project: C++ for this CPU, Triton and CUDA for GPUs that need not be here, those of
    further back ends as far as these can here.

    What is built already, known by its content, is not built again. The compiler's first error is shown at
    its line in your file.

    Example: opsmith build rope_op/
    """
    known = (*backends.OWN, *backends.installed())
    for target in [one for one in backend or () if one in _targets()]:
        if backend != [target] or aot is not None:
            raise CommandError(f"build: {target} goes alone, as it builds nothing that could be packed")
        output = Output(json)
        with _said(output.console):
            text, data = _targets()[target].make(target, folder)
        output.console.print(text, soft_wrap=True)
        output.finish(data)
        return
    if unknown := [one for one in backend or () if one not in known]:
        raise CommandError(f"build: {backends.missing(unknown[0])}")
    if folder is None:
        raise CommandError(f"build: name the folder of a project, as `opsmith new` writes it{_without()}")
    from opsmith.authoring.project.compile import compile_backend, projects_kernels, tool_missing
    from opsmith.authoring.project.wheel import write_wheel

    output = Output(json)
    results: list[dict[str, Any]] = []
    with told():
        declared = projects_kernels(folder)
    for kernels in declared:
        chosen = backend or [*kernels.backends(), *kernels.lost()]  # which are then missed
        for other in sorted((kernels.folder / "kernels").glob("[a-z]*/")):
            if other.name not in known:
                output.console.print(f"{other} is left out: {backends.missing(other.name)}")
        if missing := sorted(set(chosen) - set(kernels.backends())):
            there = f"{', '.join(kernels.backends()) or 'none'}; looked in {kernels.folder / 'kernels'}"
            raise CommandError(
                f"build: {kernels.name} has no kernels for {missing[0]!r}; it has kernels for: {there}"
            )
        for one in chosen:
            if not backend and (why := tool_missing(one)):
                output.console.print(f"{kernels.name}, {one}, is left out: {why}", style="yellow")
                continue
            start = time.perf_counter()
            with _said(output.console):
                made = compile_backend(kernels, one, _steps(output.console))
            seconds = time.perf_counter() - start
            output.console.print(f"{kernels.name}, {one}: {made} ({seconds:.1f} s)", soft_wrap=True)
            results.append({"operator": kernels.name, "backend": one, "made": made, "seconds": seconds})
    wheel = None
    if aot is not None:
        with _said(output.console), told():
            wheel = write_wheel(folder, aot, _steps(output.console))
        output.console.print(f"wheel: {wheel}", soft_wrap=True)
    output.finish({"built": results, "wheel": wheel})


@contextlib.contextmanager
def _said(console: Console) -> Iterator[None]:
    """A failed build's first line as the error; what the compiler shows below it, source and caret, on the console."""
    from opsmith.kernels.build import BuildError

    try:
        yield
    except BuildError as error:
        first, *below = str(error).splitlines()
        console.print("\n".join(below), style="red", soft_wrap=True)
        raise CommandError(first.removeprefix("opsmith: ")) from error


def _steps(console: Console) -> Any:
    """Ninja's steps, as it takes them."""
    return lambda done, total, file: console.print(f"[{done}/{total}] {Path(file).name}")
