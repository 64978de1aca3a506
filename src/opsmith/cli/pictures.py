"""Pictures that commands draw: without a display, the same for the same numbers, of names as they are."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opsmith.cli import CommandError
from opsmith.cli.common import check_target

if TYPE_CHECKING:
    from opsmith.proof.bench import Benchmark

_KINDS = (".svg", ".png")
_MARKS = {"forward": "o", "backward": "s", "forward + backward": "D"}


def check_file(option: str, file: Path) -> None:
    """Refuse what cannot be drawn before the work is done, not after it."""
    if file.suffix not in _KINDS:
        raise CommandError(f"{option}: {file} is no {' or '.join(_KINDS)} file; name one")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError(f"{option}: matplotlib draws the picture; pip install 'opsmith[plots]'")
    check_target(option, file)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "opsmith", "svg.fonttype": "none", "font.size": 9, "text.parse_math": False}
    )
    from matplotlib import pyplot

    return pyplot


def save(option: str, figure: Any, file: Path) -> None:
    """Write a figure, and let it go."""
    try:
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    except OSError as error:
        raise CommandError(f"{option}: cannot write {file} ({error.strerror}); name another file") from error
    finally:
        pyplot().close(figure)


def curves(data: dict[str, Any], file: Path) -> None:
    """Draw what `bench-llm` found: a column for the lengths at the first batch, and one for the batches."""
    cells = data["cells"]
    batch, prompt = cells[0]["batch"], cells[0]["prompt"]
    columns = {
        f"tokens before, batch {batch}": ("prompt", [c for c in cells if c["batch"] == batch]),
        f"sequences, prompt {prompt}": ("batch", [c for c in cells if c["prompt"] == prompt]),
    }
    figure, axes = pyplot().subplots(2, 2, figsize=(9, 6), layout="constrained", squeeze=False)
    rows = {"tokens/s": "tokens_per_second", "seconds to the first token": "first_seconds"}
    for column, (label, (over, some)) in enumerate(columns.items()):
        some = sorted(some, key=lambda cell: cell[over])
        for row, (title, value) in enumerate(rows.items()):
            panel = axes[row][column]
            for i, name in enumerate(cells[0]["contestants"]):
                points = [(c[over], c["contestants"][name][value]) for c in some if name in c["contestants"]]
                panel.plot(*zip(*points, strict=True), "o-", color=f"C{i % 10}", label=name, markersize=4)
            panel.set(xlabel=label, ylabel=title, ylim=(0, None), xticks=[cell[over] for cell in some])
            panel.grid(color="0.9")
    axes[0][1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    machine = data["machine"]
    figure.suptitle(
        f"{data['model']}, {data['dtype']}: {machine['cpu']}, {machine['threads']} threads", fontsize=9
    )
    save("--svg", figure, file)


def roofline(results: list[Benchmark], file: Path) -> None:
    """Draw operations a second over operations a byte, under measured roofs: the fastest of ours in each benchmark.

    What does no arithmetic has no place on it.
    """
    figure, axes = pyplot().subplots(figsize=(9, 6), layout="constrained")
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
    save("--roofline", figure, file)


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
