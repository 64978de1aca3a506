"""`opsmith verify`: hold operators to their definition."""

from __future__ import annotations

from dataclasses import asdict
from itertools import product
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opsmith.cli import CommandError
from opsmith.cli.common import All, Device, Dtypes, Json, Names, Output, choose, dtypes_of, folders

if TYPE_CHECKING:
    from opsmith.proof.verify import Finding


def run(
    names: Names = None,
    everything: All = False,
    dtype: Dtypes = None,
    device: Device = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Only values, out= and gradients.")] = False,
    json: Json = None,
) -> None:
    """Run implementations on the samples of their card and hold them to a float64 reference.

    Checked are values in memory full of NaN, out=, gradients, and that inputs stay unchanged; then which
    out= is refused, two runs, threads, the dispatcher's entries, torch.compile and gradients by differences. Of a
    project without a GPU, the Triton kernels run in Triton's interpreter; those of further back ends run emulated.

    Example: opsmith verify layer_norm --dtype bfloat16
    """
    from opsmith.proof.conduct import conduct
    from opsmith.proof.verify import verify

    output = Output(json)
    findings: list[Finding] = []
    for card in choose(names, everything):
        dtypes = dtypes_of(card, dtype)
        found: list[Finding] = []
        for one in dtypes:
            with output.console.status(f"{card.name}, {str(one).removeprefix('torch.')}"):
                found += verify(card, [one], device)
        if not quick:
            with output.console.status(card.name):
                found += conduct(card, dtypes[0], device)
        _print(output.console, found)
        findings += found
    for folder in folders(names):
        for found in elsewhere(output.console, folder, dtype, quick):
            _print(output.console, found)
            findings += found
    red = [finding for finding in findings if not finding.ok]
    output.finish({"ok": not red, "checks": len(findings), "findings": [asdict(f) for f in findings]})
    if red:
        first = min(red, key=lambda f: f.elements)
        raise CommandError(
            f"verify: {len(red)} of {len(findings)} checks failed; start with the smallest: {first.operator} "
            f"{first.implementation}, {first.place}: {first.why}"
        )
    output.console.print(f"{len(findings)} checks passed", style="green")


def elsewhere(console: Console, folder: str, dtype: list[str] | None, quick: bool) -> list[list[Finding]]:
    """What is found of a project's kernels beside those that run here; and prints what nothing here can try."""
    from opsmith.authoring.project import cards_of, checks, kernels_of, load
    from opsmith.authoring.project.compile import tool_missing

    for kernels, backend in product(kernels_of(load(folder)), ("triton", "cuda")):
        if kernels.source(backend).exists() and (why := tool_missing(backend)):
            what = f"{kernels.name}, {backend}, is not checked: {why}"
            console.print(what, style="yellow", soft_wrap=True)
    chosen = [one for card in cards_of(load(folder)) for one in dtypes_of(card, dtype)] if dtype else []
    with console.status("compilers, interpreter and emulation"):
        return list(checks.elsewhere(folder, chosen, quick=quick))


def _print(console: Console, findings: list[Finding]) -> None:
    """A row for each implementation and dtype, a column for each check; below, the smallest failure of each kind."""
    if not findings:
        return
    checks = list(dict.fromkeys(finding.check for finding in findings))
    table = Table(findings[0].operator, "dtype", *checks, "error / bound", box=None, pad_edge=False)
    for name, dtype in dict.fromkeys((finding.implementation, finding.dtype) for finding in findings):
        mine = [f for f in findings if (f.implementation, f.dtype) == (name, dtype)]
        cells = []
        for check in checks:
            these = [finding.ok for finding in mine if finding.check == check]
            red = these.count(False)
            cells.append(
                Text(f"{red} of {len(these)} failed", "red") if red else f"{len(these)} ok" if these else ""
            )
        worst = max((f.error / f.bound for f in mine if f.ok and f.bound), default=None)
        table.add_row(name, dtype, *cells, "" if worst is None else f"{worst:.2f}")
    console.print(table)
    smallest: dict[tuple[str, str], Finding] = {}
    for finding in sorted((f for f in findings if not f.ok), key=lambda f: f.elements):
        smallest.setdefault((finding.implementation, finding.check), finding)
    for finding in smallest.values():
        console.print(f"    {finding.implementation}, {finding.place}: {finding.why}", soft_wrap=True)
    console.print()
