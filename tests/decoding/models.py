"""Tiny decoders of Hugging Face's, with random weights."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 101
WINDOW = 12
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# By architecture, what differs. Gemma 3 has layers of both kinds, Mistral only such with a window.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 1,
    },
    "mistral": {"sliding_window": WINDOW},
    "phi3": {"num_key_value_heads": 4},
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma2": {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
}


def decoder(kind: str, **more: Any) -> Any:
    """A decoder of this architecture, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SIZES | MODELS.get(kind, {}) | more)
    return AutoModelForCausalLM.from_config(config).eval()


def prompts(batch: int, tokens: int, *, padded: bool) -> dict[str, torch.Tensor]:
    """Token ids, and a mask that hides more of each sequence at the left than of the one before."""
    ids = torch.randint(2, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    for b in range(batch if padded else 0):
        mask[b, : b * tokens // batch] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
