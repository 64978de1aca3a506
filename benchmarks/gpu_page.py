"""What benchmarks/gpu.py found, in one file for benchmarks/results, and docs/gpu.md from the newest of those.

python benchmarks/gpu_page.py                 # the page
python benchmarks/gpu_page.py --collect FILE  # build/gpu in one file, then the page
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "benchmarks" / "results"
KERNELS = RESULTS / "kernels-sm80-sm90.json"  # by tests/kernels/compile_triton.py --table
PAGE = HERE / "docs" / "gpu.md"

_NEVER = "No machine with a GPU has run it yet, so nothing is known of them but what follows."
_CHECKS = """Values, layouts, `out=`, gradients, opcheck and torch.compile of each card in three dtypes; replays of
CUDA graphs on other values; models beside eager; CUDA C++ that is built there."""
_TIMES = """Microseconds of a call that was captured, and the part of the roof that opsmith reaches: of the machine's
copy or read, or of its matrix units, as they were in that run. Above 1, the roof was seen too low. What a call from
Python adds is in the file."""
_MOST = """Of the variants that `tests/kernels/compile_triton.py` compiles, which needs no GPU, the most: registers of a
thread, bytes that it spills, shared memory of a program."""
_MODELS = """Milliseconds: a forward of sentences (MiniLM, 32 of 128 tokens) or of a prompt (512 tokens, of the
DeepSeeks 64 and 128) whose sizes came before, and a token of `generate` behind it, of 32. Random weights; sizes and
layers are in `benchmarks/gpu.py`. Peers stand where they were measured in a process of their own."""
_PEERS = {
    "compile": "torch.compile",
    "compile, graphs": "with CUDA graphs",
    "static cache": "transformers' static cache, compiled",
}
_OTHERS = ("eager", "torch.compile", "Liger")


def collect(folder: Path) -> dict[str, list[Any]]:
    """All files, by stage; of times, their median and spread. `notes`, by hand, are lines for the page."""
    found: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("*.json")):
        one = json.loads(
            file.read_text(), object_hook=lambda d: {k: v for k, v in d.items() if k != "samples"}
        )
        found.setdefault(one["stage"], []).append(one)
    return found


def page(results: Path | None, kernels: Path) -> str:
    """What is known of GPUs, in words and tables."""
    lines = ["# On a GPU", ""]
    if results is None:
        lines += [f"`make gpu` finds what there is to know. {_NEVER}", ""]
    else:
        lines += [*_found(results.name, json.loads(results.read_text()))]
    head = ("kernel", "GPU", "variants", "registers", "spilled", "shared")
    lines += [
        "## What the kernels take",
        "",
        _MOST,
        "",
        *_table(head, _taken(json.loads(kernels.read_text()))),
    ]
    return "\n".join(lines)


def _found(name: str, found: dict[str, list[Any]]) -> Iterator[str]:
    device = found["machine"][0]
    yield f"Written by `benchmarks/gpu_page.py` from `benchmarks/results/{name}`: {device['nvidia-smi']['name']},"
    yield f"PyTorch {device['torch']}, Triton {device['triton']}. `make gpu` finds it anew, on a machine with a GPU."
    yield from ("", *found.get("notes", ()), "", "## Right or wrong", "", _CHECKS, "")
    rows = []
    for stage in ("verify", "graphs", "models", "built"):
        jobs = found.get(stage, [])
        red = [f"{one['job']}: {_why(one)}" for one in jobs if not one.get("ok", True)]
        checks = sum(one.get("checks", 1) for one in jobs)
        rows.append((stage, len(jobs), checks, "<br>".join(red) or "nothing"))
    yield from _table(("", "jobs", "checks", "what failed"), rows)
    yield from ("## Whole models, in bfloat16", "", _MODELS, "")
    rows = [row for one in found.get("models", []) for row in _whole(one)]
    yield from _table(("model", "", "eager", "opsmith", *_PEERS.values()), rows)
    yield from ("## Operators, in bfloat16", "", _TIMES, "")
    head = ("operator", "opsmith", "of the roof", "eager", "torch.compile", "Liger")
    yield from _table(head, [row for one in found.get("fast", []) for row in _times(one)])


def _whole(one: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for what, times in (
        ("forward", one.get("forward", {})),
        ("a token", one.get("decode", {}).get("seconds_a_token", {})),
    ):
        if times:
            took = (times.get(name) for name in ("eager", "opsmith", *_PEERS))
            yield (one["job"], what, *(f"{t * 1e3:.2f}" if t else "" for t in took))


def _times(one: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for result in one.get("results", ()):
        if "graph" not in result["columns"]:
            continue
        took = {name: who["median"] * 1e6 for name, who in result["columns"]["graph"]["contestants"].items()}
        times = [f"{took[name]:.1f}" if name in took else "" for name in ("opsmith", *_OTHERS)]
        part = result["roof_fraction"].get("graph", {}).get("opsmith")
        yield (
            f"{result['operator']}, {result['workload']}",
            times[0],
            f"{part:.2f}" if part else "",
            *times[1:],
        )


def _taken(made: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    for name, gpu in dict.fromkeys((row["kernel"], row["gpu"]) for row in made):
        rows = [row for row in made if (row["kernel"], row["gpu"]) == (name, gpu)]
        most = (max(row[what] for row in rows) for what in ("registers", "spilled", "shared"))
        yield name.removeprefix("opsmith."), gpu, len(rows), *most


def _table(head: tuple[str, ...], rows: Any) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(map(str, row))} |"
    yield ""


def _why(one: dict[str, Any]) -> str:
    failed = one.get("failed") or ["see its log"]
    said = (
        (
            f"{f['sample']}, {f['error'] / f['bound']:.2f} of its bound"
            if f["bound"]
            else f"{f['sample']}, {f['why']}"
        )
        if isinstance(f, dict)
        else f
        for f in failed
    )
    return "; ".join(dict.fromkeys(str(text)[:160] for text in said))


def main(
    into: Annotated[
        Path | None, typer.Option("--collect", help="Where all of build/gpu goes, in one file.")
    ] = None,
) -> None:
    """Write the page, and before it what was found."""
    if into is not None:
        into.write_text(json.dumps(collect(HERE / "build" / "gpu")) + "\n")
    PAGE.write_text(page(max(RESULTS.glob("gpu-*.json"), default=None), KERNELS))


if __name__ == "__main__":
    typer.run(main)
