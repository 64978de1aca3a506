"""`opsmith profile`: where the time of a model folder or of a script goes."""

from __future__ import annotations

import inspect
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output, check_target, told

if TYPE_CHECKING:
    from opsmith.profiler import Profile


def run(
    target: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder, a GGUF file, or a script.py.")
    ],
    phase: Annotated[
        list[str] | None,
        typer.Option(metavar="PHASE", help="prefill, decode, forward, backward or train; may be repeated."),
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one page.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the timeline for Perfetto.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A saved profile to compare with, or a plan to optimize by first."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Run in this dtype.")] = None,
    optimized: Annotated[bool, typer.Option("--optimize", help="Optimize the model first.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the example input.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens in each of them.")] = 128,
    json: Json = None,
) -> None:
    """Profile a model folder on random tokens, or a script: time by operator class, against this machine's roofs.

    What was gathered is kept when the program raises, exits or is interrupted, and is said to be partial.

    Example: opsmith profile ./my-model --phase prefill --phase decode --html profile.html
    """
    from opsmith.profiler.report.text import show

    output = Output(json)
    for option, file in (("--html", html), ("--trace", trace)):
        if file is not None:
            check_target(option, file)
    earlier, plan = _against(against)
    if target.suffix == ".py":
        if phase or plan is not None or optimized or dtype:
            raise CommandError(
                "profile: a script is profiled as it is; --phase, --optimize and a plan need a folder"
            )
        found = _script(target)
    else:
        found = _folder(target, phase, dtype, optimized or plan is not None, plan, batch, length)
    show(found, output.console)
    if earlier is not None:
        output.console.print(f"\nagainst {against}:\n{found.diff(earlier)}")
    if html is not None:
        found.to_html(html)
    if trace is not None:
        found.to_chrome_trace(trace)
    import json as encoder

    output.finish(encoder.loads(found.to_json()))
    if found.partial:
        raise CommandError(f"profile: partial: {found.partial}; what was gathered is above and in the files")


def _against(file: Path | None) -> tuple[Profile | None, Path | None]:
    """A saved profile, or the path of a plan: the two tell themselves apart."""
    if file is None:
        return None, None
    from opsmith.compiler import Plan
    from opsmith.profiler import Profile

    with suppress(ValueError):
        Plan.load(file)
        return None, file
    with told():
        earlier = Profile.load(file)
    return earlier, None


def _script(file: Path) -> Profile:
    import opsmith
    from opsmith.compiler.meanwhile import meanwhile

    if not file.is_file():
        raise CommandError(f"profile: there is no script {file}")
    recording = opsmith.profile(name=file.name)
    argv = meanwhile([sys], "argv", [str(file)])
    path = meanwhile([sys], "path", [str(file.parent.resolve()), *sys.path])
    with argv, path, suppress(Exception, KeyboardInterrupt, SystemExit), recording:  # the profile says so
        runpy.run_path(str(file), run_name="__main__")
    return recording.profile  # type: ignore[no-any-return]


def _folder(
    folder: Path,
    phases: list[str] | None,
    dtype: str | None,
    optimized: bool,
    plan: Path | None,
    batch: int,
    length: int,
) -> Profile:
    import opsmith
    from opsmith.cli import hf

    with told("profile: "):
        model = hf.read(folder)
        tokens: dict[str, Any] = dict(hf.tokens(model.config, batch, length, 0))
    if dtype is not None and not optimized:
        import torch

        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise CommandError(
                f"profile: --dtype: PyTorch has no dtype {dtype!r} of floats; name one, as bfloat16"
            )
        model.to(found)
    with told(), told(refusal=TypeError):
        if optimized:
            opsmith.optimize(model, tokens, dtype=dtype, plan=plan)
        causal = "past_key_values" in inspect.signature(model.forward).parameters
        wanted = phases or (["prefill", "decode"] if causal else ["forward"])
        result: Profile = opsmith.profile(model, tokens, phase=wanted, name=folder.name)
    return result
