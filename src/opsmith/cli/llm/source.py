"""What a decoder is benchmarked on: its weights in a folder, its GGUF file where it has one, and prompts for it."""

from __future__ import annotations

import contextlib
import importlib.resources
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith.checkpoints.folder import configuration, quiet
from opsmith.cli import CommandError, hf
from opsmith.cli.llm import gemma

# TinyLlama's sizes.
LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Source:
    """A decoder: a folder that `from_pretrained` reads, the configuration there, and its GGUF file if it has one."""

    folder: Path
    config: Any
    gguf: Path | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What its weights are saved in."""
        dtype: torch.dtype = self.config.dtype or torch.float32
        return dtype


def resolve(name: str, workspace: Path) -> Source:
    """`gemma`, `llama-1b`, a `.gguf` file or a folder; what has to be written first goes into the workspace.

    Raises:
        CommandError, CheckpointError: it is none of these, or cannot be read.
    """
    path, gguf = Path(name), None
    if name == "gemma":
        path = gemma.folder()
        gguf = path / gemma.GGUF
    elif name == "llama-1b":
        path = workspace / "model"
        _random_llama(path)
    elif path.suffix == ".gguf":
        path, gguf = workspace / "model", path
        _unpack(gguf, path)
    elif not path.is_dir():
        raise CommandError(
            f"{name} is no folder, no .gguf file, and neither gemma nor llama-1b; name one of these"
        )
    config = configuration(path)
    if not any(each.endswith(("ForCausalLM", "LMHeadModel")) for each in config.architectures or ()):
        raise CommandError(f"{name}: a {config.model_type} model generates no text; name a causal one")
    return Source(path, config, gguf)


def prompts(source: Source, batch: int, length: int) -> Tensor:
    """`[batch, length]`: English where the model has a tokenizer, another stretch of it in each row; else random."""
    vocabulary = source.config.get_text_config().vocab_size
    ids = None
    # transformers raises whatever a folder without one leads to.
    with quiet(), contextlib.suppress(Exception):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True)
        ids = tokenizer(text(), add_special_tokens=False).input_ids
    if not ids:
        return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
    start = tokenizer.bos_token_id
    rows = []
    for row in range(batch):
        endless = itertools.islice(itertools.cycle(ids), 97 * row, None)
        first = [] if start is None else [start]
        rows.append(first + list(itertools.islice(endless, length - len(first))))
    return torch.tensor(rows)


def text() -> str:
    """Plain English prose that no model was trained on: a part of opsmith's own course."""
    return (importlib.resources.files("opsmith.cli.llm") / "text.txt").read_text(encoding="utf-8")


@torch.no_grad()
def _random_llama(place: Path) -> None:
    """1.1 billion random weights in bfloat16, others in each layer."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA), dtype=torch.bfloat16)
    with quiet():
        model.save_pretrained(place)


def _unpack(file: Path, place: Path) -> None:
    """The exact values of a GGUF file, and its tokenizer, as a folder."""
    read: Any
    read, tokenizer = hf.load_with_tokenizer(file)
    del read.config.quantization_config  # which says that the values are a file's bits
    with quiet():
        gemma.save_plain(read, read.config, place)
        tokenizer.save_pretrained(place)
