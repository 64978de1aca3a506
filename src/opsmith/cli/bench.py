"""`opsmith bench`: verify operators, then time them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import All, Dtypes, Json, Names, Output, choose, dtypes_of

if TYPE_CHECKING:
    from rich.console import Console

    from opsmith.ops.bench import Benchmark


def run(
    names: Names = None,
    everything: All = False,
    dtype: Dtypes = None,
    compiled: Annotated[bool, typer.Option("--compile/--no-compile", help="Time torch.compile too.")] = True,
    seconds: Annotated[float, typer.Option(min=0.01, help="For each comparison.")] = 3.0,
    json: Json = None,
) -> None:
    """Verify operators, then time them cold and warm against eager and torch.compile.

    Contestants run interleaved, beside probes of what memory and matmul reach at that moment: roof is the
    part of it that was reached, cold. Float32 and bfloat16, unless --dtype says otherwise.

    Example: opsmith bench softmax --dtype bfloat16
    """
    from opsmith.measure import WrongResult
    from opsmith.ops.bench import bench

    output = Output(json)
    results: list[Benchmark] = []
    faults: list[str] = []
    for card in choose(names, everything):
        for one in dtypes_of(card, dtype or ["float32", "bfloat16"]):
            try:
                with output.console.status(f"{card.name}, {str(one).removeprefix('torch.')}"):
                    for result in bench(card, one, compiled=compiled, seconds=seconds):
                        _print(output.console, result)
                        results.append(result)
                        faults += result.faults
            except WrongResult as wrong:
                output.console.print(f"{wrong}\n", style="red", markup=False)
                faults.append(str(wrong))
    output.finish(
        {"ok": not faults, "faults": faults, "benchmarks": [result.to_json() for result in results]}
    )
    if faults:
        raise CommandError(f"bench: {len(faults)} faults, the first: {faults[0]}")


def _print(console: Console, result: Benchmark) -> None:
    from rich.table import Table

    from opsmith.ops.bench import COMPILED, EAGER

    title = f"{result.operator} {result.workload}, {result.dtype}, {result.cold.machine.threads} threads"
    table = Table(
        "", "cold", "warm", "roof", "× eager", f"× {COMPILED}", title=title, title_justify="left", box=None
    )
    for name in sorted(result.cold.names, key=result.cold.median):
        roof = result.roof[name]
        table.add_row(
            name,
            _time(result.cold.median(name)),
            _time(result.warm.median(name)),
            "" if roof is None else f"{roof:.0%}",
            _speedup(result, name, EAGER),
            _speedup(result, name, COMPILED),
        )
    console.print(table)
    for note in (*result.notes, *result.faults):
        console.print(f"  {note}", style="yellow", markup=False)
    console.print()


def _speedup(result: Benchmark, name: str, base: str) -> str:
    """How many times faster than the baseline, cold, paired by round, with its interval."""
    if base not in result.cold.names or name == base:
        return ""
    ratio: Any = result.cold.ratio(name, base)
    return f"{ratio.speedup:.2f} [{1 / ratio.hi:.2f}, {1 / ratio.lo:.2f}] {ratio.verdict}"


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
