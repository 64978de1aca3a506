"""What commands ask of a model's folder or GGUF file: the model with its tokenizer, and random tokens that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from opsmith.checkpoints import read as read
from opsmith.checkpoints.folder import LOCAL, quiet, refused
from opsmith.checkpoints.header import CheckpointError
from opsmith.cli.models import Batch


def load_with_tokenizer(path: Path) -> tuple[nn.Module, Any]:
    """The causal model in a folder or a GGUF file, and its tokenizer; of the latter the weights are float32, with the
    values of the file's few bits.

    Raises:
        CheckpointError: when there is no such model, or no tokenizer beside it.
    """
    if path.suffix != ".gguf":
        model, where, options = read(path), path, {}
    elif not path.is_file():
        raise CheckpointError(f"there is no file {path}; name a GGUF file")
    else:
        where, options = path.parent, {"gguf_file": path.name}
        # gguf or accelerate are missing, or the file is damaged
        with refused(f"{path} does not load"), quiet(file=True):
            import transformers

            model = transformers.AutoModelForCausalLM.from_pretrained(
                where, dtype="float32", **LOCAL, **options
            )
    with refused(f"{path} has no tokenizer that loads (tokenizer.save_pretrained writes one)"), quiet():
        from transformers import AutoTokenizer

        return model.eval(), AutoTokenizer.from_pretrained(where, **LOCAL, **options)


def tokens(architecture: Any, batch: int, length: int, seed: int) -> Batch:
    """Random tokens that this model takes: `[batch, length]`.

    Raises:
        ValueError: when it takes none, or fewer.
    """
    text = architecture.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not vocabulary:
        raise ValueError(
            f"a {architecture.model_type} model takes no tokens (its configuration has no "
            "vocab_size); call opsmith.optimize(model, example_inputs) with inputs of its own"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest and length > longest:
        raise ValueError(f"--length {length} is more than the model's {longest} positions")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if architecture.is_encoder_decoder:
        found["decoder_input_ids"] = ids
    return found
