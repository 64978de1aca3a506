"""Writes the measured numbers of pages from the files in benchmarks/results, and finds those that stand by hand.

A page marks where: what lies between `<!-- numbers: NAME -->` and `<!-- /numbers -->` is written by the function of
that name in `REGIONS`. A ratio that its file calls inconclusive, a time whose samples spread by more than a quarter,
and a part of a roof above 1 are written as "no conclusion".

python benchmarks/docs_numbers.py          # writes the pages
python benchmarks/docs_numbers.py --check  # writes nothing; names what differs, and measured numbers by hand
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opsmith.measure.stats import CONCLUDES_NOTHING, paired_ratio

HERE = Path(__file__).resolve().parents[1]
RESULTS = HERE / "benchmarks" / "results"
PAGES = (
    RESULTS / "README.md",
    HERE / "README.md",
    *sorted(set(HERE.glob("docs/*.md")) - {HERE / "docs/gpu.md"}),  # which benchmarks/gpu_page.py writes
    *sorted(HERE.glob("docs/guide/*.md")),
    *sorted(HERE.glob("docs/operators/*.md")),
    *sorted(HERE.glob("docs/authoring/*.md")),
    HERE / "docs/decisions/057-rows-are-not-asked-for-ahead.md",
)
_CODE = re.compile(r"^ *```.*?^ *```$|(?<!`)`[^`\n]+`(?!`)", re.DOTALL | re.MULTILINE)

NOTHING = "no conclusion"
_REGION = re.compile(r"(<!-- numbers: ([\w-]+) -->\n).*?(<!-- /numbers -->)", re.DOTALL)
_TIMES = r"×(?! ?[\d(])|x(?= as\b| over\b| faster\b|\b(?! ?\d))"
_UNIT = rf"(?:%|{_TIMES}|(?:[mµun]| )s\b|tokens/s|tokens a second|times as (?:fast|long)|[GT]B/s|[GT]FLOP/s)"
_MEASURED = re.compile(rf"(?<![\w.=])\d[\d.,]*(?: to \d[\d.,]*)? ?{_UNIT}")
_HEAD = re.compile(r"[| ,(](?:[mµn]?s|tokens/s|GB/s|GFLOP/s)(?: |,|:|$)")  # of a column of times or rates
# What a number may say by hand: how something is judged or set, not what came out.
_STATED = re.compile(
    r"95 ?% (?:confidence|intervals?)|(?:above|more than|at most) \d+ ?%|1\.2 times as fast|15 % (?:of|hidden)"
    r"|\]\([^)]*\)|computed, not measured.*?(?=\n\n)",
    re.DOTALL,
)

Row = Sequence[str]
_MADE: dict[str, Callable[[], str]] = {}


def region(make: Callable[[], str]) -> Callable[[], str]:
    """Names a function after the marks that it writes between."""
    _MADE[make.__name__.strip("_").replace("_", "-")] = make
    return make


@functools.cache
def read(stem: str) -> Any:
    return json.loads((RESULTS / f"{stem}.json").read_text())


def table(head: Row, rows: Iterable[Row]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def facts(stem: str) -> tuple[str, str, str, str]:
    """Day, machine, torch and commit, as the file says them; an empty word where it does not."""
    found = read(stem)
    found = found[0] if isinstance(found, list) else found
    machine = found.get("machine", "")
    known = machine if isinstance(machine, dict) else {}
    day = str(found.get("taken", found.get("date", "")))[:10] or "".join(re.findall(r"\d{4}-\d\d-\d\d", stem))
    torch = known.get("torch") or found.get("versions", {}).get("torch") or found.get("torch", "")
    where = _threads(known) if "cpu" in known else machine if "," in machine else ""
    return day, where, torch, found.get("commit") or known.get("commit") or ""


def _threads(machine: dict[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['threads']} thread" + ("s" if machine["threads"] > 1 else "")


def source(stem: str) -> str:
    """Which file, and what it says of itself: what it lacks is named too."""
    day, where, torch, commit = facts(stem)
    version = f"torch {torch}" if torch else "no versions kept"
    named = f"commit {commit}" if commit else "no commit kept"
    return f"`benchmarks/results/{stem}.json`: {day}, {where or 'no machine named'}, {version}, {named}."


@region
def _lacking() -> str:
    """Files that do not say all of where they come from; those of GPUs have a page of their own."""
    rows = []
    for file in sorted(set(RESULTS.glob("*.json")) - set(RESULTS.glob("gpu-*.json"))):
        words = dict(zip(("day", "machine", "versions", "commit"), facts(file.stem), strict=True))
        missing = [f"no {name}" for name, word in words.items() if not word]
        missing += ["its commit's tree was changed"] if words["commit"].endswith("-dirty") else []
        if missing:
            rows.append((f"`{file.stem}`", ", ".join(missing)))
    return table(("file", "what it lacks"), rows)


def times(ratio: dict[str, Any] | None) -> str:
    """How many times as fast, with its interval, or what the file says instead."""
    if ratio is None:
        return ""
    if ratio["verdict"] == "inconclusive":
        return NOTHING
    low, high = 1 / ratio["hi"], 1 / ratio["lo"]
    text = f"{1 / ratio['median']:.2f}× [{low:.2f}, {high:.2f}]"
    return f"{text}, no difference" if ratio["verdict"] == "no difference" else text


def paired(ours: Sequence[float], theirs: Sequence[float]) -> str:
    rounds = min(len(ours), len(theirs))
    return times(paired_ratio("ours", "theirs", ours[:rounds], theirs[:rounds]).to_json()) if rounds else ""


def duration(median: float, spread: float) -> str:
    number, unit = (median, "s") if median >= 1 else (median * 1e3, "ms")
    return NOTHING if spread > CONCLUDES_NOTHING else f"{number:#.3g}".rstrip(".") + f" {unit}"


def part(fraction: float | None, spread: float = 0.0) -> str:
    """Of a roof: above it, the roof was seen too low."""
    if fraction is None:
        return ""
    if fraction > 1 or spread > CONCLUDES_NOTHING:
        return NOTHING
    return f"{fraction:.0%}" if fraction >= 0.005 else "< 1%"


def cells(benchmark: dict[str, Any], bases: Row = ("eager", "torch.compile")) -> list[str]:
    """Time, part of the roof, and ratios of the fastest of ours: where memory is used again, if that was measured."""
    column = "reused" if "reused" in benchmark["columns"] else "cold"
    found = benchmark["columns"][column]["contestants"]
    ours = {name: c for name, c in found.items() if not name.startswith("roof: ") and name not in bases}
    best = min(ours, key=lambda name: ours[name]["median"])
    median, spread = ours[best]["median"], ours[best]["spread"]
    ratios = benchmark["ratios"][column]
    return [
        "reused" if column == "reused" or best.endswith("out=") else "fresh",
        duration(median, spread),
        part(benchmark["roof_fraction"].get(column, {}).get(best), spread),
        *(times(ratios.get(f"{best} / {base}")) for base in bases),
    ]


def runs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Files of `opsmith bench`, the oldest first."""
    found = [(file.stem, read(file.stem)) for file in RESULTS.glob("*.json")]
    bench = [(stem, run) for stem, run in found if isinstance(run, dict) and "benchmarks" in run]
    return iter(sorted(bench, key=lambda item: item[1]["taken"]))


@region
def _operators() -> str:
    """Each operator and dtype from its newest file, forward."""
    newest: dict[tuple[str, str], str] = {}
    for stem, run in runs():
        newest |= {(b["operator"], b["dtype"]): stem for b in run["benchmarks"]}
    parts = []
    for stem in dict.fromkeys(newest.values()):
        rows = [
            (f"{b['operator']}, {b['workload']}, {b['dtype']}", *cells(b))
            for b in read(stem)["benchmarks"]
            if b["direction"] == "forward" and newest[b["operator"], b["dtype"]] == stem
        ]
        head = ("call", "output", "opsmith", "of the roof", "over eager", "over torch.compile")
        parts += [source(stem), table(head, sorted(rows))] if rows else []
    return "\n\n".join(parts)


_SHOWN = (
    ("layer_norm", "4096x4096"),
    ("rope", "1x32x512x128"),
    ("attention", "1x12x2048x64 causal"),
    ("mla_preprocess", "V3, 1 token"),
)
_OPERATORS = "operators-bfloat16-2026-11-30-amd-epyc-family-26"
_GEMMA = "bench-llm-gemma-2026-11-30-amd-epyc-family-26"


@region
def _readme() -> str:
    rows = []
    for name, workload in _SHOWN:
        found = next(
            b
            for b in read(_OPERATORS)["benchmarks"]
            if (b["operator"], b["workload"], b["direction"]) == (name, workload, "forward")
        )
        _, took, roof, over, _ = cells(found)
        made = f"`opsmith bench {name} --dtype bfloat16`"
        rows.append((f"{name}, {workload}, bfloat16", took, roof, over, _linked(_OPERATORS), made))
    int8 = read(_GEMMA)["cells"][0]["contestants"]["int8"]
    took, over = f"{int8['tokens_per_second']:.3g} tokens/s", times(int8["ratios"]["hf"]["token"])
    made = "`opsmith bench-llm gemma --dtype bfloat16 --format int8`"
    rows.append(
        ("Gemma 3 270M writes, int8 weights", took, part(int8["of_read_roof"]), over, _linked(_GEMMA), made)
    )
    where = {facts(stem)[1:3] for stem in (_OPERATORS, _GEMMA)}
    named = "; ".join(f"{machine}, torch {torch}" for machine, torch in sorted(where))
    return f"{named}:\n\n{table(('', 'opsmith', 'of the roof', 'over eager', 'file', 'again, by'), rows)}"


def _linked(stem: str) -> str:
    return f"[{re.findall(r'.*?(?=-20)', stem)[0]}](benchmarks/results/{stem}.json)"


def llm(*stems: str) -> str:
    """A decoder's contestants in each batch of a file."""
    parts = []
    for stem in stems:
        run, rows = read(stem), []
        for cell in run["cells"]:
            for name, one in cell["contestants"].items():
                ratios = one["ratios"]
                spread = one["spread"]
                rows.append(
                    (
                        {"hf": f"transformers, {run['dtype']}", "llamacpp": "llama.cpp"}.get(
                            name, f"opsmith, {name}"
                        ),
                        str(cell["batch"]),
                        str(cell["prompt"]),
                        f"{one['first_seconds'] * 1e3:.0f} ms",
                        NOTHING if spread > CONCLUDES_NOTHING else f"{one['tokens_per_second']:.1f}",
                        times(ratios.get("hf", {}).get("token")),
                        times(ratios.get("llamacpp", {}).get("token")),
                        part(one["of_read_roof"], spread),
                        f"{one['error']:.1e}",
                        f"{one['peak_bytes'] / 2**30:.2f} GiB",
                    )
                )
        head = (
            "",
            "batch",
            "prompt",
            "first token",
            "tokens/s",
            "over transformers",
            "over llama.cpp",
            "of the read roof",
            "error",
            "memory",
        )
        first = run["cells"][0]
        said = {"", "1", str(first["prompt"])}  # in the line above the table
        kept = [i for i in range(len(head)) if i == 0 or {row[i] for row in rows} - said]
        parts += [
            f"{source(stem)} A prompt of {first['prompt']} tokens and {run['new_tokens']} after it; the read roof was "
            f"{first['read_bandwidth'] / 1e9:.1f} GB/s.",
            table([head[i] for i in kept], [[row[i] for i in kept] for row in rows]),
        ]
    return "\n\n".join(parts)


_MADE["llm-gemma"] = lambda: llm(_GEMMA)
_MADE["llm-bits"] = lambda: llm(
    *(f"bench-llm-gemma-{bits}-2026-11-30-amd-epyc-family-26" for bits in ("bf16", "q8_0", "q4_0"))
)
_MADE["llm-batches"] = lambda: llm("bench-llm-gemma-batches-2026-11-30-amd-epyc-family-26")
_MADE["llm-context"] = lambda: llm("bench-llm-gemma-context-2026-11-30-amd-epyc-family-26")
_MADE["llm-llama"] = lambda: llm("bench-llm-llama-1b-2026-11-30-amd-epyc-family-26")
_MADE["llm-llama-batches"] = lambda: llm("bench-llm-llama-1b-batches-2026-11-30-amd-epyc-family-26")
_MADE["llm-avx2"] = lambda: llm("bench-llm-gemma-2026-12-01-amd-epyc-family-25-model-1")
_MADE["llm-llama-avx2"] = lambda: llm(
    *(
        f"bench-llm-llama-1b-{bits}-2026-12-01-amd-epyc-family-25-model-1"
        for bits in ("q8_0", "q4_0", "q4_0-bf16")
    )
)
_MADE["llm-avx2-peer"] = lambda: llm("bench-llm-gemma-avx2-2026-11-30-amd-epyc-family-26")
_MADE["llm-llama-avx2-peer"] = lambda: llm(
    "bench-llm-llama-1b-q8_0-avx2-2026-11-30-amd-epyc-family-26",
    "bench-llm-llama-1b-q4_0-avx2-2026-11-30-amd-epyc-family-26",
)
_MADE["llm-gguf"] = lambda: llm("bench-llm-gemma-gguf-2026-11-26-xeon-family-6-model-85")


@region
def _deepseek() -> str:
    stem = "deepseek-2026-11-29-amd-epyc-family-26"
    rows = []
    for run in read(stem)["runs"]:
        prompts, tokens = (
            [[s[i] for s in run["samples"][who]] for who in ("opsmith", "eager")] for i in (0, 1)
        )
        rate = [f"{1 / run['seconds'][who]['token']:.1f}" for who in ("eager", "opsmith")]
        rows.append((str(run["prompt"]), *rate, paired(*tokens), paired(*prompts)))
    head = (
        "tokens in the prompt",
        "tokens/s, eager",
        "tokens/s, opsmith",
        "a token, over eager",
        "the prompt, over eager",
    )
    return f"{source(stem)}\n\n{table(head, rows)}"


@region
def _deepseek_v3() -> str:
    stems = sorted(file.stem for file in RESULTS.glob("deepseek-v3-*.json"))
    if not stems:
        return "Not measured yet."
    parts = []
    for stem in stems:
        found = read(stem)
        rows = [
            (
                run["name"],
                *(
                    f"{statistics.median(run['samples'][who]) * 1e3:.4g} ms"
                    for who in ("opsmith", run["name"])
                ),
                times(run["ratio"]),
            )
            for run in found["runs"]
        ]
        head = ("opsmith against", "its token", "the other's", "how many times as fast")
        sizes = (
            f"{found['sizes']['n_routed_experts']} experts, a context of {found['prompt']} tokens and more"
        )
        parts.append(f"{source(stem)} Weights: {found['weights']}; {sizes}.\n\n{table(head, rows)}")
    return "\n\n".join(parts)


@region
def _gpt_oss() -> str:
    parts = []
    for stem in sorted(file.stem for file in RESULTS.glob("gpt-oss-*.json")):
        found = read(stem)
        rows = [
            (
                name,
                f"{row['load_seconds']:.0f} s",
                f"{row['first_seconds']:.2f} s",
                f"{1 / row['token_seconds']:.1f}",
                times(row["ratios"]["token"]) if "ratios" in row else "",
                part(row["of_read_roof"]),
                f"{row['peak_bytes'] / 2**30:.1f} GiB",
                f"{row['error']:.1e}" if "error" in row else "",
            )
            for name, row in found["contestants"].items()
        ]
        base = next(iter(found["contestants"]))
        head = (
            "",
            "to load",
            "first token",
            "tokens/s",
            f"over {base}",
            "of the read roof",
            "memory",
            "error",
        )
        sizes = f"{found['sizes']['layers']} layers, a prompt of {found['prompt']} tokens"
        bandwidth = f"the read roof was {found['read_bandwidth'] / 1e9:.1f} GB/s"
        parts.append(f"{source(stem)} It has {sizes}; {bandwidth}.\n\n{table(head, rows)}")
    return "\n\n".join(parts) or "Not measured yet."


@region
def _next_rows() -> str:
    stem = "next-rows-2026-11-27-amd-epyc-family-26"
    found = read(stem)
    plain, *asked = found["runs"]
    rows = [
        (run["name"], f"{run['hit_rate']:.0%}", paired(run["samples"], plain["samples"])) for run in asked
    ]
    head = ("rows asked for", "hits", "tokens a second, over asking for nothing")
    return f"{source(stem)}\n\n{table(head, rows)}"


@region
def _generated() -> str:
    """By operator and dtype, the generated kernels over those by hand."""
    stem = "generated-2026-11-28-amd-epyc-family-26"
    rows: dict[tuple[str, str], list[str]] = {}
    for run in read(stem)["runs"]:
        samples = run["samples"]
        rows.setdefault((run["operator"], run["dtype"]), []).append(
            paired(samples["generated"], samples["hand"])
        )
    sizes = {where: "×".join(map(str, shape)) for where, shape in read(stem)["shapes"].items()}
    head = [f"{step}, {sizes[where]}, {where}" for where in sizes for step in ("forward", "backward")]
    return f"{source(stem)}\n\n{table(('operator', 'dtype', *head), [(*of, *each) for of, each in rows.items()])}"


@region
def _training() -> str:
    stem = "training-2026-11-29-amd-epyc-family-26"
    found = read(stem)["results"].values()
    shares = [max(g["opsmith"] / g["allowed"] for g in one["gradients"].values()) for one in found]
    rows = [
        ("loss after the last step", *(f"{one['losses']['opsmith'][-1]:.2f}" for one in found)),
        (
            "largest difference of the losses at any step",
            *(f"{one['largest_difference']:.0e}" for one in found),
        ),
        ("largest gradient error at step 1, of what is allowed", *(f"{share:.2f}" for share in shares)),
        ("a step, over PyTorch", *(times(one["ratio_to"]["eager"]) for one in found)),
    ]
    return f"{source(stem)}\n\n{table(('', 'Llama-like', 'BERT-like'), rows)}"


@region
def _fsdp() -> str:
    stem = "fsdp-2026-11-29-amd-epyc-family-26"
    found = read(stem)
    exact, rows = found["runs"]["float32"]["losses"]["eager"], []
    for name, one in found["runs"].items():
        for way, losses in one["losses"].items():
            apart = [abs(a - b) for a, b in zip(losses, one["losses"]["eager"], strict=True)]
            off = [abs(a - b) for a, b in zip(losses, exact, strict=True)]
            means = f"{sum(off) / len(off):.1e}"
            rows.append((f"{name}: {way}", f"{max(apart):.0e}", means, f"{losses[-1]:.3f}"))
    head = (f"{found['steps']} steps, {found['ranks']} ranks", "most from eager's loss")
    return f"{source(stem)}\n\n{table((*head, 'mean from eager in float32', 'last loss'), rows)}"


@region
def _vllm() -> str:
    parts = []
    for of in ("gemma", "gemma-int8", "llama-1b"):
        stem = f"vllm-{of}-2026-11-27-amd-epyc-family-26"
        found, rows = read(stem), []
        for at_once, ways in found["rounds"].items():
            for way, rounds in ways.items():
                first, gap = (
                    f"{statistics.median(r[f'p50_{m}_ms'] for r in rounds):.0f}" for m in ("ttft", "itl")
                )
                seconds, base = ([1 / r["output_throughput"] for r in one] for one in (rounds, ways["off"]))
                named = {"int8": "auto, and `--quantization opsmith`"}.get(way, way)
                ratio = "" if way == "off" else paired(seconds, base)
                rows.append((at_once, named, f"{1 / statistics.median(seconds):.0f}", ratio, first, gap))
        head = (
            "requests at once",
            "`OPSMITH_VLLM`",
            "tokens/s",
            "over vLLM's",
            "first token, ms",
            "others, ms",
        )
        parts.append(f"{source(stem)}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


@region
def _soak() -> str:
    stems = ("soak-2026-11-29-serve", "soak-2026-11-29-train")
    found = [read(stem) for stem in stems]
    rows = [
        ("minutes", *(f"{one['minutes']:.0f}" for one in found)),
        ("answers, wrong", *(f"{sum(one['answers'].values()):,}, {one['wrong']}" for one in found)),
        ("memory behind the warm-up, MB a minute", *(f"{one['growth, MB a minute']:.2f}" for one in found)),
        (
            "slowest 1 % of calls, behind the warm-up and at the end, ms",
            *(", ".join(f"{ms:.0f}" for ms in one["p99, ms"]) for one in found),
        ),
        ("graphs", *(str(one["graphs"]) for one in found)),
    ]
    return "\n\n".join([*map(source, stems), table(("", "serve", "train"), rows)])


@region
def _profiler() -> str:
    stem = "profiler-2026-11-29-amd-epyc-family-26"

    def said(one: dict[str, Any]) -> str:
        by = f"±{100 * one['overhead_error']:.1f}" if one["overhead_from"] == "measured" else "estimated"
        return f"{one['overhead']:.1%}, {by}"

    phases = {(one["model"], one["phase"], one["optimized"]): one for one in read(stem)["phases"]}
    rows = [
        (
            model,
            phase,
            *(said(phases[model, phase, by]) if (model, phase, by) in phases else "" for by in (False, True)),
        )
        for model, phase in dict.fromkeys(key[:2] for key in phases)
    ]
    return f"{source(stem)}\n\n{table(('model', 'phase', 'overhead, eager', 'overhead, optimized'), rows)}"


@region
def _architectures() -> str:
    from benchmarks.architectures import tables

    stem = "architectures-2026-11-28-amd-epyc-family-26"
    return f"{source(stem)}\n\n{tables(read(stem))}"


@region
def _quality() -> str:
    stem = "evaluate-gemma-2026-11-26-xeon-family-6-model-85"

    def within(one: dict[str, Any] | None, form: str) -> str:
        return f"{one['value']:{form}} [{one['low']:{form}}, {one['high']:{form}}]" if one else ""

    rows = [
        (
            row["format"],
            f"{row['bytes'] / 1e6:.0f} MB",
            within(row["perplexity"], ".2f"),
            within(row["ratio"], ".3f"),
            within(row["kl"], ".4f"),
            f"{row['agreement']['value']:.1%}" if row["agreement"] else "",
        )
        for row in read(stem)["rows"]
    ]
    head = ("format", "reads", "perplexity", "over the original's", "KL divergence", "same top token")
    return f"{source(stem)}\n\n{table(head, rows)}"


@region
def _peers() -> str:
    """The newest run beside other engines: where one of them is faster comes first."""
    from benchmarks.peers import title, wins

    stem = max(RESULTS.glob("peers-*.json")).stem
    run, faster = read(stem), dict[str, list[str]]()
    for name, cell in wins(run["cells"]):
        faster.setdefault(f"{name}, {cell['model']}, {cell['dtype']}", []).append(title(cell["shape"]))
    lost = "".join(f"\n- {who}: {', '.join(shapes)}" for who, shapes in sorted(faster.items()))
    parts = [f"Faster than opsmith is:\n{lost}" if lost else "Nobody here is faster than opsmith."]
    known = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    parts.append(f"{source(stem)} With {known}.")
    models = dict.fromkeys((cell["model"], cell["dtype"]) for cell in run["cells"])
    parts += [_beside([c for c in run["cells"] if (c["model"], c["dtype"]) == one]) for one in models]
    reasons = {f"- {n}, {c['dtype']}: {why}": None for c in run["cells"] for n, why in c["left_out"].items()}
    return "\n\n".join([*parts, "Without a time:", "\n".join(reasons)] if reasons else parts)


def _beside(cells: list[dict[str, Any]]) -> str:
    """One model in one dtype: a row for each contestant, two columns for each shape."""
    from benchmarks.peers import title

    rows = []
    for name in dict.fromkeys(name for cell in cells for name in (*cell["errors"], *cell["left_out"])):
        row = [name]
        for cell in cells:
            one = cell.get("comparison", {}).get("contestants", {}).get(name)
            row += (
                [duration(one["median"], one["spread"]), times(cell["ratios"].get(name))] if one else [""] * 2
            )
        errors = [cell["errors"][name] for cell in cells if name in cell["errors"]]
        rows.append((*row, f"{max(errors):.1e}" if errors else ""))
    shapes = [word for cell in cells for word in (title(cell["shape"]), "opsmith over it")]
    return table((f"{cells[0]['model']}, {cells[0]['dtype']}", *shapes, "error"), rows)


def growth(axis: str) -> str:
    """What the newest run says along an axis: a table for each curve."""
    from benchmarks.growth import EAGER, OPSMITH, short

    from opsmith.cli.common import size_of

    stem = max(RESULTS.glob("growth-*.json")).stem
    parts = [source(stem)]
    for curve in (curve for curve in read(stem)["curves"] if curve["axis"] == axis):
        rows = []
        for point in curve["points"]:
            seconds, scatter, held = point["seconds"], point["spread"], point["peak_bytes"]
            took = (duration(seconds[name], scatter[name]) for name in (EAGER, OPSMITH))
            roof = part(point["least_seconds"] / seconds[OPSMITH], scatter[OPSMITH])
            memory = (size_of(held[name]) for name in (EAGER, OPSMITH))
            rows.append((short(point["size"]), *took, times(point["ratio"]), roof, *memory))
        head = (
            curve["over"],
            EAGER,
            OPSMITH,
            "over eager",
            "of the least",
            "memory, eager",
            "memory, opsmith",
        )
        parts += [f"**{curve['name']}**", table(head, rows)]
    return "\n\n".join(parts)


for _axis in ("context", "batch", "vocabulary", "model"):
    _MADE[f"growth-{_axis}"] = functools.partial(growth, _axis)


def written(text: str) -> str:
    """The page with each region as its files say it."""
    return _REGION.sub(lambda m: f"{m[1]}\n{_MADE[m[2]]()}\n\n{m[3]}", text)


def by_hand(text: str, code: bool = True) -> list[str]:
    """Measured numbers outside of the regions; without code, examples of what is typed or printed do not count."""
    text = _REGION.sub("", text)
    if not code:
        text = _CODE.sub("", text)
    text = _STATED.sub("", text)
    found = [match[0].strip() for match in _MEASURED.finditer(text)]
    return found + [
        head.strip() for head in re.findall(r"^(\|.*)\n\| *:?--", text, re.MULTILINE) if _HEAD.search(head)
    ]


def complaints(page: Path, text: str) -> list[str]:
    """What is wrong with a page: it differs from its files, or has a measured number that no file wrote."""
    name = page.name
    found = [f"{name}: `make docs-numbers` would change it"] if written(text) != text else []
    hand = by_hand(text, code=page.parent == HERE)
    return found + ([f"{name}: by hand: {', '.join(hand)}"] if hand else [])


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing, and say what differs.")] = False,
) -> None:
    """Write the measured numbers of the pages from their files."""
    for page in PAGES:
        if not check:
            page.write_text(written(page.read_text()))
    wrong = [line for page in PAGES for line in complaints(page, page.read_text())]
    print("\n".join(wrong))
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
