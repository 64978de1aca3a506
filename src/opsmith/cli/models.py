"""What `opsmith demo` and `opsmith optimize` say about a model: what was found and chosen, errors, times."""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import geometric_mean
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from opsmith import measure
from opsmith.cli.common import speedup, time_of

if TYPE_CHECKING:
    from opsmith.compiler.plan import Plan
    from opsmith.compiler.session import Session

Batch = Mapping[str, Tensor]
Call = Callable[[Batch], Tensor]

EAGER, COMPILED, OPSMITH = "eager", "torch.compile", "opsmith"
# Of rolled back sites and near misses a terminal shows this many, this wide.
_LINES, _WIDTH = 8, 220
_SLOW, _ENDLESS = 1.5, 4.0  # seconds of one call: fewer rounds, none


def found(session: Session) -> dict[str, dict[str, Any]]:
    """The operators of a model, how many sites each has and what these took in; graphs at other sizes count once."""
    fused: dict[str, Counter[str]] = {}
    for step in max((shape.steps for shape in session.plan.shapes), key=len, default=[]):
        into = fused.setdefault(step.operator, Counter())
        if " residual=" in step.signature:
            into["residual"] += 1
        if activation := re.search(r" activation=(\w+)", step.signature):
            into[activation[1]] += 1
    return {name: {"sites": n, "with": dict(fused.get(name, {}))} for name, n in session.report.found.items()}


@dataclass(frozen=True)
class Chosen:
    """What runs an operator's sites, at which sizes, and why.

    Attributes:
        sites: how many of them, at the sizes where there are fewest and most.
        reason: the commonest that was measured, if any was.
    """

    operator: str
    implementation: str
    sites: tuple[int, int]
    sizes: tuple[str, ...]
    reason: str


def chosen(plan: Plan) -> list[Chosen]:
    """The plan condensed: one row for each operator and implementation, over all sizes."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for shape in plan.shapes:
        for step in shape.steps:
            key = (step.operator, step.implementation)
            counts.setdefault(key, Counter())[shape.sizes or "fixed"] += 1
            reasons.setdefault(key, Counter())[step.reason] += 1
    rows = []
    for (operator, implementation), at in sorted(counts.items(), key=lambda item: item[0][0]):
        why = reasons[operator, implementation]
        measured = (reason for reason, _ in why.most_common() if "nearest" not in reason)
        reason = next(measured, next(iter(why)))
        sites = (min(at.values()), max(at.values()))
        rows.append(Chosen(operator, implementation, sites, tuple(at), reason))
    return rows


@dataclass(frozen=True)
class Error:
    """How far a result is from the exact one.

    Attributes:
        rms: root of the mean squared error, over the root mean square of the exact result.
        worst: the largest absolute error.
        cosine: the smallest cosine similarity of two rows.
    """

    rms: float
    worst: float
    cosine: float


def error_of(got: Tensor, exact: Tensor) -> Error:
    """The error of `got`, held against a float64 tensor of the same shape.

    >>> error_of(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float64)).worst
    0.0
    """
    if got.shape != exact.shape:
        raise ValueError(f"error_of: expected shape {tuple(exact.shape)}, got {tuple(got.shape)}")
    got = got.double()
    difference = got - exact
    scale = exact.square().mean().sqrt().item() or 1.0
    cosine = torch.nn.functional.cosine_similarity(got, exact, dim=-1).min().item()
    return Error(difference.square().mean().sqrt().item() / scale, difference.abs().max().item(), cosine)


def allowed(eager: Error, dtype: torch.dtype) -> float:
    """The error that a contestant may have, as a root mean square: twice eager's own and a unit in the last place."""
    return 2 * eager.rms + torch.finfo(dtype).eps


@contextmanager
def rounding_rows(layers: Sequence[nn.Module]) -> Iterator[None]:
    """For a while these layers round what they get to int8, row by row, as `int8_dynamic` does.

    A number in the middle of a step may go up or down: whoever rounds may be off by as much as rounding itself takes.
    """

    def rounded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        step = args[0].abs().amax(-1, keepdim=True) / 127
        return torch.where(step > 0, (args[0] / step).round() * step, args[0]), *args[1:]

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(rounded))
        yield


def race(
    contestants: Mapping[str, Call], batches: Sequence[Batch], exact: Tensor | None, dtype: torch.dtype
) -> measure.Comparison:
    """Time whole models against each other, interleaved, each held to the exact result first.

    A contestant's error may be as much as is `allowed`. Of 40 rounds those run that begin within four seconds, but five
    at least, and three where a call is slow. An eager model that takes four for a call is not timed; the notes say so.

    Args:
        contestants: by name; "eager" among them. Each gets a batch and gives its result.
        batches: batches of one shape, used in turn.
        exact: the float64 result for the first batch; None leaves out the check.
        dtype: the dtype that the models compute in.

    Raises:
        WrongResult: a contestant computed something else; nothing was timed.
    """
    start = time.perf_counter()
    first = contestants[EAGER](batches[0])
    seconds = time.perf_counter() - start
    endless = {EAGER: f"not timed: a call takes {seconds:.1f} s"} if seconds > _ENDLESS else {}
    check = None
    if exact is not None:
        bound, wide = allowed(error_of(first, exact), dtype), exact

        def check(got: Tensor) -> str | None:
            error = error_of(got, wide)
            return None if error.rms <= bound else f"relative error {error.rms:.2e} above {bound:.2e}"

    return measure.compare(
        {n: _in_turn(call, batches) for n, call in contestants.items() if n not in endless},
        check=check,
        rounds=40,
        # So many that all agree are a statement; of a model that takes half a second, each one more takes seconds.
        min_rounds=3 if seconds > _SLOW else 5,
        warmup=int(exact is None),  # to be checked, each has just run
        budget_s=4.0,
        notes={
            "inputs": f"{len(batches)} batches of random tokens in turn",
            "outputs": "freshly allocated",
            **endless,
        },
    )


def _in_turn(call: Call, batches: Sequence[Batch]) -> Callable[[], Tensor]:
    turns = itertools.cycle(batches)
    return lambda: call(next(turns))


def print_sites(console: Console, session: Session) -> None:
    """What was found, what was chosen and why, what came close, and what was rolled back."""
    lines = []
    for operator, one in found(session).items():
        fused = ", ".join(f"{n} with {what}" for what, n in one["with"].items())
        lines.append(f"{one['sites']} {operator}" + (f" ({fused})" if fused else ""))
    console.print("found: " + (", ".join(lines) or "no operator of ours"))
    every = {shape.sizes or "fixed" for shape in session.plan.shapes}
    table = Table("operator", "runs on", "sites", "at sizes", "why", box=None, pad_edge=False)
    for row in chosen(session.plan):
        few, many = row.sites
        table.add_row(
            row.operator,
            row.implementation,
            str(many) if few == many else f"{few} to {many}",
            "all" if len(every) > 1 and set(row.sizes) == every else ", ".join(row.sizes),
            row.reason,
        )
    console.print(table)
    report = session.report
    for line in report.quantized_lines:
        console.print(line)
    remarks = {
        "not quantized": [str(layer) for layer in report.quantized if not layer.of_few_bits],
        "rolled back": report.rolled_back,
        "not the fastest": report.overruled,
        "near miss": report.misses,
    }
    for what, lines in remarks.items():
        for line in lines[:_LINES]:
            console.print(f"{what}: {shorten(line, _WIDTH)}", style="yellow")
        if len(lines) > _LINES:
            console.print(f"{what}: {len(lines) - _LINES} more, all of them in the JSON", style="yellow")
    if report.sites and not (report.rolled_back or report.overruled or report.misses):
        console.print("every site within its tolerance; nothing rolled back, no near miss")
    for line in report.hints():
        console.print(line)


def print_times(console: Console, title: str, results: Mapping[str, measure.Comparison]) -> None:
    """Times by shape, with how many times faster opsmith is than each other contestant, and its interval."""
    others = _others(results)
    heads = (title, *others, OPSMITH, *(f"× {name}" for name in others))
    table = Table(*heads, box=None, pad_edge=False)
    for shape, result in results.items():
        timed = result.names
        times = [time_of(result.median(n)) if n in timed else result.notes[n] for n in (*others, OPSMITH)]
        ratios = [speedup(result.ratio(OPSMITH, n)) if n in timed else "" for n in others]
        table.add_row(shape, *times, *ratios)
    if len(results) > 1:
        means = [f"{mean_speedup(results.values(), name):.2f}" for name in others]
        table.add_row("geometric mean", *([""] * (len(others) + 1)), *means)
    console.print(table)
    loud = [
        f"{shape} {name} {result.spread(name):.0%}"
        for shape, result in results.items()
        for name in result.names
        if result.spread(name) > measure.CONCLUDES_NOTHING
    ]
    if loud:
        console.print(f"samples spread too far to conclude from: {', '.join(loud)}", style="yellow")


def mean_speedup(results: Iterable[measure.Comparison], base: str) -> float:
    """How many times faster opsmith is than `base`, as the geometric mean over the shapes at which it was timed."""
    return geometric_mean(result.ratio(OPSMITH, base).speedup for result in results if base in result.names)


def _others(results: Mapping[str, measure.Comparison]) -> list[str]:
    return [n for n in dict.fromkeys(n for r in results.values() for n in r.names) if n != OPSMITH]


def outcome(
    session: Session, errors: Mapping[str, Error], times: Mapping[str, measure.Comparison]
) -> dict[str, Any]:
    """What was found, chosen and planned, what it lost and gained, for machines; times are by shape."""
    bases = _others(times)
    return {
        "found": found(session),
        "chosen": [asdict(row) for row in chosen(session.plan)],
        "report": session.report.to_dict(),
        "plan": asdict(session.plan),
        "errors": {who: asdict(error) for who, error in errors.items()},
        "times": {shape: result.to_json() for shape, result in times.items()},
        "ratios": {
            shape: {base: result.ratio(OPSMITH, base).to_json() for base in bases if base in result.names}
            for shape, result in times.items()
        },
        "geometric_means": {base: mean_speedup(times.values(), base) for base in bases},
    }
