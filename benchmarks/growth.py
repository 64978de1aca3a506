"""How time and memory grow: with the context, the batch, the vocabulary, and a model's layers and width.

    python benchmarks/growth.py                     # all of it, six minutes on two cores
    python benchmarks/growth.py context --quick     # one axis, and less of it
    python benchmarks/growth.py --json FILE --svg docs/assets   # docs/assets/growth-context.svg and so on

Each point is one call in float32, ours and eager's in turns, with nothing in the caches, beside the roofs. The line in
the pictures is the least time for what has to be done: the bytes and operations that the operator's card counts, or of
a model the weights and the operations that PyTorch counts, over the bandwidth and the matmul rate of the same rounds.
Memory is the most that a call takes beyond its inputs and weights, and beyond the buffers that an optimized model keeps
from call to call. Where a result is wrong, the run ends.
"""

from __future__ import annotations

import copy
import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.flop_counter import FlopCounterMode

import opsmith
import opsmith.ops  # the cards register themselves
from opsmith import measure
from opsmith.cli import models, pictures
from opsmith.cli.common import Output, size_of, time_of
from opsmith.cli.models import EAGER, OPSMITH
from opsmith.operator import Cost, registry

TOKENS = 64  # of a model's prompt, and rows of a loss
BLOCK = 16  # tokens of a cache's block
ROOFS = ("read", "matmul float32")


@dataclass(frozen=True)
class Point:
    """What is timed at one size: the ways to do it, whether a result is right, and what it takes at least."""

    ways: Mapping[str, Callable[[], torch.Tensor]]
    check: Callable[[torch.Tensor], str | None]
    cost: Cost


@dataclass(frozen=True)
class Curve:
    """Something that grows along an axis: a point for each size."""

    axis: str
    name: str
    over: str  # what a size is, for people
    sizes: Sequence[int]
    point: Callable[[int], Point]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def of_card(
    name: str, *args: torch.Tensor, parts: Sequence[tuple[Any, Sequence[torch.Tensor]]] = (), **kwargs: Any
) -> Point:
    """An operator's call, held to its card's tolerance.

    `parts`: of a result that float64 has no memory for, some parts and the arguments that give them alone.
    """
    card = registry()[name]
    eager = card.eager(*args, **kwargs)
    held = []
    for where, some in parts or [(..., args)]:
        wide = [t.double() if t.is_floating_point() else t for t in some]
        held.append((where, card.reference(*wide, **kwargs)))

    def check(got: torch.Tensor) -> str | None:
        verdict = card.tolerance.check_parts((got[where], eager[where], exact) for where, exact in held)
        return None if verdict.ok else verdict.why

    ways = {EAGER: partial(card.eager, *args, **kwargs), OPSMITH: partial(card.function, *args, **kwargs)}
    return Point(ways, check, card.cost(*args, **kwargs))


def prompt(batch: int, length: int) -> Point:
    """Attention of a whole prompt, 8 heads of 64 that share 2 heads of keys; its two ends of 64 tokens are checked."""
    q, k, v = (_normal(batch, heads, length, 64) for heads in (8, 2, 2))
    first, last = (..., slice(64), slice(None)), (..., slice(-64, None), slice(None))
    parts = [(first, (q[first], k[first], v[first])), (last, (q[last], k, v))]
    return of_card("attention", q, k, v, parts=parts, causal=True)


def decode(batch: int, keys: int) -> Point:
    """Attention of one token to the keys behind it, 32 heads of 128 that share 8."""
    q, k, v = _normal(batch, 32, 1, 128), _normal(batch, 8, keys, 128), _normal(batch, 8, keys, 128)
    return of_card("attention", q, k, v)


def paged(batch: int, keys: int) -> Point:
    """The same on a cache in blocks, which lie in no order."""
    blocks = batch * keys // BLOCK
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).view(batch, -1).int()
    cache = [_normal(blocks, BLOCK, 8, 128) for _ in range(2)]
    lengths = torch.full((batch,), keys, dtype=torch.int32)
    return of_card("paged_attention", _normal(batch, 32, 128), *cache, order, lengths)


def lookup(vocabulary: int) -> Point:
    return of_card("embedding", _ids(vocabulary, 1024), _normal(vocabulary, 256))


def loss(vocabulary: int) -> Point:
    return of_card("cross_entropy", _normal(TOKENS, vocabulary), _ids(vocabulary, TOKENS))


def head(vocabulary: int) -> Point:
    """The loss with the layer in front of it."""
    weight = _normal(vocabulary, 256) * 0.05
    return of_card("linear_cross_entropy", _normal(TOKENS, 256), weight, _ids(vocabulary, TOKENS))


def llama(layers: int, width: int, batch: int = 1) -> Point:
    """A whole Llama with random weights, on a prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(width // 128, 1),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        eager = LlamaForCausalLM(config).eval()
    inputs = {"input_ids": _ids(4096, batch, TOKENS), "use_cache": False}
    exact = copy.deepcopy(eager).double()(**inputs).logits
    allowed = models.allowed(models.error_of(eager(**inputs).logits, exact), torch.float32)
    fast = copy.deepcopy(eager)
    opsmith.optimize(fast, inputs)

    def check(got: torch.Tensor) -> str | None:
        error = models.error_of(got, exact).rms
        return None if error <= allowed else f"relative error {error:.1e}, allowed {allowed:.1e}"

    with FlopCounterMode(display=False) as counted:
        eager(**inputs)
    read = sum(p.nbytes for p in eager.parameters()) - eager.model.embed_tokens.weight.nbytes
    ways = {EAGER: lambda: eager(**inputs).logits, OPSMITH: lambda: fast(**inputs).logits}
    return Point(ways, check, Cost(counted.get_total_flops(), read))


def powers(first: int, last: int) -> list[int]:
    """Each twice the one before it."""
    return [first << i for i in range((last // first).bit_length())]


CONTEXT, BATCH, VOCABULARY = powers(128, 16384), powers(1, 64), [*powers(32_000, 512_000), 1_000_000]
CURVES = (
    Curve("context", "attention of a prompt", "tokens", CONTEXT, partial(prompt, 1)),
    Curve("context", "attention of one token", "keys", CONTEXT, partial(decode, 1)),
    Curve("context", "paged_attention of one token", "keys", CONTEXT, partial(paged, 1)),
    Curve("batch", "attention of a prompt of 256", "sequences", BATCH, lambda n: prompt(n, 256)),
    Curve("batch", "paged_attention on 512 keys", "sequences", BATCH, lambda n: paged(n, 512)),
    Curve("batch", "a Llama, 4 layers of 256", "sequences", powers(1, 16), lambda n: llama(4, 256, n)),
    Curve("vocabulary", "embedding", "words", VOCABULARY, lookup),
    Curve("vocabulary", "cross_entropy", "words", VOCABULARY, loss),
    Curve("vocabulary", "linear_cross_entropy", "words", VOCABULARY, head),
    Curve("model", "a Llama of width 256", "layers", powers(1, 16), lambda n: llama(n, 256)),
    Curve("model", "a Llama of 4 layers", "features", powers(128, 1024), lambda n: llama(4, n)),
)
AXES = list(dict.fromkeys(curve.axis for curve in CURVES))


def measured(point: Point, rounds: int, seconds: float) -> dict[str, Any]:
    """Time, memory and the least time of one point."""
    peak = {name: measure.peak_bytes(call) for name, call in point.ways.items()}
    found = measure.compare(
        point.ways,
        check=point.check,
        flush=measure.CacheFlush(),
        roofs=measure.RoofProbes(ROOFS, sizes=(512,)),
        rounds=rounds,
        budget_s=seconds,
        warmup=1,
        notes={"outputs": "freshly allocated"},
    )
    assert found.roofs is not None
    cost = point.cost
    least = max(cost.min_bytes / found.roofs.bandwidth(), cost.flops / found.roofs.matmul(torch.float32))
    ours = [name for name in found.samples if name in point.ways]
    return {
        "seconds": {name: found.median(name) for name in ours},
        "spread": {name: found.spread(name) for name in ours},
        "samples": {name: list(found.samples[name]) for name in ours},
        "least_seconds": least,
        "flops": cost.flops,
        "min_bytes": cost.min_bytes,
        "peak_bytes": peak,
        "ratio": found.ratio(OPSMITH, EAGER).to_json(),
        "roofs": found.roofs.to_json(),
        "messages": list(found.messages),
    }


def run(axes: Sequence[str], quick: bool, seconds: float, output: Output) -> Iterator[dict[str, Any]]:
    """The curves of some axes; quickly: the two smallest sizes of each, in three rounds."""
    for curve in (curve for curve in CURVES if curve.axis in axes):
        output.console.print(f"\n{curve.axis}: {curve.name}")
        points = []
        for size in curve.sizes[:2] if quick else curve.sizes:
            with torch.no_grad():
                point = measured(curve.point(size), *((3, 0.1) if quick else (15, seconds)))
            points.append({"size": size, **point})
            took = "  ".join(
                f"{name} {time_of(point['seconds'][name])}, {size_of(point['peak_bytes'][name])}"
                for name in point["seconds"]
            )
            output.console.print(
                f"  {size:>8} {curve.over}  {took}, at least {time_of(point['least_seconds'])}"
            )
        yield {"axis": curve.axis, "name": curve.name, "over": curve.over, "points": points}


def draw(data: Mapping[str, Any], axis: str, file: Path) -> None:
    """A row for each curve of an axis: its time beside the least there can be, and its memory."""
    curves = [curve for curve in data["curves"] if curve["axis"] == axis]
    pyplot = pictures.pyplot()
    from matplotlib.ticker import LogLocator

    figure, axes = pyplot.subplots(
        len(curves), 2, figsize=(9, 2.7 * len(curves)), layout="constrained", squeeze=False
    )
    for (time, memory), curve in zip(axes, curves, strict=True):
        sizes = [point["size"] for point in curve["points"]]
        for i, name in enumerate((EAGER, OPSMITH)):
            style = {"color": f"C{i}", "label": name, "markersize": 4}
            time.plot(sizes, [1e3 * p["seconds"][name] for p in curve["points"]], "o-", **style)
            memory.plot(sizes, [p["peak_bytes"][name] / 2**20 for p in curve["points"]], "o-", **style)
        least = [1e3 * p["least_seconds"] for p in curve["points"]]
        time.plot(sizes, least, "--", color="gray", label="least by bytes and operations")
        time.set(ylabel="ms a call", title=curve["name"])
        memory.set(ylabel="MiB beyond inputs", title=curve["name"])
        for panel in (time, memory):
            panel.set(xlabel=curve["over"], xscale="log", yscale="log")
            panel.set_xticks(sizes, [short(size) for size in sizes], rotation=45)
            panel.minorticks_off()
            low, high = panel.get_ylim()
            panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 200 * low else (1,)))
            panel.yaxis.set_major_formatter("{x:g}")
            panel.grid(color="0.9")
    axes[0][0].legend(fontsize=7, frameon=False)
    machine = data["machine"]
    where = f"{machine['cpu']}, {machine['threads']} threads, {data['taken'][:10]}, float32"
    figure.suptitle(where, fontsize=9)
    pictures.save("--svg", figure, file)


def short(size: int) -> str:
    """A size as axes and tables name it.

    >>> [short(size) for size in (64, 2048, 128_000, 1_000_000)]
    ['64', '2Ki', '128k', '1M']
    """
    if size >= 1024 and not size & (size - 1):
        return f"{size // 1024}Ki"
    return next(
        (f"{size // n}{unit}" for n, unit in ((10**6, "M"), (10**3, "k")) if size % n == 0), str(size)
    )


def main(
    axes: Annotated[
        list[str] | None, typer.Argument(metavar="AXIS", help=f"Of {', '.join(AXES)}; all.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For each point; five rounds at least.")] = 4.0,
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes of each, three rounds.")] = False,
    json: Annotated[str | None, typer.Option(metavar="FILE", help="Write the JSON there.")] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw growth-AXIS.svg there.")] = None,
) -> None:
    """Time and memory of operators and whole models as they grow."""
    chosen = axes or AXES
    if wrong := [axis for axis in chosen if axis not in AXES]:
        raise typer.BadParameter(
            f"{wrong[0]!r} is not known; there are: {', '.join(AXES)}", param_hint="AXIS"
        )
    for axis in chosen if svg is not None else ():
        pictures.check_file("--svg", svg / f"growth-{axis}.svg")
    output, before = Output(json), os.getloadavg()
    data = {
        "taken": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": measure.describe().to_json(),
        "curves": list(run(chosen, quick, seconds, output)),
        "load": {"before": before, "after": os.getloadavg()},
    }
    for axis in chosen if svg is not None else ():
        draw(data, axis, svg / f"growth-{axis}.svg")
    output.finish(data)


if __name__ == "__main__":
    typer.run(main)
