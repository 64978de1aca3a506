"""`opsmith optimize`: a local Hugging Face model, made faster, proved and timed."""

from __future__ import annotations

import copy
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output, check_target, told

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn

    from opsmith.cli.models import Batch, Error
    from opsmith.compiler.session import Session

# A float64 copy of the model may take this part of the memory.
_MEMORY_SHARE = 0.4
_ROUNDS = 3  # of a model that writes


def run(
    path: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE.gguf", help="What save_pretrained wrote, or a GGUF file.")
    ],
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="Run in this dtype.")] = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Pack linear weights: bf16, int8, int8_dynamic or int4."),
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="An opsmith.toml.")] = None,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan there.")] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop then; the rest runs as it was.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in the example input.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens in each of them.")] = 128,
    new: Annotated[
        int, typer.Option("--new-tokens", min=0, help="A decoder writes so many, timed too; 0 for none.")
    ] = 16,
    json: Json = None,
) -> None:
    """Optimize the model in a Hugging Face folder on random tokens: what is found, chosen, proved, gained.

    Nothing is downloaded, no code from the folder runs, and the folder stays as it is.

    With --quantize the result differs from eager's by what rounding the weights takes: both errors against float64 are
    printed, and eager runs on the weights as they were.

    Example: opsmith optimize ./my-model --dtype bfloat16 --quantize int8 --plan plan.json
    """
    import torch

    import opsmith
    from opsmith import measure
    from opsmith.cli import hf, models

    output = Output(json)
    console = output.console
    if plan is not None:
        check_target("--plan", plan)
    with told():
        settings = opsmith.Config.load(config) if config is not None else opsmith.Config()
    with console.status("loading the model"), told("optimize: "):
        model = hf.read(path)
        examples = [hf.tokens(model.config, batch, length, seed) for seed in range(3)]
    writes = new > 1 and model.can_generate()
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if writes and most and new >= most:
        raise CommandError(f"--new-tokens {new} leaves no prompt in the model's {most} positions; name fewer")
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{type(model).__name__}, {parameters / 1e6:.1f} million parameters")
    with torch.no_grad():
        exact, without = _exact(model, examples[0], parameters)
        if without:
            console.print(without, style="yellow")
        # For eager: modules of its own, in which nothing will be packed, on the same tensors.
        original = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
        start = time.perf_counter()
        with told():
            opsmith.optimize(
                model, dict(examples[0]), config=settings, dtype=dtype, quantize=quantize, budget=budget
            )
        seconds = time.perf_counter() - start
        session: Any = model.opsmith
        console.print(f"optimized in {seconds:.1f} s")
        models.print_sites(console, session)
        calls = {models.EAGER: partial(_result, original), models.OPSMITH: partial(_result, model)}
        format = session.config.quantize
        errors = {}
        if exact is not None:
            errors = {name: models.error_of(call(examples[0]), exact) for name, call in calls.items()}
            for name, error in errors.items():
                console.print(
                    f"{name}: relative error {error.rms:.2e} against float64, largest {error.worst:.2e}, "
                    f"cosine similarity at least {error.cosine:.9f}"
                )
        try:
            if format is not None and exact is not None:
                with console.status("checking"):
                    _check(model, original, examples[0], errors[models.EAGER])
            with console.status("timing"):
                result = models.race(calls, examples, None if format else exact, _dtype_of(original))
        except measure.WrongResult as wrong:
            raise CommandError(f"optimize: {wrong}; nothing was saved") from wrong
    shape = f"{batch}×{length}"
    title = str(_dtype_of(original)).removeprefix("torch.") + (f", {format} weights" if format else "")
    models.print_times(console, title, {shape: result})
    writing = {}
    if writes:
        with console.status("generating"):
            ids = examples[0]["input_ids"][:, : most and most - new]
            writing = _written(console, original, model, ids, new)
    if plan is not None:
        console.print(f"plan saved to {session.plan.save(plan)}")
    output.finish(
        {
            "model": type(model).__name__,
            "parameters": parameters,
            **models.outcome(session, errors, {shape: result}),
            "quantize": format,
            "generate": writing,
            "seconds": seconds,
            "machine": measure.describe().to_json(),
        }
    )


def _exact(model: nn.Module, tokens: Batch, parameters: int) -> tuple[torch.Tensor | None, str]:
    """The float64 result, or None and the reason."""
    from opsmith import measure

    needed, memory = 8 * parameters, measure.describe().memory_bytes
    if memory and needed > _MEMORY_SHARE * memory:
        return None, (
            f"not held against float64 as a whole: a copy would take {needed / 2**30:.1f} GiB of "
            f"{memory / 2**30:.1f}; each operator was"
        )
    return _result(copy.deepcopy(model).double(), tokens), ""


def _written(console: Console, original: Any, model: Any, ids: torch.Tensor, new: int) -> dict[str, Any]:
    """What eager and opsmith take to write behind a prompt, in turns: for the first token, and for one more."""
    from opsmith import measure
    from opsmith.cli.common import speedup, time_of
    from opsmith.cli.llm.generator import generate

    turns = [[generate(one, ids, new) for one in (original, model)] for _ in range(1 + _ROUNDS)]
    eager, ours = (
        {"first": [run.first for run in runs], "token": [statistics.median(run.steps) for run in runs]}
        for runs in zip(*turns[1:], strict=True)  # in the first of them sizes are captured
    )
    ratios = {what: measure.paired_ratio("opsmith", "eager", ours[what], eager[what]) for what in ours}
    median = statistics.median
    console.print(
        f"writes {1 / median(ours['token']):.1f} tokens/s, eager {1 / median(eager['token']):.1f}: "
        f"{speedup(ratios['token'])}; the first after {time_of(median(ours['first']))}, eager's after "
        f"{time_of(median(eager['first']))}"
    )
    seconds = {"eager": eager, "opsmith": ours}
    return {"seconds": seconds, "ratios": {what: ratio.to_json() for what, ratio in ratios.items()}}


def _check(model: nn.Module, original: nn.Module, tokens: Batch, eager: Error) -> None:
    """Hold an optimized model to the exact one with its weights as they were rounded."""
    import torch

    from opsmith import measure
    from opsmith.cli import models

    wide, session = copy.deepcopy(original).double(), cast("Session", model.opsmith)
    rounding = session.packing.unpack(wide, torch.float64)
    exact = _result(wide, tokens)
    with models.rounding_rows(rounding):
        rows = models.error_of(_result(wide, tokens), exact).rms
    allowed = models.allowed(eager, _dtype_of(original)) + 2 * rows
    error = models.error_of(_result(model, tokens), exact).rms
    if not error <= allowed:
        detail = f"relative error {error:.2e} against float64 with the rounded weights, allowed {allowed:.2e}"
        raise measure.WrongResult(models.OPSMITH, "wrong value", detail, error, allowed)


def _result(call: Any, tokens: Batch) -> torch.Tensor:
    """Logits where the model has them, else its last hidden states."""
    output = call(**tokens)
    first: torch.Tensor = output[0] if "logits" not in output else output.logits
    return first


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
