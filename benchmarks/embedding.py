"""Where a quantized table, a cache and prefetching help an embedding, and where they do not.

Example: python benchmarks/embedding.py --seconds 2
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer

from opsmith import measure
from opsmith.measure.machine import describe
from opsmith.operator import registry
from opsmith.ops import QuantizedEmbedding, embedding
from opsmith.ops.embedding.quantized import CARD

TABLES = ((32_000, 1024), (128_000, 1024), (1_000_000, 256))  # rows and their width: 1.5 GB in all at a time
TRAINED = 32_000  # the table that is also trained
TOKENS = 2048
CALLS = 64  # id tensors, taken in turn
CACHE_ROWS = (1024, 8192)
PREFETCH = 8
SAMPLE_SECONDS = (
    4e-3  # some calls each, so that what ran before them, and left its memory in the caches, counts little
)


def ids_of(kind: str, rows: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Ids for each call: uniform, or by Zipf's law, in which the k-th most frequent token comes 1/k as often."""
    if kind == "uniform":
        return list(torch.randint(0, rows, (CALLS, TOKENS), generator=generator).unbind())
    share = (1 / torch.arange(1, rows + 1, dtype=torch.float64)).cumsum(0)
    drawn = torch.rand(CALLS, TOKENS, generator=generator, dtype=torch.float64) * share[-1]
    names = torch.randperm(rows, generator=generator)  # frequent tokens stand anywhere in the table
    return list(names[torch.searchsorted(share, drawn).clamp_(max=rows - 1)].unbind())


def in_turn(fn: Callable[[torch.Tensor], object], calls: list[torch.Tensor]) -> Callable[[], object]:
    """A contestant that takes the next ids at each call."""
    turn = 0

    def run() -> object:
        nonlocal turn
        turn = (turn + 1) % len(calls)
        return fn(calls[turn])

    return run


def settings(
    quantized: QuantizedEmbedding, calls: list[torch.Tensor]
) -> tuple[dict[str, QuantizedEmbedding], dict[str, float]]:
    """The same table without and with prefetching and caches, the caches filled; and the caches' hit rates."""
    found = {"int8": quantized._twin(0, 0), f"int8, prefetch={PREFETCH}": quantized._twin(PREFETCH, 0)}
    for rows in CACHE_ROWS:
        found[f"int8, cache_rows={rows}"] = quantized._twin(0, rows)
    both = max(CACHE_ROWS)
    found[f"int8, cache_rows={both}, prefetch={PREFETCH}"] = quantized._twin(PREFETCH, both)
    rates = {}
    for name, module in found.items():
        for _ in range(2):  # the second round shows what a cache that has been filled finds
            before = module.cache_info().hits
            for ids in calls:
                module(ids)
        rates[name] = (module.cache_info().hits - before) / (CALLS * TOKENS)
    return found, rates


def check(name: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    """A wrong result prints no time."""
    measure.compare_outputs(name, got, exact.double())


def rows_of(quantized: QuantizedEmbedding, ids: torch.Tensor) -> torch.Tensor:
    """What the int8 table says, in float64."""
    return quantized.table[ids].double() * quantized.scale[ids].double()[..., None]


def many_tokens(
    table: torch.Tensor, quantized: QuantizedEmbedding, kind: str, seconds: float
) -> dict[str, Any]:
    """One vocabulary, one distribution: all contestants, beside the roofs."""
    rows, width = table.shape
    calls = ids_of(kind, rows, torch.Generator().manual_seed(0))
    modules, rates = settings(quantized, calls)
    contestants: dict[str, Callable[[torch.Tensor], object]] = {
        "PyTorch float32": lambda ids: F.embedding(ids, table),
        "opsmith float32": lambda ids: embedding(ids, table),
        **modules,
    }
    exact = {True: F.embedding(calls[0], table), False: rows_of(quantized, calls[0])}
    for name, fn in contestants.items():
        check(name, fn(calls[0]), exact["float32" in name])  # type: ignore[arg-type]
    found = measure.compare(
        {name: in_turn(fn, calls) for name, fn in contestants.items()},
        roofs=measure.RoofProbes(("copy",)),
        min_time=SAMPLE_SECONDS,
        budget_s=seconds,
        notes={"outputs": "fresh, of a size that malloc reuses", "ids": f"{CALLS} x {TOKENS}, {kind}"},
    )
    assert found.roofs is not None
    copy = found.roofs.bandwidth("copy")
    dense = registry()["embedding"].cost(calls[0], table).min_bytes
    narrow = registry()["quantized_embedding"].cost(calls[0], quantized.table, quantized.scale).min_bytes
    lines = {}
    for name in found.names:
        bytes_moved = dense if "float32" in name else narrow
        against = None if name == "PyTorch float32" else found.ratio(name, "PyTorch float32").to_json()
        plain = found.ratio(name, "int8").to_json() if name.startswith("int8,") else None
        lines[name] = {
            "seconds": found.median(name),
            "bytes": bytes_moved,
            "roof_fraction": bytes_moved / found.median(name) / copy,
            "ratio_to_pytorch": against,
            "ratio_to_int8": plain,
            "hit_rate": rates.get(name),
            "cache_bytes": modules[name].cache_info().nbytes if name in modules else None,
        }
    tuned = quantized._twin(0, 0)
    chosen = tuned.autotune(torch.stack(calls), cache_rows=CACHE_ROWS, budget_s=seconds / 2)
    return {
        "rows": rows,
        "width": width,
        "ids": kind,
        "tokens": TOKENS,
        "table_bytes": {"float32": table.nbytes, "int8": quantized.nbytes},
        "distinct_bytes_of_all_calls": int(torch.cat(calls).unique().numel()) * width * 4,
        "contestants": lines,
        "autotune": {"prefetch": chosen.prefetch, "cache_rows": chosen.cache_rows, "seconds": chosen.seconds},
        "comparison": found.to_json(),
    }


def one_token(table: torch.Tensor, quantized: QuantizedEmbedding, seconds: float) -> dict[str, Any]:
    """Decoding: one id a call, a row that is in no cache, one that is, and one that was asked for in time."""
    generator = torch.Generator().manual_seed(1)
    likely = torch.randint(0, table.shape[0], (16384, 8), generator=generator)
    cold = [row[:1] for row in likely]

    def asked_for(ids: torch.Tensor) -> object:
        quantized.prefetch_rows(ids)
        return quantized(ids[:1])

    check("int8, one token", quantized(cold[0]), rows_of(quantized, cold[0]))
    found = measure.compare(
        {
            "PyTorch float32": in_turn(lambda ids: F.embedding(ids, table), cold),
            "PyTorch int8": in_turn(lambda ids: CARD.reference(ids, quantized.table, quantized.scale), cold),
            "opsmith float32": in_turn(lambda ids: embedding(ids, table), cold),
            "int8": in_turn(quantized, cold),
            "int8, the same row each time": in_turn(quantized, cold[:1]),
            "int8 after prefetch_rows of 8": in_turn(asked_for, list(likely)),
        },
        budget_s=seconds,
        notes={"ids": "16384 x 1, uniform"},
    )
    return {
        "rows": table.shape[0],
        "width": table.shape[1],
        "tokens": 1,
        "contestants": {name: {"seconds": found.median(name)} for name in found.names},
        "comparison": found.to_json(),
    }


def large_result(table: torch.Tensor, seconds: float) -> dict[str, Any]:
    """A result that outlives the caches, in fresh memory and in memory that was used before."""
    tokens = 4 * TOKENS
    generator = torch.Generator().manual_seed(2)
    calls = list(torch.randint(0, table.shape[0], (16, tokens), generator=generator).unbind())
    out = torch.zeros(tokens, table.shape[1], dtype=table.dtype)
    exact = F.embedding(calls[0], table)
    contestants: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "PyTorch": lambda ids: F.embedding(ids, table),
        "opsmith": lambda ids: embedding(ids, table),
        "PyTorch, out=": lambda ids: torch.index_select(table, 0, ids, out=out),
        "opsmith, out=": lambda ids: embedding(ids, table, out=out),
    }
    for name, fn in contestants.items():
        check(name, fn(calls[0]), exact)
    found = measure.compare(
        {name: in_turn(fn, calls) for name, fn in contestants.items()},
        roofs=measure.RoofProbes(("copy",)),
        budget_s=seconds,
        notes={"outputs": "fresh, unless the name says out=", "ids": f"16 x {tokens}, uniform"},
    )
    moved = registry()["embedding"].cost(calls[0], table).min_bytes
    assert found.roofs is not None
    lines = {}
    for name in found.names:
        base = "PyTorch, out=" if "out=" in name else "PyTorch"
        fraction = found.roofs.fraction(
            found.median(name), flops=0, bytes=moved, memory="copy", cold=found.cold
        )
        ratio = None if name == base else found.ratio(name, base).to_json()
        lines[name] = {"seconds": found.median(name), "roof_fraction": fraction, "ratio_to_pytorch": ratio}
    return {**sizes(table, tokens, "a large result"), "contestants": lines, "comparison": found.to_json()}


def training(rows: int, width: int, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """Forward and backward, with a dense gradient in fresh memory."""
    table = torch.zeros(rows, width, dtype=dtype, requires_grad=True)
    calls = ids_of("zipf", rows, torch.Generator().manual_seed(3))[:16]
    dy = torch.ones(TOKENS, width, dtype=dtype)

    def step(fn: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(fn(ids, table), table, dy)[0]

    exact = torch.bincount(calls[0], minlength=rows)[:, None].expand(rows, width)
    check("opsmith backward", step(embedding, calls[0]), exact.to(dtype))
    found = measure.compare(
        {
            "PyTorch": in_turn(lambda ids: step(F.embedding, ids), calls),
            "opsmith": in_turn(lambda ids: step(embedding, ids), calls),
        },
        budget_s=seconds,
        notes={"outputs": "fresh", "ids": f"16 x {TOKENS}, zipf"},
    )
    lines: dict[str, Any] = {name: {"seconds": found.median(name)} for name in found.names}
    lines["opsmith"]["ratio_to_pytorch"] = found.ratio("opsmith", "PyTorch").to_json()
    return {
        **sizes(table, TOKENS, "forward and backward"),
        "contestants": lines,
        "comparison": found.to_json(),
    }


def sizes(table: torch.Tensor, tokens: int, what: str) -> dict[str, Any]:
    """What a result is about."""
    kind = str(table.dtype).removeprefix("torch.")
    return {"rows": table.shape[0], "width": table.shape[1], "tokens": tokens, "ids": f"{what}, {kind}"}


def show(result: dict[str, Any]) -> None:
    title = f"{result['rows']} x {result['width']}, {result.get('ids', 'uniform')}, {result['tokens']} tokens"
    typer.echo(f"\n{title}")
    for name, line in result["contestants"].items():
        ratio = line.get("ratio_to_pytorch")
        typer.echo(
            f"  {name:34} {line['seconds'] * 1e6:9.2f} µs"
            + (f"  {line['roof_fraction']:4.0%} of copy" if line.get("roof_fraction") else "")
            + (f"  {1 / ratio['median']:.2f} x PyTorch, {ratio['verdict']}" if ratio else "")
            + (f"  hits {line['hit_rate']:.0%}" if line.get("hit_rate") else "")
        )
    if "autotune" in result:
        chosen = result["autotune"]
        typer.echo(f"  autotune: prefetch={chosen['prefetch']}, cache_rows={chosen['cache_rows']}")


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="For each comparison.")] = 2.0,
    only: Annotated[int | None, typer.Option(help="The vocabulary of this many rows alone.")] = None,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(__file__).parent / "results",
) -> None:
    """Time float and int8 embeddings, with and without cache and prefetching, and write what was found."""
    results = []
    with torch.no_grad():
        for rows, width in TABLES:
            if only not in (None, rows):
                continue
            table = torch.empty(rows, width).normal_(generator=torch.Generator().manual_seed(0))
            quantized = QuantizedEmbedding.from_float(table)
            for kind in ("uniform", "zipf"):
                results.append(many_tokens(table, quantized, kind, seconds))
                show(results[-1])
            results.append(one_token(table, quantized, seconds / 2))
            show(results[-1])
            if rows == TRAINED:
                for dtype in (torch.float32, torch.bfloat16):
                    results.append(large_result(table.to(dtype), seconds))
                    show(results[-1])
                    results.append(training(rows, width, dtype, seconds))
                    show(results[-1])
            del table, quantized
    machine = describe()
    cpu = re.sub(r"[^a-z0-9]+", "-", machine.cpu.lower()).strip("-")
    path = out / f"embedding-{datetime.date.today().isoformat()}-{cpu}.json"
    path.write_text(json.dumps({"machine": machine.to_json(), "results": results}, indent=1) + "\n")
    typer.echo(f"\n{path}")


if __name__ == "__main__":
    typer.run(main)
