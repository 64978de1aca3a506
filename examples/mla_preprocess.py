"""DeepSeek's MLA pre-processing as it was published: 4 tokens, 128 heads, ten loops; and what runs beside what.

Example: python examples/mla_preprocess.py --picture timeline.svg
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from opsmith import measure
from opsmith.call.dispatch import native_library
from opsmith.ops import MLACache, MLAWeights, mla_preprocess

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
RUNGS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "mla_rungs.py"))["RUNGS"]
STAGES = (
    "norm of x",
    "rows of wdqkv, queries",
    "rows of wdqkv, keys",
    "norm of latent queries",
    "heads",
    "keys",
)
LIBRARY = torch.library.Library("opsmith", "FRAGMENT")
LIBRARY.define("mla_trace(Tensor(a!) rows, bool on) -> int")
COLORS = ("#7f7f7f", "#1f77b4", "#17becf", "#bcbd22", "#ff7f0e", "#d62728")


@dataclass(frozen=True)
class Sizes:
    """DeepSeek-V3's, and the published call's tokens."""

    tokens: int = 4
    hidden: int = 7168
    heads: int = 128
    nope: int = 128
    rope: int = 64
    kv_lora: int = 512
    q_lora: int = 1536
    blocks: int = 2
    block_size: int = 128


def make_inputs(s: Sizes, dtype: torch.dtype, quant: str | None) -> dict[str, Any]:
    """Everything that `mla_preprocess` is called with, from one seed."""
    g = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).normal_(0, shape[-1] ** -0.5, generator=g)

    def gain(n: int) -> torch.Tensor:
        return torch.empty(n, dtype=dtype).uniform_(0.5, 1.5, generator=g)

    w = MLAWeights(
        weight(s.kv_lora + s.rope + s.q_lora, s.hidden),
        weight(s.heads * (s.nope + s.rope), s.q_lora),
        weight(s.heads, s.nope, s.kv_lora),
        gamma0=gain(s.hidden),
        gamma1=gain(s.q_lora),
        gamma2=gain(s.kv_lora),
        heads=s.heads,
        nope=s.nope,
        rope=s.rope,
        kv_lora=s.kv_lora,
        q_lora=s.q_lora,
    )
    positions = torch.arange(100, 100 + s.tokens)[:, None]
    angles = (positions * 10000.0 ** (-torch.arange(0, s.rope, 2) / s.rope)).repeat(1, 2)
    return {
        "x": torch.empty((s.tokens, s.hidden), dtype=dtype).normal_(generator=g),
        "w": w if quant is None else w.quantize(quant),
        "cos": angles.cos().to(dtype),
        "sin": angles.sin().to(dtype),
        "slot_mapping": torch.randperm(s.blocks * s.block_size, generator=g)[: s.tokens],
    }


def show(name: str, t: torch.Tensor) -> str:
    """A tensor in one line."""
    few = ", ".join(f"{v:.4g}" for v in t.flatten()[:3].tolist())
    return f"  {name:<13} {str(t.dtype).removeprefix('torch.'):<9} {list(t.shape)!s:<17} [{few}, ...]"


def new_cache(s: Sizes, dtype: torch.dtype) -> MLACache:
    return MLACache.allocate("split", s.blocks, s.block_size, kv_lora=s.kv_lora, rope=s.rope, dtype=dtype)


def rungs(s: Sizes, inputs: dict[str, Any], loops: int) -> dict[str, Callable[[], Any]]:
    """Each rung as a call of so many loops; those that don't take these weights are left out."""
    found: dict[str, Callable[[], Any]] = {}
    for name, call in RUNGS.items():
        if inputs["w"].quant is not None and name == "thirteen operators, ours":
            continue
        cache = new_cache(s, inputs["x"].dtype)

        def run(call: Callable[..., Any] = call, cache: MLACache = cache) -> Any:
            for _ in range(loops):
                result = call(**inputs, cache=cache)
            return result[:2]

        found[name] = run
    return found


def trace(inputs: dict[str, Any], cache: MLACache, calls: int = 7) -> list[Task]:
    """The tasks of the shortest of some calls: in the others a thread may have had to wait for other programs."""
    flush = torch.empty(96 << 20, dtype=torch.uint8)
    found = []
    for call in range(calls):
        flush.fill_(call)  # weights come from memory, as they do in a model of many layers
        with mla_trace() as tasks:
            mla_preprocess(**inputs, cache=cache)
        found.append(tasks)
    return min(found, key=lambda tasks: max((task.end for task in tasks), default=0.0))


class Task(NamedTuple):
    """One task of a call; times in seconds since the first of them began."""

    thread: int
    stage: str
    begin: float
    end: float


@contextmanager
def mla_trace(capacity: int = 4096) -> Iterator[list[Task]]:
    """Collect the tasks of the kernel's calls; the list is filled at the end, and stays empty without the kernel.

    >>> with mla_trace() as tasks:
    ...     mla_preprocess(x, w, cos, sin, slots, cache)
    >>> {task.stage for task in tasks}

    Args:
        capacity: of tasks; further ones are dropped.
    """
    tasks: list[Task] = []
    if not native_library("mla_trace"):
        yield tasks
        return
    rows = torch.zeros((capacity, 4), dtype=torch.int64)
    torch.ops.opsmith.mla_trace.default(rows, True)
    try:
        yield tasks
    finally:
        used = min(capacity, torch.ops.opsmith.mla_trace.default(rows, False))
        found = rows[:used].tolist()
        start = min((begin for _, _, begin, _ in found), default=0)
        tasks += [
            Task(thread, STAGES[stage], (begin - start) * 1e-9, (end - start) * 1e-9)
            for thread, stage, begin, end in sorted(found, key=lambda row: row[2])
        ]


def draw(tasks: list[Task], path: Path, title: str) -> None:
    """The whole call, and larger the place where the stages meet: a row for each thread, a color for each stage."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "opsmith", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    threads = sorted({task.thread for task in tasks})
    meeting = [t for t in tasks if t.stage in ("norm of latent queries", "keys")]
    begin, end = min(t.begin for t in meeting), max(t.end for t in meeting)
    windows = [(0.0, max(t.end for t in tasks)), (begin - 0.2 * (end - begin), end + 0.2 * (end - begin))]
    figure, rows = pyplot.subplots(2, figsize=(9.0, 2.0 + 0.8 * len(threads)), layout="constrained")
    for axes, (left, right) in zip(rows, windows, strict=True):
        for stage, color in zip(STAGES, COLORS, strict=True):
            for thread in threads:
                bars = [
                    (t.begin * 1e3, (t.end - t.begin) * 1e3)
                    for t in tasks
                    if (t.thread, t.stage) == (thread, stage) and t.begin < right and t.end > left
                ]
                label = stage if thread == threads[0] else None
                axes.broken_barh(
                    bars, (thread - 0.4, 0.8), color=color, edgecolor="white", lw=0.2, label=label
                )
        axes.set(xlim=(left * 1e3, right * 1e3), yticks=threads)
        axes.set_yticklabels([f"thread {t}" for t in threads])
        axes.spines[["top", "right"]].set_visible(False)
    rows[0].set_title(title)
    rows[1].set_xlabel("milliseconds; below, the place where the stages meet")
    figure.legend(*rows[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def beside(tasks: list[Task]) -> float:
    """The share of the vector work (norms, keys) during which another thread streams weights."""
    streams = [t for t in tasks if t.stage == "heads" or t.stage.startswith("rows")]
    hidden = total = 0.0
    for task in tasks:
        if task in streams:
            continue
        total += task.end - task.begin
        shared = dict.fromkeys((t.thread for t in streams if t.thread != task.thread), 0.0)
        for other in streams:
            if other.thread in shared:
                shared[other.thread] += max(0.0, min(other.end, task.end) - max(other.begin, task.begin))
        hidden += max(shared.values(), default=0.0)
    return hidden / total if total else 0.0


def main(
    tokens: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1)] = 128,
    loops: Annotated[int, typer.Option(min=1)] = 10,
    hidden: Annotated[int, typer.Option(min=1)] = 7168,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    quant: Annotated[str | None, typer.Option(help="per_token, per_tensor or weight_int8.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where the SVG of the stages goes.")] = None,
) -> None:
    """Make the inputs, show the outputs, time the rungs, draw the stages."""
    s = Sizes(tokens=tokens, heads=heads, hidden=hidden)
    inputs = make_inputs(s, DTYPES[dtype], quant)
    typer.echo("inputs")
    for name in ("x", "cos", "sin", "slot_mapping"):
        typer.echo(show(name, inputs[name]))
    typer.echo(
        f"  weights       {inputs['w'].nbytes / 1e6:.1f} MB, read once a call ({inputs['w'].quant or dtype})"
    )
    cache = new_cache(s, DTYPES[dtype])
    q_out, q_rope = mla_preprocess(**inputs, cache=cache)
    typer.echo("outputs")
    typer.echo(show("q_out", q_out))
    typer.echo(show("q_rope", q_rope))
    slot = int(inputs["slot_mapping"][0])
    row = cache.latent[slot // s.block_size, slot % s.block_size, 0]
    typer.echo(show(f"cache[{slot}]", row))
    result = measure.compare(rungs(s, inputs, loops), rounds=5, budget_s=30.0, warmup=1)
    typer.echo(f"milliseconds a call, the median of 5 times {loops} loops, interleaved")
    for name in result.names:
        typer.echo(f"  {name:<28} {result.median(name) / loops * 1e3:8.3f}")
    tasks = trace(inputs, cache)
    if tasks:
        last = max(task.end for task in tasks)
        typer.echo(f"{len(tasks)} tasks in {last * 1e3:.3f} ms; while vector work ran, another thread")
        typer.echo(f"  streamed weights for {beside(tasks):.0%} of the time")
    if picture is not None:
        draw(tasks, picture, f"MLA pre-processing, {tokens} tokens, {heads} heads, {quant or dtype}")
        typer.echo(picture)


if __name__ == "__main__":
    typer.run(main)
