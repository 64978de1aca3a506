"""Small seeded models to compile, and what their results are held to."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import opsmith
from opsmith.compiler import Config
from opsmith.operator import Tolerance

VOCABULARY, WIDTH, HEADS = 61, 32, 4
# A tiny model of transformers, as most families name its sizes.
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The first implementation that is able, and the program even where eager is faster: nothing depends on a clock.
UNTIMED = Config(tune=False)
# Each operator is held to its card's policy; a model is a chain of them, so errors of some add up.
WHOLE_MODEL = Tolerance(factor=3.0, ulps=4.0)


def optimized(model: Any, *example: Any, **options: Any) -> Any:
    """The model, optimized for one example or for none, without a clock."""
    return opsmith.optimize(model, example or None, config=UNTIMED, **options)


class Norm(nn.Module):
    """LayerNorm written out."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.bias = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Block(nn.Module):
    """A transformer layer whose attention and GELU are written out."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.first, self.second = Norm(), Norm()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (
            layer(x).view(b, n, HEADS, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        context = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(b, n, WIDTH)
        x = self.first(x + self.dropout(self.out(context)))
        h = self.up(x)
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        y: torch.Tensor = self.second(x + self.dropout(self.down(h)))
        return y


class Encoder(nn.Module):
    """A small BERT in plain PyTorch: every operator of it is written out or a plain layer."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.norm = Norm()
        self.blocks = nn.ModuleList([Block(dropout) for _ in range(layers)])

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        x = self.norm(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Feed(nn.Module):
    """A linear layer, GELU, a linear layer and a LayerNorm: the least that has operators of several kinds."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 48), nn.Linear(48, width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.down(nn.functional.gelu(self.up(x))) + x)
        return y


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """A model with the same weights every time, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().eval()


def ids(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(batch: int, length: int) -> torch.Tensor:
    """A mask that keeps one token fewer in each further row."""
    kept = (length - torch.arange(batch)).clamp(min=1)
    return torch.arange(length)[None] < kept[:, None]


def numbers(*shape: int, seed: int = 2) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def first_tensor(result: Any) -> torch.Tensor:
    """A model's main result, whatever it is wrapped in."""
    value = result if isinstance(result, torch.Tensor) else result[0]
    assert isinstance(value, torch.Tensor)
    return value


def widened(value: Any) -> Any:
    """Inputs with their floating-point tensors in float64."""
    if isinstance(value, dict):
        return {name: widened(v) for name, v in value.items()}
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Truth:
    """A model as it was before it was optimized: its results, and those of a float64 copy."""

    def __init__(self, model: nn.Module) -> None:
        self.eager = copy.deepcopy(model)
        self.exact = copy.deepcopy(model).double()

    def check(self, got: Any, *args: Any, **kwargs: Any) -> None:
        """Hold a result to the tolerance policy."""
        with torch.no_grad():
            eager = first_tensor(self.eager(*args, **kwargs))
            exact = first_tensor(self.exact(*[widened(a) for a in args], **widened(kwargs)))
        result = first_tensor(got)
        assert result.dtype == eager.dtype
        verdict = WHOLE_MODEL.check(result.detach(), eager, exact)
        assert verdict.ok, verdict.why


def bert() -> Any:
    """A tiny BERT of Hugging Face's, random weights."""
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    )


def gpt2(layers: int = 2) -> Any:
    """A tiny GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=WIDTH,
            n_layer=layers,
            n_head=HEADS,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def llama(layers: int = 2) -> Any:
    """A tiny Llama with grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def gemma() -> Any:
    """A tiny Gemma: its norms' weights are kept less one."""
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(
        GemmaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            head_dim=WIDTH // HEADS,
            intermediate_size=64,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def t5() -> Any:
    """A tiny T5 encoder."""
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=HEADS)
    )


_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_LATENT = {
    **_SMALL,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
}
_GPTJ = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 1,
    "n_head": HEADS,
    "n_positions": 64,
    "rotary_dim": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# Every way in which the library's models write the rotary embedding.
ROTARY: dict[str, dict[str, Any]] = {
    "llama": _SMALL,
    "mistral": _SMALL,
    "qwen2": _SMALL,
    "qwen3": {**_SMALL, "head_dim": 8},
    "gemma": {**_SMALL, "head_dim": 8},
    "gpt_neox": _SMALL,  # a part of each head
    "phi": _SMALL,
    "gptj": _GPTJ,  # neighbors, heads behind tokens
    "cohere": _SMALL,  # neighbors
    "deepseek_v2": _LATENT,  # complex numbers
    "deepseek_v3": _LATENT,  # neighbors in, halves out
}


def causal(name: str) -> Any:
    """A tiny language model of Hugging Face's, of this type."""
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **ROTARY[name]))


class LossOf(nn.Module):
    """A training loop's wrapper: the model's loss, and nothing else of it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels, use_cache=False).loss
        return loss
