"""`opsmith verify`: hold operators to their definition."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from opsmith.cli import CommandError
from opsmith.cli.common import All, Device, Dtypes, Json, Names, Output, choose, device_of, dtypes_of

if TYPE_CHECKING:
    from rich.console import Console

    from opsmith.ops.verify import Finding


def run(
    names: Names = None,
    everything: All = False,
    dtype: Dtypes = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Run implementations on the samples of their card and hold them to a float64 reference.

    Checked are values, out= and gradients, and that inputs stay unchanged.

    Example: opsmith verify layer_norm --dtype bfloat16
    """
    from opsmith.ops.verify import verify

    output = Output(json)
    device_of(device)
    findings: list[Finding] = []
    for card in choose(names, everything):
        for one in dtypes_of(card, dtype):
            with output.console.status(f"{card.name}, {str(one).removeprefix('torch.')}"):
                found = list(verify(card, [one], device))
            _print(output.console, found)
            findings += found
    red = [finding for finding in findings if not finding.ok]
    output.finish({"ok": not red, "checks": len(findings), "findings": [asdict(f) for f in findings]})
    if red:
        first = min(red, key=lambda f: f.elements)
        raise CommandError(
            f"verify: {len(red)} of {len(findings)} checks failed; start with the smallest: {first.operator} "
            f"{first.implementation}, {first.dtype}, {first.check} of sample {first.sample!r}: {first.why}"
        )
    output.console.print(f"[green]{len(findings)} checks passed[/green]")


def _print(console: Console, findings: list[Finding]) -> None:
    """One line for each implementation, and one for the smallest failure of each kind."""
    for name in dict.fromkeys(finding.implementation for finding in findings):
        mine = [finding for finding in findings if finding.implementation == name]
        red = sorted((f for f in mine if not f.ok), key=lambda f: f.elements)
        worst = max((f.error / f.bound for f in mine if f.ok and f.bound), default=0.0)
        verdict = (
            f"[red]{len(red)} of {len(mine)} failed[/red]" if red else f"[green]{len(mine)} passed[/green]"
        )
        head = f"{mine[0].operator:<16} {name:<12} {mine[0].dtype:<9}"
        console.print(f"{head} {verdict}, error up to {worst:.2f} of the bound")
        for check in dict.fromkeys(finding.check for finding in red):
            first = next(finding for finding in red if finding.check == check)
            console.print(f"    {check}: sample {first.sample!r}: {first.why}", markup=False)
