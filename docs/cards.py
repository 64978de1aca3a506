"""Writes into the pages of the operators what their cards say, when the site is built: nothing is listed by hand.

`<!-- operators -->` on a page becomes the table of all operators. A page `operators/NAME.md` gets the card of that
name, or the cards of the folder `ops/NAME` without a page of their own, at `<!-- cards -->` or at its end, with the
newest numbers of each machine in `benchmarks/results` and a picture of them.
"""

from __future__ import annotations

import functools
import inspect
import io
import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import opsmith.ops
from opsmith.cli import pictures
from opsmith.measure.stats import CONCLUDES_NOTHING
from opsmith.operator import Make, Operator, registry

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NOTHING = "no conclusion"
GUIDE = re.compile(r"\]\(guide/([\w-]+)\.md\)")  # a link to a page of the guide
NUMBER = re.compile(r"(<td[^>]*>\d[\d.]*e)-(?=\d+</td>)")  # 1.6e-02 in a cell of a table


def on_files(files: Any, config: Any) -> None:
    """Called by MkDocs once: adds the pictures of what was measured."""
    from mkdocs.structure.files import File

    for card in registry().values():
        if fractions(card):
            files.append(File.generated(config, f"operators/{picture(card)}", content=drawn(card)))


def on_nav(nav: Any, **_: Any) -> None:
    """Called by MkDocs once: what a newcomer reads comes first, as the first page names it; decisions come last."""
    places = {"Guide": 1, "Decisions": 3}
    nav.items.sort(key=lambda item: places.get(item.title, 2) if item.is_section else 0)
    named = GUIDE.findall((Path(__file__).parent / "index.md").read_text())
    for guide in [item for item in nav.items if item.title == "Guide"]:
        guide.children.sort(key=lambda page: named.index(page.file.name))


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs for each page: a line may break behind a hyphen, and no number may break."""
    return NUMBER.sub("\\1\u2011", html)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by MkDocs for each page."""
    markdown = markdown.replace(
        "<!-- operators -->",
        overview(card for card in registry().values() if card.name in opsmith.ops.__all__),
    )
    folder, _, name = page.file.src_uri.rpartition("/")
    stem = name.removesuffix(".md")
    cards = [card for card in registry().values() if page_of(card) == stem]
    if folder != "operators" or not cards:
        return markdown
    tables = "\n\n".join(described(card) for card in cards)
    if "<!-- cards -->" in markdown:
        return markdown.replace("<!-- cards -->", tables)
    return f"{markdown.rstrip()}\n\n{tables}\n"


def page_of(card: Operator) -> str:
    """The stem of the operator's page: its own name, or that of the folder that holds it."""
    family = str(card.function.__module__).removeprefix("opsmith.ops.").partition(".")[0]
    return card.name if (Path(__file__).parent / "operators" / f"{card.name}.md").exists() else family


def overview(cards: Iterable[Operator]) -> str:
    """One row for each operator: how it is called, what it does, what computes it."""
    rows = [
        (
            f"[{card.name}]({page})" if (page := link(card)) else card.name,
            f"`{signature(card)}`",
            sentence(card),
            card.kind.value,
            "yes" if card.differentiable else "no",
            ", ".join(implementation.name for implementation in card.implementations),
            f"{card.tolerance.factor:g} × + {card.tolerance.ulps:g}",
        )
        for card in cards
    ]
    heads = (
        "operator",
        "call",
        "what it does",
        "kind",
        "backward",
        "implementations, as they are tried",
        "error",
    )
    return table(heads, rows)


def link(card: Operator) -> str:
    """The page of the operator, if there is one, seen from its neighbors."""
    page = f"{page_of(card)}.md"
    return page if (Path(__file__).parent / "operators" / page).exists() else ""


def described(card: Operator) -> str:
    """The card as a section of its operator's page."""
    patterns = "; ".join(f"`{pattern.name}`" for pattern in card.patterns)
    where = {"any": "any device"}
    facts = [
        ("call", f"`opsmith.ops.{signature(card)}`"),
        ("kind", card.kind.value),
        ("dtypes", ", ".join(short(dtype) for dtype in card.dtypes)),
        ("backward", "yes" if card.differentiable else "no"),
        ("tolerance", tolerance(card)),
        (
            "implementations",
            "; ".join(f"{i.name} ({where.get(i.device, i.device)})" for i in card.implementations),
        ),
        ("recognized in models as", patterns or "nothing: it is called by name"),
        ("in the dispatcher", "<br>".join(f"`opsmith::{schema}`" for schema in card.schemas) or "nothing"),
        ("source", card.source or "none"),
    ]
    parts = [f"## The card of `{card.name}`", table(("", ""), facts), *costs(card), *measured(card)]
    return "\n\n".join(parts)


def public(card: Operator) -> Any:
    """What a program calls; a card of a cache has a form of its own beside it, on tensors alone."""
    return getattr(opsmith.ops, card.name, card.function)


def signature(card: Operator) -> str:
    """The call as one writes it, without types."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(public(card)).parameters.values()
    ]
    return f"{card.name}{inspect.Signature(parameters)}"


def sentence(card: Operator) -> str:
    function = public(card)
    return (inspect.getdoc(getattr(function, "func", function)) or "").partition("\n")[0].rstrip(".")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tolerance(card: Operator) -> str:
    rule = card.tolerance
    return (
        f"against float64, {rule.factor:g} × eager PyTorch's own error in the same dtype, plus {rule.ulps:g} unit in "
        "the last place at the output's scale"
    )


class Shapes(Make):
    """Makes numbers without any memory behind them; ids and lengths are real, since a cost may depend on them."""

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device="meta")


def costs(card: Operator) -> Iterator[str]:
    """The least work of each workload, as the card counts it; nothing is computed for this."""
    if card.workloads is None:
        return
    samples = card.workloads(Shapes(torch.bfloat16))
    found = [(sample.name, card.cost(*sample.args, **sample.kwargs)) for sample in samples]
    rows = [
        (name, f"{cost.flops / 1e6:,.3g}", f"{cost.min_bytes / 1e6:,.3g}", f"{cost.intensity:.3g}")
        for name, cost in found
    ]
    yield "The least that its workloads cost, in bfloat16:"
    yield table(("workload", "10⁶ operations", "MB read and written", "operations a byte"), rows)


def measured(card: Operator) -> Iterator[str]:
    """What the newest results of each machine say: a file may hold some operators or dtypes only."""
    if fractions(card):
        yield f"![Each workload's part of the roof that was probed beside it]({picture(card)})"
    for where, found in newest(card).items():
        rows = [row(benchmark) for *_, benchmark in found]
        bases = list(dict.fromkeys(base for *_, ratios in rows for base in ratios))
        files = "; ".join(
            dict.fromkeys(
                f"{run['taken'][:10]}, torch {run['versions']['torch']}, commit {run['commit']}"
                f"{since(run['commit'], Path(inspect.getfile(card.function)).parent)}, {stem}.json"
                for stem, run, _ in found
            )
        )
        yield (
            f"Measured on {where} ({files}): the fastest of ours, where an output is used again, and of the roof "
            "probed beside it; × is how many times faster, a fresh output against a fresh output. "
            "[What allows no conclusion](../results.md#how-it-is-measured) has no number."
        )
        yield table(
            ("workload", "dtype", "direction", "time", "of the roof", *(f"× {base}" for base in bases)),
            [
                (
                    *cells,
                    NOTHING if part is None else f"{part:.0%}",
                    *(ratios.get(base, "") for base in bases),
                )
                for *cells, part, ratios in rows
            ],
        )


@functools.cache
def since(commit: str, folder: Path) -> str:
    """How often an operator's folder has changed since; nothing where git knows no such commit."""
    counted = subprocess.run(
        ("git", "rev-list", "--count", f"{commit}..HEAD", "--", "."),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    times = int(counted.stdout) if counted.returncode == 0 else 0
    return f", since which its folder has changed {times} time{'s' * (times > 1)}" if times else ""


Measured = tuple[str, dict[str, Any], dict[str, Any]]


def newest(card: Operator) -> dict[str, list[Measured]]:
    """By machine: stem and contents of the file, and one benchmark of it, from the newest run of each dtype."""
    latest: dict[tuple[str, str], list[Measured]] = {}
    for stem, run in runs(RESULTS):
        machine = run["machine"]
        where = machine["gpu"] or f"{machine['cpu']}, {machine['threads']} threads"
        found: dict[str, list[Measured]] = {}
        for benchmark in run["benchmarks"]:
            if benchmark["operator"] == card.name:
                found.setdefault(benchmark["dtype"], []).append((stem, run, benchmark))
        latest.update({(where, dtype): benchmarks for dtype, benchmarks in found.items()})
    places: dict[str, list[Measured]] = {}
    for (where, _), benchmarks in sorted(latest.items()):
        places.setdefault(where, []).extend(benchmarks)
    return places


def fractions(card: Operator) -> list[tuple[str, float]]:
    """What each bar of the picture is called, and the part of the roof that it shows."""
    bars = []
    for found in newest(card).values():
        for *_, benchmark in found:
            workload, dtype, direction, _, part, _ = row(benchmark)
            if part is not None:
                bars.append((f"{workload}, {dtype}, {direction}", part))
    return bars


def picture(card: Operator) -> str:
    return f"measured/{card.name}.svg"


def drawn(card: Operator) -> bytes:
    """The picture: a bar for each workload, and the roof as a line."""
    pyplot = pictures.pyplot()
    names, parts = zip(*reversed(fractions(card)), strict=True)
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.26 * len(names)), layout="constrained")
    colors = ["C1" if "backward" in name else "C0" for name in names]
    axes.barh(names, parts, color=colors, height=0.7)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set(
        xlabel="part of the roof", title=f"{card.name}: forward blue, backward orange; the line is the roof"
    )
    axes.spines[["top", "right"]].set_visible(False)
    memory = io.BytesIO()
    figure.savefig(memory, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return memory.getvalue()


@functools.cache
def runs(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Every run of `opsmith bench` that was kept, in the order in which they were taken."""
    read = [(file.stem, json.loads(file.read_text())) for file in folder.glob("*.json")]
    # A result without benchmarks answers a question of its own, and its page shows its numbers.
    return sorted((item for item in read if "benchmarks" in item[1]), key=lambda item: str(item[1]["taken"]))


def row(benchmark: dict[str, Any]) -> tuple[Any, ...]:
    """Time and part of the roof where memory is used again, if that was measured; ratios from the fresh column."""
    ratios = benchmark["ratios"]["cold"]
    bases = list(dict.fromkeys(name.partition(" / ")[2] for name in ratios))
    medians = {
        column: {
            name: c["median"]
            for name, c in found["contestants"].items()
            if not name.startswith("roof: ") and name not in bases
        }
        for column, found in benchmark["columns"].items()
    }
    column = "reused" if "reused" in medians else "cold"
    best = min(medians[column], key=medians[column].__getitem__)
    fresh = min(medians["cold"], key=medians["cold"].__getitem__)
    part = benchmark["roof_fraction"].get(column, {}).get(best)
    spread = benchmark["columns"][column]["contestants"][best].get("spread", 0.0)
    steady = spread <= CONCLUDES_NOTHING
    words = {"inconclusive": NOTHING, "no difference": "no difference"}
    found = {base: ratios[f"{fresh} / {base}"] for base in bases if f"{fresh} / {base}" in ratios}
    return (
        benchmark["workload"],
        benchmark["dtype"],
        benchmark["direction"],
        f"{medians[column][best] * 1e3:.3g} ms" if steady else NOTHING,
        part if part is not None and part <= 1 and steady else None,  # above 1 the roof was seen too low
        {base: words.get(one.get("verdict"), f"{1 / one['median']:.2f}") for base, one in found.items()},
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table; a bar within a cell would end it."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
