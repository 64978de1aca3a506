"""The picture behind `opsmith bench --roofline`: operations a second over operations a byte, under measured roofs."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsmith.cli import pictures

if TYPE_CHECKING:
    from opsmith.proof.bench import Benchmark

_MARKS = {"forward": "o", "backward": "s", "forward + backward": "D"}


def draw(results: list[Benchmark], file: Path) -> None:
    """Draw the fastest of ours in each benchmark; what does no arithmetic has no place on a roofline."""
    figure, axes = pictures.pyplot().subplots(figsize=(9, 6), layout="constrained")
    shown = [point for result in results if (point := _point(result)) is not None]
    roofs = _roofs(results)
    lowest = min([0.1, *(x for x, *_ in shown)]) / 2
    highest = max([100.0, *(x for x, *_ in shown)]) * 2
    bandwidth = roofs.pop("copy", None)
    for kind, rate in roofs.items():
        ridge = rate / bandwidth if bandwidth else lowest
        axes.plot([ridge, highest], [rate / 1e9] * 2, color="gray", linewidth=1)
        axes.annotate(f"{kind}: {rate / 1e9:.0f} Gop/s", (highest, rate / 1e9), ha="right", va="bottom")
    if bandwidth:
        ends = [lowest, max([lowest * 10, *(rate / bandwidth for rate in roofs.values())])]
        axes.plot(ends, [x * bandwidth / 1e9 for x in ends], color="gray", linewidth=1)
        label = f"copy: {bandwidth / 1e9:.0f} GB/s"
        axes.annotate(label, (lowest, lowest * bandwidth / 1e9), ha="left", va="bottom", rotation=35)
    colors = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys(p[2].operator for p in shown))}
    for x, y, result in shown:
        color = colors[result.operator]
        fill = "full" if result.dtype == "float32" else "none"
        axes.plot(x, y, _MARKS[result.direction], color=color, fillstyle=fill, markersize=6)
    handles: list[Any] = [
        axes.plot([], [], "o", color=color, label=name)[0] for name, color in colors.items()
    ]
    handles += [axes.plot([], [], mark, color="black", label=name)[0] for name, mark in _MARKS.items()]
    handles.append(axes.plot([], [], "o", color="black", fillstyle="none", label="half precision")[0])
    axes.legend(handles=handles, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="10⁹ operations per second")
    axes.set_title(_title(results), fontsize=9)
    axes.grid(which="major", color="0.9")
    pictures.save("--roofline", figure, file)


def _point(result: Benchmark) -> tuple[float, float, Benchmark] | None:
    best = result.best(result.deciding)
    if best is None or not result.cost.flops or not result.cost.min_bytes:
        return None
    seconds = result.columns[result.deciding].median(best)
    return result.cost.intensity, result.cost.flops / seconds / 1e9, result


def _roofs(results: list[Benchmark]) -> dict[str, float]:
    """The median of what each roof was measured at beside the benchmarks."""
    rates: dict[str, list[float]] = {}
    for result in results:
        for compared in result.columns.values():
            for kind, roof in compared.roofs.by_kind.items() if compared.roofs else ():
                if kind == "copy" or kind.startswith("matmul"):
                    rates.setdefault(kind, []).append(roof.rate)
    return {kind: statistics.median(found) for kind, found in rates.items()}


def _title(results: list[Benchmark]) -> str:
    if not results:
        return "no operator was timed"
    some = next(iter(results[0].columns.values()))
    where = some.machine.gpu or f"{some.machine.cpu}, {some.machine.threads} threads"
    return f"{where}, torch {some.machine.torch}, {some.taken[:10]}; roofs measured in the same run"
