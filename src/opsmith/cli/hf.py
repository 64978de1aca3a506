"""Local Hugging Face folders: what loads, and one clear line for each reason why one does not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from opsmith.cli import CommandError
from opsmith.cli.models import Batch

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_LOCAL = {"local_files_only": True, "trust_remote_code": False}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and advice off the terminal; its errors still come."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def load(folder: Path) -> tuple[nn.Module, Any]:
    """The model in a folder, in eval mode and in the dtype it was saved in, and its configuration.

    Nothing is downloaded, no code from the folder runs, and weights are read from safetensors only.

    Raises:
        CommandError: when there is no such folder, or no model in it that can be loaded.
    """
    try:
        import transformers
    except ImportError as error:
        raise CommandError('transformers is not installed: pip install "opsmith[hf]"') from error
    check(folder)
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(folder, **_LOCAL)
        except Exception as error:  # transformers raises whatever a damaged file leads to
            raise CommandError(f"{folder / 'config.json'}: {one_line(error)}") from error
        causal = any(name.endswith(_CAUSAL) for name in config.architectures or ())
        family = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        try:
            model, info = family.from_pretrained(
                folder,
                use_safetensors=True,
                dtype="auto",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **_LOCAL,
            )
        except Exception as error:
            raise CommandError(f"{folder} does not load: {one_line(error)}") from error
    if info["mismatched_keys"]:
        name, there, wanted = min(info["mismatched_keys"])
        raise CommandError(
            f"config.json and the weights in {folder} do not belong together: {name} is "
            f"{list(there)} in the file and {list(wanted)} by config.json"
        )
    if info["missing_keys"] and len(info["missing_keys"]) == len(model.state_dict()):
        raise CommandError(
            f"no weight in {folder} belongs to a {type(model).__name__}; "
            "are config.json and the weights of one model?"
        )
    return model.eval(), config


def load_with_tokenizer(path: Path) -> tuple[nn.Module, Any]:
    """The causal model in a folder or a GGUF file, and its tokenizer; of the latter the weights are float32, with the
    values of the file's few bits.

    Raises:
        CommandError: when there is no such model, or no tokenizer beside it.
    """
    if path.suffix != ".gguf":
        model, where, options = load(path)[0], path, {}
    elif not path.is_file():
        raise CommandError(f"there is no file {path}; name a GGUF file")
    else:
        where, options = path.parent, {"gguf_file": path.name}
        try:
            import transformers

            with quiet():
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    where, dtype="float32", **_LOCAL, **options
                )
        except Exception as error:  # gguf or accelerate are missing, or the file is damaged
            raise CommandError(f"{path} does not load: {one_line(error)}") from error
    try:
        from transformers import AutoTokenizer

        with quiet():
            return model.eval(), AutoTokenizer.from_pretrained(where, **_LOCAL, **options)
    except Exception as error:
        raise CommandError(f"{path} has no tokenizer that loads: {one_line(error)}") from error


def tokens(architecture: Any, batch: int, length: int, seed: int) -> Batch:
    """Random tokens that this model takes: `[batch, length]`.

    Raises:
        CommandError: when it takes none, or fewer.
    """
    text = architecture.get_text_config()
    vocabulary = getattr(text, "vocab_size", None)
    if not vocabulary:
        raise CommandError(
            f"a {architecture.model_type} model takes no tokens (its configuration has no "
            "vocab_size); call opsmith.optimize(model, example_inputs) with inputs of its own"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest and length > longest:
        raise CommandError(f"--length {length} is more than the model's {longest} positions")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if architecture.is_encoder_decoder:
        found["decoder_input_ids"] = ids
    return found


def check(folder: Path) -> None:
    """What can be said of a folder before transformers looks at it."""
    from safetensors import SafetensorError, safe_open
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not folder.exists():
        raise CommandError(f"there is no folder {folder}; name one that save_pretrained wrote")
    if not folder.is_dir():
        raise CommandError(f"{folder} is a file; name the folder it lies in")
    config = folder / "config.json"
    if not config.is_file():
        raise CommandError(
            f"{folder} holds no model: config.json is missing; name a folder that save_pretrained wrote"
        )
    try:
        data = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{config} is not readable JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise CommandError(f"{config} names no model_type, so what model it is stays unknown")
    if data["model_type"] not in CONFIG_MAPPING:
        hint = "it runs code of its own, which is never loaded" if "auto_map" in data else "update it"
        raise CommandError(
            f"model type {data['model_type'][:64]!r} is unknown to the installed transformers: {hint}, "
            "or load the model yourself and call opsmith.optimize"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise CommandError(
            f"{folder} has no *.safetensors, the only weights that are read; "
            "convert them with save_pretrained"
        )
    for file in weights:  # a damaged one is named before the model is built; only headers are read here
        try:
            with safe_open(file, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            raise CommandError(f"{file} is damaged ({one_line(error)}); copy or download it again") from error


def one_line(error: Exception) -> str:
    return shorten(str(error), 240) or type(error).__name__
