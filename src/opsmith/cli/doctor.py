"""`opsmith doctor`: the machine, its kernels and its limits, and what to do about anything amiss."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output, size_of

if TYPE_CHECKING:
    from opsmith.kernels.libraries import Status
    from opsmith.measure import Machine, Roofs

_OLDEST_TORCH = (2, 10)


@dataclass(frozen=True)
class Line:
    """One thing the doctor looked at; `advice` says what to do, where something is amiss."""

    topic: str
    finding: str
    advice: str = ""
    grave: bool = False  # operators cannot run as they should


def run(
    roofs: Annotated[bool, typer.Option(help="Measure memory bandwidth and matmul rates (seconds).")] = True,
    json: Json = None,
) -> None:
    """Show machine, kernels and measured limits, and what to do about anything amiss.

    Example: opsmith doctor --no-roofs
    """
    import torch

    from opsmith.measure import describe, measure_roofs, without_unit

    output = Output(json)
    machine = describe()
    with output.console.status("building and loading the kernels"):
        kernels, facts = _kernels()
    lines = [*_machine(machine), *kernels, *_backends()]
    measured: Roofs | None = None
    if roofs:
        with output.console.status("measuring what memory and matmul reach"):
            measured = measure_roofs(quick=True)
        rates = {kind: roof.rate for kind, roof in measured.by_kind.items()}
        lines += _roofs(rates, {"matmul bfloat16": without_unit(torch.bfloat16)})
    table = Table.grid(padding=(0, 2))
    for line in lines:
        mark, style = ("x", "red") if line.grave else ("!", "yellow") if line.advice else ("ok", "green")
        table.add_row(Text(mark, style), line.topic, Text(line.finding))
        if line.advice:
            table.add_row("", "", Text(line.advice, style))
    output.console.print(table)
    grave = [line for line in lines if line.grave]
    output.finish(
        {
            "ok": not grave,
            "machine": machine.to_json(),
            "kernels": facts,
            "roofs": measured.to_json() if measured else None,
            "lines": [asdict(line) for line in lines],
        }
    )
    if grave:
        raise CommandError(f"doctor: {grave[0].topic}: {grave[0].finding}; {grave[0].advice}")


def _roofs(rates: dict[str, float], slow: dict[str, str]) -> list[Line]:
    """What was measured, and of a dtype whose products this processor has no unit for that it is so."""
    lines = []
    for kind, rate in rates.items():
        found = f"{rate / 1e9:.0f} {'Gop/s' if kind.startswith('matmul') else 'GB/s'}, measured now"
        why = slow.get(kind)
        advice = f'{why}; run float32, or opsmith.optimize(..., quantize="int8")' if why else ""
        lines.append(Line(kind, found, advice))
    return lines


def _machine(machine: Machine) -> list[Line]:
    caches = ", ".join(f"L{cache.level} {size_of(cache.bytes)}" for cache in machine.caches)
    threads = f"{machine.threads} used by torch, {machine.cores} processors for this process"
    fewer = (
        f"torch uses {machine.threads} of {machine.cores} processors: unset OMP_NUM_THREADS, or call "
        f"torch.set_num_threads({machine.cores}), unless that is meant"
    )
    early = tuple(int(part) for part in machine.torch.split("+")[0].split(".")[:2]) < _OLDEST_TORCH
    old = f"opsmith needs torch {_OLDEST_TORCH[0]}.{_OLDEST_TORCH[1]} or newer: pip install -U torch"
    return [
        Line("processor", machine.cpu),
        Line("threads", threads, fewer if machine.threads < machine.cores else ""),
        Line("caches", caches or "unknown to the system"),
        Line("memory", size_of(machine.memory_bytes)),
        Line("system", f"{machine.system}, Python {machine.python}"),
        Line("torch", f"{machine.torch}, {machine.capability}", old if early else "", early),
        Line("GPU", machine.gpu or "none that this PyTorch can use; operators run on the CPU"),
    ]


def _kernels() -> tuple[list[Line], dict[str, Any] | None]:
    """Tier, compiler, library and cache; built and loaded now, the only proof that they work."""
    import opsmith.ops  # noqa: F401  which declares what the kernels' bindings are generated from
    from opsmith.call.fast import direct, nodes
    from opsmith.kernels import build, isa, libraries

    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loaded = libraries.load()
            directly = loaded and direct.library() is not None
            recorded = directly and nodes.library() is not None
            state = libraries.status()
    except (ValueError, build.BuildError) as error:
        return [Line("kernels", "cannot be used", " ".join(str(error).split()), grave=True)], None
    best = isa.supported()[-1]
    lower = f"OPSMITH_ISA asks for less than this processor can do ({best}); unset it for full speed"
    why = "" if loaded else " ".join((state.reason or "").split())
    calls = "direct" if directly else "through PyTorch's dispatcher"
    how = "recorded in C++" if recorded else "recorded by Functions in Python"
    needed = "a C++20 compiler and Python's headers (python3-dev) spare"
    no_compiler = "needed to build kernels for other sources, flags or torch versions: install g++ or clang++"
    # A failure of the build is told with the kernels already.
    on_its_way = " ".join(str(said[0].message).split()) if loaded and said else ""
    lines = [
        Line("kernel tier", state.tier, lower if state.tier != best else ""),
        Line("compiler", state.compiler or "none", "" if state.compiler else no_compiler),
        Line("kernels", _libraries(state), why, grave=not loaded),
        Line("kernel calls", calls, f"{needed} 2 µs a call" if loaded and not directly else ""),
        Line("gradients", how, f"{needed} small ones 15 to 40 µs" if loaded and not recorded else ""),
        Line("kernel cache", f"{state.cache}, {size_of(state.bytes)}", on_its_way),
    ]
    return lines, {**asdict(state), "direct_calls": directly, "recorded_calls": recorded}


def _backends() -> list[Line]:
    """Those beyond the core's own, and whether their devices are here."""
    from opsmith import backends

    return [
        Line(f"back end {one.name}", "its device is here" if (why := one.here()) is True else str(why))
        for one in backends.installed().values()
    ]


def _libraries(state: Status) -> str:
    """Which libraries of kernels are loaded, of which there are."""
    if not state.loaded:
        return "not loaded: operators run in plain PyTorch"
    missing = sorted(set(state.libraries) - set(state.loaded))
    found = f"{len(state.loaded)} of {len(state.libraries)} libraries loaded"
    return f"{found}, in plain PyTorch: {', '.join(missing)}" if missing else found
