"""`opsmith build`: compile a project's kernels, or pack them into a wheel."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output

if TYPE_CHECKING:
    from rich.console import Console


def run(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FOLDER]", help="A project, as `opsmith new` writes it; only ascend-triton needs none."
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            metavar="cpu|triton|cuda|ascendc|ascend-triton",
            help="Only this one; may be repeated.",
        ),
    ] = None,
    aot: Annotated[
        Path | None,
        typer.Option("--aot", metavar="DIR", help="Write a wheel with built kernels into this folder."),
    ] = None,
    json: Json = None,
) -> None:
    """Compile the kernels of a project: C++ for this CPU, Triton and CUDA for GPUs that need not be here, Ascend C
    for emulation.

    What is built already, known by its content, is not built again. The compiler's first error is shown at
    its line in your file.

    ascend-triton lowers Triton kernels to Linalg for Ascend NPUs, in an environment of its own and kernel by kernel;
    without FOLDER, those of the library. A lowering: neither an NPU nor CANN takes part.

    Example: opsmith build rope_op/
    """
    if backend and "ascend-triton" in backend:
        if backend != ["ascend-triton"] or aot is not None:
            raise CommandError("build: ascend-triton goes alone, as it builds nothing that could be packed")
        _lower(folder, Output(json))
        return
    if folder is None:
        raise CommandError(
            "build: name the folder of a project, as `opsmith new` writes it; only --backend ascend-triton needs none"
        )
    from opsmith.authoring.project.compile import compile_backend, projects_kernels
    from opsmith.authoring.project.wheel import write_wheel
    from opsmith.kernels.build import BuildError

    output = Output(json)
    results: list[dict[str, Any]] = []
    for kernels in projects_kernels(folder):
        chosen = backend or list(kernels.backends())
        if missing := sorted(set(chosen) - set(kernels.backends())):
            there = ", ".join(kernels.backends()) or "none"
            raise CommandError(
                f"build: {kernels.name} has no kernels for {missing[0]!r}; it has kernels for: {there}"
            )
        for one in chosen:
            start = time.perf_counter()
            try:
                made = compile_backend(kernels, one, _steps(output.console))
            except BuildError as error:
                raise _said(output.console, error) from error
            seconds = time.perf_counter() - start
            output.console.print(
                f"{kernels.name}, {one}: {made} ({seconds:.1f} s)", markup=False, soft_wrap=True
            )
            results.append({"operator": kernels.name, "backend": one, "made": made, "seconds": seconds})
    wheel = None
    if aot is not None:
        try:
            wheel = write_wheel(folder, aot, _steps(output.console))
        except BuildError as error:
            raise _said(output.console, error) from error
        except ValueError as error:
            raise CommandError(str(error)) from error
        output.console.print(f"wheel: {wheel}", markup=False, soft_wrap=True)
    output.finish({"built": results, "wheel": wheel})


def _lower(folder: Path | None, output: Output) -> None:
    """The table of what lowers, and of why the rest does not."""
    from opsmith.authoring import lowering
    from opsmith.kernels.build import BuildError

    try:
        results = lowering.lower(folder)
    except BuildError as error:
        raise _said(output.console, error) from error
    output.console.print(lowering.table(results), markup=False, soft_wrap=True)
    output.finish(lowering.report(results))


def _said(console: Console, error: Exception) -> CommandError:
    """The first line as the error; what the compiler shows below it, source line and caret, on the console."""
    first, *below = str(error).splitlines()
    console.print("\n".join(below), style="red", markup=False, soft_wrap=True)
    return CommandError(first.removeprefix("opsmith: "))


def _steps(console: Console) -> Any:
    """Ninja's steps, as it takes them."""
    return lambda done, total, file: console.print(f"[{done}/{total}] {Path(file).name}", markup=False)
