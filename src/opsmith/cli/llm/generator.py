"""A Hugging Face decoder that generates, step by step: what it said, when, and what each token had to read."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.compiler.meanwhile import meanwhile
from opsmith.ops import PackedExperts, PackedLinear


@dataclass(frozen=True)
class Generated:
    """One run of `generate`.

    Attributes:
        tokens: `[batch, new]`.
        first: seconds until the first token was there.
        steps: seconds for each token after it.
        logits: float32 `[batch, new, vocabulary]`, where they were asked for.
    """

    tokens: Tensor
    first: float
    steps: list[float]
    logits: Tensor | None = None


class Clock:
    """A streamer for `generate`: notes when the prompt and each token come, and hands them to another streamer."""

    def __init__(self, text: Any = None) -> None:
        self.text = text
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if self.text is not None:
            self.text.put(value)

    def end(self) -> None:
        if self.text is not None:
            self.text.end()


@torch.no_grad()
def generate(
    model: Any, ids: Tensor, new: int, *, forced: Tensor | None = None, check: bool = False, text: Any = None
) -> Generated:
    """Generate `new` tokens greedily, as a user does: by `model.generate`, whatever cache that takes.

    Args:
        model: a causal model of Hugging Face, optimized or not.
        ids: the prompts, `[batch, tokens]`, without padding.
        new: how many tokens; the model's end of text does not end it.
        forced: `[batch, new]`: go on with these tokens, whatever the model says.
        check: keep the logits.
        text: a streamer of transformers that prints the text.
    """

    def only(so_far: Tensor, scores: Tensor) -> Tensor:
        """The token that is given has all the likelihood."""
        chosen = forced[:, so_far.shape[1] - ids.shape[1], None].to(scores.device)  # type: ignore[index]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)

    clock = Clock(text)
    # An end of text would end it early.
    with meanwhile([model.generation_config], "eos_token_id", None):
        started = time.perf_counter()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
            streamer=clock,
            logits_processor=None if forced is None else [only],
            return_dict_in_generate=True,
            output_logits=check,
        )
    _, *times = clock.times
    steps = [b - a for a, b in pairwise(times)]
    logits = torch.stack(out.logits, 1).float() if check else None
    return Generated(out.sequences[:, ids.shape[1] :], times[0] - started, steps, logits)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that one token reads: all but the rows of embeddings, packed ones as they are packed.

    Of a mixture's experts a token reads those that it is sent to.
    """
    each = getattr(getattr(model, "config", None), "num_experts_per_tok", None)

    def read(module: nn.Module, nbytes: int) -> float:
        mixture = isinstance(module, PackedExperts) or hasattr(module, "gate_up_proj")
        count = len(module) if isinstance(module, PackedExperts) else getattr(module, "num_experts", 0)
        return nbytes * min(1.0, each / count) if mixture and each and count else nbytes

    session: Any = getattr(model, "opsmith", None)
    layers = session.report.quantized if session is not None else []
    packed = {layer.name: layer.nbytes for layer in layers if layer.status == "packed"}
    own: dict[int, float] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        # Tied to the output layer, it is counted there.
        if isinstance(module, nn.Embedding) or name.endswith(".table"):
            continue
        if isinstance(module, PackedLinear):
            own[id(module)] = read(module, module.nbytes)
        for key, weight in module.named_parameters(recurse=False):
            if name not in packed or key.endswith("bias"):
                own[weight.data_ptr()] = read(module, weight.nbytes)
    return int(sum(own.values()) + sum(read(model.get_submodule(name), n) for name, n in packed.items()))


def cache_bytes(config: Any, batch: int, tokens: int, element: int) -> int:
    """Bytes of keys and values that one token of each sequence reads, behind so many others.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
    >>> cache_bytes(config, batch=1, tokens=10, element=2) == 3 * 10 * 2 * 2 * 16 * 2
    True
    """
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    window = getattr(config, "sliding_window", None) or tokens
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    rows = sum(min(tokens, window) if kind == "sliding_attention" else tokens for kind in kinds)
    return int(batch * rows * 2 * heads * size * element)


def forget_peak() -> None:
    """From now on `peak_bytes` counts anew, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process had in use, in bytes: its own, and what it mapped of files."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) << (0 if sys.platform == "darwin" else 10)
