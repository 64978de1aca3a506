"""Whether rows of an embedding that are asked for before they are needed make decoding faster, and how often they hit.

Gemma 3 270M in int8 samples a text; before each token is drawn, the rows of likely ones are prefetched: the highest
logits, or what followed the last token most often in a text, or the token that will be drawn, which only a second run
can know.

Example: python benchmarks/next_rows.py --json next-rows.json
"""

from __future__ import annotations

import datetime
import itertools
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

import opsmith
from opsmith import measure
from opsmith.cli.llm import gemma
from opsmith.measure.stats import paired_ratio
from opsmith.ops import QuantizedEmbedding

PAGES = Path(__file__).resolve().parents[1] / "docs" / "guide"
PROMPT = 32
COUNTS = (1, 8, 64)  # rows that are asked for
Likely = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Asking(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Prefetches the rows of likely next tokens, and remembers which."""

    def __init__(self, table: QuantizedEmbedding, likely: Likely) -> None:
        self.table, self.likely = table, likely
        self.asked: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = self.likely(input_ids, scores)
        self.table.prefetch_rows(ids)
        self.asked.append(ids)
        return scores


class Foresight:
    """The tokens of a run before, one after the other."""

    def __init__(self, drawn: torch.Tensor) -> None:
        self.drawn, self.at = drawn, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.at += 1
        return self.drawn[self.at - 1 : self.at]


def highest(count: int) -> Likely:
    return lambda ids, scores: scores.topk(count).indices


def bigrams(text: Sequence[int], count: int) -> Likely:
    """What followed the last token most often in a text; behind an unknown one, the most frequent of all."""
    followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for one, following in itertools.pairwise(text):
        followers[one][following] += 1

    def most(counts: Counter[int]) -> torch.Tensor:
        return torch.tensor([token for token, _ in counts.most_common(count)])

    known = {token: most(counts) for token, counts in followers.items()}
    default = most(Counter(text))
    return lambda ids, scores: known.get(int(ids[0, -1]), default)


@torch.inference_mode()
def sampled(
    model: Any, prompt: torch.Tensor, tokens: int, seed: int, asking: Asking | None
) -> tuple[float, torch.Tensor]:
    """Seconds for a token, the prompt's part of them too, and the tokens."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    found = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        top_k=0,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
        logits_processor=[asking] if asking else [],
    )
    return (time.perf_counter() - start) / tokens, found[0, prompt.shape[1] :]


def main(
    tokens: Annotated[int, typer.Option(min=8, help="Of a text that is sampled.")] = 64,
    rounds: Annotated[int, typer.Option(min=3, help="Texts, each by all contestants in turn.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Time all contestants; print and write what was found."""
    folder = gemma.folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    text = tokenizer("\n".join(page.read_text() for page in sorted(PAGES.glob("*.md"))))["input_ids"]
    learnt, continued = text[: len(text) // 2], torch.tensor(text[len(text) // 2 :])
    layer = model.get_input_embeddings()
    with torch.no_grad():
        table = QuantizedEmbedding.from_float(layer(torch.arange(layer.num_embeddings)))
    model.set_input_embeddings(table)
    opsmith.optimize(model, quantize="int8")
    likely = {f"highest logits, {n}": highest(n) for n in COUNTS}
    likely |= {f"bigrams, {n}": bigrams(learnt, n) for n in COUNTS}
    samples: dict[str, list[float]] = defaultdict(list)
    hits: Counter[str] = Counter()
    for turn in range(-2, rounds):  # what is captured first is not counted
        at = (turn + 2) * (len(continued) - PROMPT) // (rounds + 2)
        prompt = continued[None, at : at + PROMPT]
        seconds, drawn = sampled(model, prompt, tokens, turn + 2, None)
        found = {"nothing": seconds}
        every: dict[str, Likely] = {**likely, "the token itself": Foresight(drawn)}
        for name, which in every.items():
            asking = Asking(table, which)
            found[name], again = sampled(model, prompt, tokens, turn + 2, asking)
            if not again.equal(drawn):
                raise RuntimeError(f"{name}: other tokens than without asking ahead")
            if turn >= 0:
                hits[name] += sum(int(token in ids) for token, ids in zip(drawn, asking.asked, strict=True))
        for name, seconds in found.items() if turn >= 0 else ():
            samples[name].append(seconds)
    runs = []
    for name, seconds_of in samples.items():
        run: dict[str, Any] = {"name": name, "samples": seconds_of}
        if name != "nothing":
            run["hit_rate"] = hits[name] / (tokens * rounds)
            run["ratio"] = paired_ratio(name, "nothing", seconds_of, samples["nothing"]).to_json()
            ratio, verdict = run["ratio"]["median"], run["ratio"]["verdict"]
            typer.echo(f"{name}: hits {run['hit_rate']:.0%}, {ratio:.3f} of the time, {verdict}")
        runs.append(run)
    result = {
        "machine": measure.describe().to_json(),
        "date": datetime.date.today().isoformat(),
        "table": {"rows": table.num_embeddings, "width": table.embedding_dim, "bytes": table.nbytes},
        "tokens": tokens,
        "prompt": PROMPT,
        "runs": runs,
    }
    if json_file:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
