"""Models from files: a Hugging Face folder or a GGUF file, optimized, with the weights that the file has."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from opsmith.checkpoints import folder, gguf, quantized
from opsmith.checkpoints.header import CheckpointError
from opsmith.checkpoints.saving import save
from opsmith.compiler import Config, optimize
from opsmith.compiler.config import DTYPES

__all__ = ["CheckpointError", "load", "save"]


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    quantize: str | None = None,
    config: Config | str | Path | None = None,
) -> Any:
    """Load a Hugging Face model from a folder or a GGUF file, optimized; weights of few bits stay as the file has them.

    A GGUF file's blocks are packed as they are: a layer's values are the file's to the last bit, and no copy of the
    model in floats is made. Layers of Q8_0, Q6_K, Q5_0, Q5_K, Q4_0, Q4_K and MXFP4 keep their bits, those of Q3_K,
    IQ4_XS and IQ4_NL their values; what has others, and norms and biases, is in `dtype`. The same holds of folders that
    GPTQ, AWQ, compressed-tensors, DeepSeek's fp8 or GPT-OSS's mxfp4 quantized. Nothing is downloaded, no code of the
    folder or file runs, nothing is unpickled.

    >>> model = opsmith.load("gemma-3-270m-q4_k_m.gguf")
    >>> model.generate(ids, max_new_tokens=32)

    Args:
        path: a folder that `save_pretrained` wrote, or a `.gguf` file of a decoder.
        dtype: of everything that is not in few bits; by default what a folder was saved in, and float32 for a file.
        quantize: "bf16", "int8", "int8_dynamic" or "int4", for linear layers whose weights are floats.
        config: a `Config`, or the path of an `opsmith.toml`.

    Returns:
        The model, in eval mode. What it is called with first is captured then.

    Raises:
        CheckpointError: a `ValueError`: what is wrong with the file or folder, before anything large is allocated.
        TypeError, ValueError: for a wrong dtype, quantize or config.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    if name is not None and name not in DTYPES:
        raise ValueError(f"load: dtype must be one of {', '.join(DTYPES)}, got {name}")
    model = read(Path(path), None if name is None else getattr(torch, name))
    return optimize(model, config=config, dtype=name, quantize=quantize)


def read(place: Path, dtype: torch.dtype | None = None) -> Any:
    """The model as `load` has it before it is optimized, floats in the folder's own dtype where nothing is packed."""
    if place.suffix == ".gguf":
        model = gguf.load(place, dtype or torch.float32)
    else:
        found = folder.configuration(place)
        if getattr(found, "quantization_config", None) is None:
            return folder.load(place, found)
        model = quantized.load(place, found, dtype or found.dtype or torch.float32)
    model.save_pretrained = partial(save, model)  # type: ignore[assignment]  # of its packed layers nobody else makes one
    return model
