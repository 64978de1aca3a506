"""The report in a terminal: the trust panel first, then the bill, then what follows from it."""

from __future__ import annotations

import io
from collections.abc import Iterable
from statistics import fmean

from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from opsmith.profiler.data import ATTENTION, FRAMEWORK, MATMUL, Bill, Findings, Phase, bill, by_shape, sums

_SHAPES, _CHAINS, _LAYERS = 12, 6, 24
_WORK = ("GFLOP", "least MB", "FLOP/B", "GFLOP/s", "GB/s")  # of what computes
HEADS = ("ms", "share", "calls", *_WORK, "bound by", "of roof", "lost ms")


def text(profile: Findings, width: int = 150) -> str:
    """The report without colors."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False, markup=False, color_system=None)
    show(profile, console)
    return buffer.getvalue()


def show(profile: Findings, console: Console) -> None:
    """Print the report."""
    console.print(Panel("\n".join(trust(profile)), title="trust", title_align="left"))
    for phase in profile.phases:
        console.print()
        console.print(_bill_table(phase))
        if phase.tokens:
            console.print(per_token(profile, phase))
        console.print(_shapes_table(phase))
        if len({row.layer for row in phase.rows}) > 1:
            console.print(_layers_table(phase))
        if phase.chains:
            console.print(_chains_table(phase))
    console.print()
    advice = profile.advice
    if not advice:
        console.print("advice: none; no rule finds a gain above the noise")
    for i, one in enumerate(advice, 1):
        console.print(
            f"{i}. {one.phase}: {one.title}: up to {one.gain * 1e3:.3g} ms, {one.speedup:.2f}x\n"
            f"   seen:   {one.evidence}\n   do:     {one.action}\n   verify: {one.verify}"
        )


def trust(profile: Findings) -> list[str]:
    """What the numbers rest on."""
    machine, lines = profile.machine, []
    if profile.partial:
        lines.append(f"PARTIAL: {profile.partial}; what was gathered until then is below")
    threads, cores = (machine.get(name, "?") for name in ("threads", "cores"))
    lines.append(
        f"{profile.model}{', optimized' if profile.optimized else ''} on {machine.get('cpu', 'unknown')}, "
        f"{threads} thread{'s' * (threads != 1)} of {cores} core{'s' * (cores != 1)}, "
        f"torch {profile.versions.get('torch', '?')}, {profile.taken}"
    )
    lines.append("roofs, measured in this run: " + (", ".join(roof_lines(profile)) or "unknown"))
    for phase in profile.phases:
        plain = f"{phase.plain * 1e3:.3f} ms without the profiler, " if phase.plain else ""
        error = f" ±{phase.overhead_error:.1%}" if phase.overhead_error else ""
        lines.append(
            f"{phase.name}: {phase.wall * 1e3:.3f} ms, {plain}overhead {phase.overhead:+.1%}{error} "
            f"({phase.overhead_from}), {len(phase.samples)} repetitions, noise ±{phase.noise:.1%}; "
            f"classified {phase.classified:.1%}, with a cost formula {phase.with_formula:.1%} (matmul and attention "
            f"{phase.covered(MATMUL, ATTENTION):.1%}); rows sum to {phase.total / (phase.wall or 1):.1%} of wall time"
        )
        lines += [
            f"ERROR: {row.operator} {row.shape} is at {row.of_roof or 0:.0%} of its roof: wrong formula, clock or roof"
            for row in phase.over_roof
        ]
        lines += [f"ERROR: {fault}" for fault in dict.fromkeys(row.fault for row in phase.rows) if fault]
        lines += [f"note: {note}" for note in phase.notes]
    return lines + [f"note: {note}" for note in profile.notes]


def roof_lines(profile: Findings) -> list[str]:
    """The roofs, as a person reads them."""
    found = []
    for name, rate in profile.roofs.items():
        if name == "calls":
            found.append(f"a call of one element {1e6 / rate:.2g} µs")
        else:
            found.append(f"{name} {rate / 1e9:.0f} {'GFLOP/s' if name.startswith('matmul') else 'GB/s'}")
    return found


def per_token(profile: Findings, phase: Phase) -> str:
    """A phase per token: time, memory, and how much of the machine it uses."""
    least = sum(row.least for row in phase.rows)
    flops, moved = sum(r.flops for r in phase.rows), sum(r.bytes for r in phase.rows)
    dtype = next(iter(sums(phase.rows, "dtype", "flops")), "")  # that most operations run in
    rate, band = profile.roofs.get(f"matmul {dtype}"), profile.roofs.get("memory")
    known = phase.with_formula >= 0.5  # sums over a few operators say nothing of the whole
    return (
        f"{phase.name} per token ({phase.tokens} tokens): {phase.wall / phase.tokens * 1e6:.3g} µs, weights "
        f"{phase.weight_bytes / 1e6:.1f} MB, cache {phase.cache_bytes / 1e6:.2f} MB, "
        + (f"MFU {_part(flops / phase.wall, rate)}, MBU {_part(moved / phase.wall, band)}, " if known else "")
        + f"{phase.tokens / phase.wall:,.0f} tokens/s now"
        + (f", {phase.tokens / least:,.0f} at the roof" if least and known else "")
    )


def _part(rate: float, roof: float | None) -> str:
    return f"{rate / roof:.1%}" if roof else "unknown"


def _table(title: str, left: Iterable[str], numbers: Iterable[str], last: Iterable[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for heads, justify in ((left, "left"), (numbers, "right"), (last, "left")):
        for head in heads:
            table.add_column(head, justify=justify)  # type: ignore[arg-type]
    return table


def _bill_table(phase: Phase) -> Table:
    title = f"{phase.name}: the bill, what lost most first"
    table = _table(title, ["class / operator"], HEADS, ["implementation", "written"])
    for group in bill(phase.rows, "kind"):
        table.add_row(group.name, *cells(group, phase), style="bold")
        inner = bill(group.rows, "operator")
        if len(inner) > 1 or inner[0].name != group.name:
            for one in inner[:6]:
                table.add_row("  " + one.name, *cells(one, phase))
            if len(inner) > 6:
                table.add_row(f"  and {len(inner) - 6} more", _ms(sum(b.seconds for b in inner[6:])))
    table.add_row("sum", _ms(phase.total), f"{phase.total / (phase.wall or 1):.1%}", style="bold")
    return table


def cells(b: Bill, phase: Phase) -> list[str]:
    """A row of the bill behind its name: time, share, calls, work, rates, what binds it, what is lost."""
    work = b.rows[0].kind != FRAMEWORK
    seconds = b.seconds or 1e-12
    return [
        _ms(b.seconds),
        f"{b.seconds / (phase.wall or 1):.1%}",
        f"{b.calls:.0f}",
        f"{b.flops / 1e9:.3g}" if work else "",
        f"{b.bytes / 1e6:.3g}" if work else "",
        f"{b.flops / b.bytes:.3g}" if work and b.bytes else "",
        f"{b.flops / seconds / 1e9:.3g}" if work else "",
        f"{b.bytes / seconds / 1e9:.3g}" if work else "",
        b.bound,
        _percent(b.of_roof),
        _ms(b.lost),
        b.implementation,
        b.fused,
    ]


def _shapes_table(phase: Phase) -> Table:
    numbers = ("calls", "ms", "of roof", "lost ms")
    table = _table("shapes", ["operator", "shape", "dtype"], numbers, ["runs on, and why"])
    groups = by_shape(phase)
    for one in groups[:_SHAPES]:
        operator, shape, _, implementation = one.names
        why = one.rows[0].reason + "".join(f"; not {n}: {w}" for n, w in one.rows[0].refused.items())
        table.add_row(operator, shape, *short_cells(one), f"{implementation}{': ' + why if why else ''}")
        if one.rows[0].replay:
            table.add_row("", "", "", "", "", "", "", f"again: {one.rows[0].replay}")
    if len(groups) > _SHAPES:
        table.add_row(f"and {len(groups) - _SHAPES} more, all of them in the JSON")
    return table


def short_cells(b: Bill) -> list[str]:
    """A row of the shapes behind its name."""
    return [b.rows[0].dtype, f"{b.calls:.0f}", _ms(b.seconds), _percent(b.of_roof), _ms(b.lost)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{part:.0%}"


def _layers_table(phase: Phase) -> Table:
    """Milliseconds by layer and class; of many layers those of the same classes once, with their mean."""
    layers, kinds = layer_times(phase)
    alike: dict[object, list[str]] = {}
    for layer, times in layers.items():
        alike.setdefault(frozenset(times) if len(layers) > _LAYERS else layer, []).append(layer)
    table = _table("layer × class, ms", ["layer"], kinds)
    for first, *more in alike.values():
        label = f"{len(more) + 1} like {first}, each" if more else first or "(no layer)"
        means = {k: fmean(layers[name][k] for name in (first, *more)) for k in layers[first]}
        table.add_row(label, *(_ms(means[k]) if k in means else "" for k in kinds))
    return table


def layer_times(phase: Phase) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Seconds by layer and class, layers in the order of the timeline; and the classes, most time first."""
    order = list(dict.fromkeys(e.layer for e in phase.events)) or [""]
    layers: dict[str, dict[str, float]] = {name: {} for name in order}
    for row in phase.rows:
        times = layers.setdefault(row.layer, {})
        times[row.kind] = times.get(row.kind, 0.0) + row.seconds
    return layers, list(sums(phase.rows, "kind"))


def _chains_table(phase: Phase) -> Table:
    numbers = ("times", "MB saved", "gain ms")
    table = _table("fusion opportunities", ["chain"], numbers, ["implementation here"])
    for chain in phase.chains[:_CHAINS]:
        cells = (f"{chain.count:.0f}", f"{chain.bytes_saved / 1e6:.3g}", _ms(chain.gain))
        table.add_row(" → ".join(chain.operators), *cells, chain.implementation or "none")
    return table
