"""`opsmith bench`: verify operators, then time them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from opsmith.cli import CommandError, pictures
from opsmith.cli.common import (
    All,
    Device,
    Dtypes,
    Json,
    Names,
    Output,
    choose,
    dtypes_of,
    folders,
    size_of,
    speedup,
    time_of,
    told,
)

if TYPE_CHECKING:
    from opsmith.proof.bench import Benchmark

_USUAL = ("float32", "bfloat16")  # of those that an operator takes; all of them where it takes neither


def run(
    names: Names = None,
    everything: All = False,
    dtype: Dtypes = None,
    device: Device = "cpu",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Baselines, with commas: reference, eager, compile, liger (GPU). "
            "By default eager and compile, and for a project reference too.",
        ),
    ] = None,
    backward: Annotated[bool, typer.Option("--backward/--no-backward", help="Time gradients too.")] = True,
    seconds: Annotated[float, typer.Option(min=0.01, help="For each comparison.")] = 0.5,
    shape: Annotated[
        str | None,
        typer.Option(metavar="CALL", help="Time this call of one operator, as a profile spells it."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Verify values, out= and gradients only before timing.")
    ] = False,
    roofline: Annotated[
        str | None, typer.Option(metavar="FILE", help="Draw a roofline into FILE (.svg or .png).")
    ] = None,
    json: Json = None,
) -> None:
    """Verify operators, then time them, forward and backward, against eager and torch.compile.

    What does not verify is not timed: values, gradients, races, schemas, torch.compile, as `opsmith verify` has them.
    Contestants run interleaved, beside probes of what memory and matmul reach at that moment: roof is the
    part of it that was reached. Float32 and bfloat16, where the operator takes them, unless --dtype says otherwise.

    The file of --json is written after each operator, for runs that are stopped; `left` names those to come.

    Example: opsmith bench softmax --dtype bfloat16
    Example: opsmith bench rms_norm --shape "x=float32[1,128,512] weight=float32[512]"
    """
    from opsmith.measure import WrongResult
    from opsmith.proof import baselines
    from opsmith.proof.bench import AGAINST, bench
    from opsmith.proof.replay import sample_of

    output = Output(json)
    usual = AGAINST if against is None else tuple(n.strip() for n in against.split(",") if n.strip())
    with told("--against: "):
        baselines.choose(usual, device)
    if roofline is not None:
        pictures.check_file("--roofline", Path(roofline))
    results: list[Benchmark] = []
    faults: list[str] = []
    cards = choose(names, everything)
    sample = None
    if shape is not None:
        if len(cards) != 1:
            raise CommandError(f"--shape: is a call of one operator, and {len(cards)} are named; name one")
        with told("--shape: "):
            sample, of = sample_of(cards[0], shape, device)
        dtype = dtype or [str(of).removeprefix("torch.")]
    projects, unfit = _projects(names, dtype, quick, output.console)
    faults += unfit.values()
    work = [
        (card, one)
        for card in cards
        for one in dtypes_of(card, dtype or [n for n in _USUAL if f"torch.{n}" in map(str, card.dtypes)])
        if card.name not in unfit
    ]
    for done, (card, one) in enumerate(work):
        title = f"{card.name}, {str(one).removeprefix('torch.')} ({done + 1} of {len(work)})"
        try:
            with output.console.status(title):
                timed = bench(
                    card,
                    one,
                    against=("reference", *usual) if against is None and card.name in projects else usual,
                    device=device,
                    backward=backward,
                    seconds=seconds,
                    sample=sample,
                    thorough=not quick and (done == 0 or work[done - 1][0] is not card),  # asked once
                )
                for result in timed:
                    _print(output.console, result)
                    results.append(result)
                    faults += result.faults
        except WrongResult as wrong:
            output.console.print(f"{wrong}\n", style="red")
            faults.append(str(wrong))
        output.keep(_as_json(results, faults, [card.name for card, _ in work[done + 1 :]]))
    if len(results) > 1:
        _summarize(output.console, results)
    if roofline is not None:
        pictures.roofline(results, Path(roofline))
    output.finish(_as_json(results, faults))
    if faults:
        raise CommandError(f"bench: {len(faults)} fault{'s' * (len(faults) > 1)}, the first: {faults[0]}")


def _projects(
    names: list[str] | None, dtype: list[str] | None, quick: bool, console: Console
) -> tuple[set[str], dict[str, str]]:
    """The operators of projects that were named by their folders; and those that verify red elsewhere."""
    from opsmith.authoring.project import cards_of, load
    from opsmith.cli.verify import elsewhere
    from opsmith.measure import WrongResult
    from opsmith.proof.bench import refuse

    found: set[str] = set()
    unfit: dict[str, str] = {}
    for folder in folders(names):
        mine = {card.name for card in cards_of(load(folder))}
        found |= mine
        try:
            for findings in elsewhere(console, folder, dtype, quick):
                refuse(findings)
        except WrongResult as wrong:
            console.print(f"{wrong}\n", style="red")
            unfit |= dict.fromkeys(mine, str(wrong))
    return found, unfit


def _as_json(results: list[Benchmark], faults: list[str], left: Sequence[str] = ()) -> dict[str, Any]:
    """Machine, versions and commit once, then every benchmark with all its samples; `left` was not done yet."""
    import datetime
    from importlib import metadata

    from opsmith import measure
    from opsmith.version import VERSION

    versions = {"opsmith": VERSION}
    for package in ("torch", "triton", "numpy", "liger-kernel"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    machine = measure.describe().to_json()
    benchmarks = [result.to_json() for result in results]
    for benchmark in benchmarks:
        for column in benchmark["columns"].values():
            del column["machine"]  # the same everywhere
    return {
        "ok": not faults and not left,
        "left": list(dict.fromkeys(left)),
        "faults": faults,
        "taken": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": machine["commit"],
        "versions": versions,
        "machine": machine,
        "benchmarks": benchmarks,
    }


def _print(console: Console, result: Benchmark) -> None:
    """One row for each contestant, one pair of columns for each comparison."""
    some = next(iter(result.columns.values()))
    where = f"{some.machine.threads} threads" if result.device == "cpu" else str(some.machine.gpu)
    title = f"{result.operator} {result.workload}, {result.dtype}, {result.direction}, {where}"
    heads = []
    for column in result.columns:
        heads += [column, "roof"] if column in result.roof else [column]
    table = _table(title, "", *heads, *(f"× {base}" for base in result.baselines), "peak")
    decides = result.deciding
    names = dict.fromkeys(name for compared in result.columns.values() for name in compared.names)
    for name in names:
        cells = [name]
        for column, compared in result.columns.items():
            here = name in compared.names
            cells.append(time_of(compared.median(name)) if here else "")
            if column in result.roof:
                part = result.roof[column].get(name)
                cells.append("" if part is None else f"{part:.0%}")
        ratios = [result.ratio(decides, name, base) for base in result.baselines]
        cells += ["" if ratio is None else speedup(ratio) for ratio in ratios]
        table.add_row(*cells, size_of(result.peak[name]))
    console.print(table)
    for note in (*result.notes, *result.faults):
        console.print(f"  {note}", style="yellow")
    console.print()


def _summarize(console: Console, results: list[Benchmark]) -> None:
    """One row for each benchmark: the fastest of ours, its part of the roof, and its ratios."""
    bases = list(dict.fromkeys(base for result in results for base in result.baselines))
    heads = [head for base in bases for head in (f"× {base}", "fresh")]
    table = _table("Summary", "operator", "workload", "dtype", "direction", "time", "roof", *heads, "peak")
    gains: dict[tuple[str, str, str], list[float]] = {}
    for result in results:
        column = result.deciding
        best = result.best(column)
        if best is None:
            continue
        part = result.roof.get(column, {}).get(best)
        cells = [result.operator, result.workload, result.dtype, result.direction]
        cells += [time_of(result.columns[column].median(best)), "" if part is None else f"{part:.0%}"]
        for base in bases:
            alike = result.ratio(column, best, base)
            mine = result.best("cold") if column != "cold" else None
            fresh = result.ratio("cold", mine, base) if mine else None
            cells += ["" if ratio is None else f"{ratio.speedup:.2f}" for ratio in (alike, fresh)]
            if (ratio := fresh or alike) is not None:
                gains.setdefault((base, result.dtype, result.direction), []).append(ratio.speedup)
        table.add_row(*cells, size_of(result.peak[best]))
    console.print(table)
    for (base, dtype, direction), speedups in gains.items():
        console.print(
            f"× {base}, {dtype}, {direction}: geometric mean {geometric_mean(speedups):.2f}, "
            f"least {min(speedups):.2f}, over {len(speedups)} workloads, outputs fresh"
        )


def _table(title: str, *heads: str) -> Table:
    return Table(*heads, title=title, title_justify="left", box=None)
