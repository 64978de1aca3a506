"""Tiny GGUF files of random numbers, for tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

EXPERTS, EACH = 4, 256  # of a mixture, and how wide they are
HIDDEN, HEADS, KV_HEADS, INNER, TOKENS, LAYERS = 256, 4, 2, 512, 320, 2
FORMATS = ("q4_k", "q6_k", "q8_0", "q5_0", "q5_k", "q4_0", "mxfp4", "q3_k", "iq4_xs", "iq4_nl")


def depth(architecture: str) -> int:
    """Numbers of a head: of some architectures all heads together are as wide as what they read."""
    return HIDDEN // HEADS if architecture in ("qwen2", "qwen2moe", "phi3") else 128


def values(architecture: str) -> dict[str, Any]:
    """What a file says of a model with these sizes."""
    sizes = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": depth(architecture),
        "attention.value_length": depth(architecture),
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": depth(architecture),
        "vocab_size": TOKENS,
    }
    if architecture.startswith(("gemma", "gpt")):
        sizes["attention.sliding_window"] = 16
    if architecture == "gpt-oss":
        sizes |= {"expert_count": EXPERTS, "expert_used_count": 2, "feed_forward_length": EACH}
    if architecture.endswith("moe"):
        sizes |= {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": EACH}
        sizes["expert_shared_feed_forward_length"] = INNER
    return {f"{architecture}.{name}": value for name, value in sizes.items()}


def tensors(architecture: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes, as PyTorch has them."""
    q, kv = HEADS * depth(architecture), KV_HEADS * depth(architecture)
    found: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (TOKENS, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if architecture not in ("gemma3", "gemma2"):
        found["output.weight"] = (TOKENS, HIDDEN)
    for i in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        if architecture == "phi3":
            layer |= {"attn_qkv": (q + 2 * kv, HIDDEN), "ffn_up": (2 * INNER, HIDDEN)}
        else:
            layer |= {"attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN)}
            layer |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN)}
        layer |= {"attn_output": (HIDDEN, q), "ffn_down": (HIDDEN, INNER)}
        if architecture.endswith(("moe", "oss")):
            del layer["ffn_gate"], layer["ffn_up"], layer["ffn_down"]
            layer |= dict.fromkeys(("ffn_gate_exps", "ffn_up_exps"), (EXPERTS, EACH, HIDDEN))
            layer |= {"ffn_gate_inp": (EXPERTS, HIDDEN), "ffn_down_exps": (EXPERTS, HIDDEN, EACH)}
        if architecture == "qwen2moe":
            layer |= dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), (INNER, HIDDEN))
            layer |= {"ffn_down_shexp": (HIDDEN, INNER), "ffn_gate_inp_shexp": (HIDDEN,)}
        if architecture in ("qwen3", "qwen3moe", "gemma3"):
            layer |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), (depth(architecture),))
        if architecture in ("gemma2", "gemma3"):
            layer |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
        if architecture == "gpt-oss":
            del layer["ffn_norm"]
            biases = {
                f"attn_{name}": (n,) for name, n in (("q", q), ("k", kv), ("v", kv), ("output", HIDDEN))
            }
            biases |= {f"ffn_{name}_exps": (EXPERTS, EACH) for name in ("gate", "up")}
            biases |= {"ffn_down_exps": (EXPERTS, HIDDEN), "ffn_gate_inp": (EXPERTS,)}
            found |= {f"blk.{i}.{name}.bias": shape for name, shape in biases.items()}
            layer |= {"post_attention_norm": (HIDDEN,), "attn_sinks": (HEADS,)}
        found |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        if architecture in ("qwen2", "qwen2moe"):
            found |= {f"blk.{i}.attn_{name}.bias": (n,) for name, n in (("q", q), ("k", kv), ("v", kv))}
    return found


def blocks(format: str, n: int, k: int) -> torch.Tensor:
    """Rows of random blocks, all bits of them, whose scales make weights of about a tenth."""
    from opsmith.ops.packed_linear.gguf import BLOCKS

    numbers, size = BLOCKS[format]
    made = torch.randint(0, 256, (n, k // numbers, size), dtype=torch.uint8)
    if format == "mxfp4":
        made[..., 0] = torch.randint(120, 124, made.shape[:-1])
        return made.flatten(1)
    steps = {
        "q8_0": 64,
        "q5_0": 8,
        "q4_0": 4,
        "q6_k": 1200,
        "q5_k": 500,
        "q4_k": 250,
        "q3_k": 40,
        "iq4_xs": 1200,
        "iq4_nl": 64,
    }[format]
    for at in {"q6_k": (208,), "q3_k": (108,), "q5_k": (0, 2), "q4_k": (0, 2)}.get(format, (0,)):
        made[..., at : at + 2] = (torch.randn(n, k // numbers, 1) / (10 * steps)).half().view(torch.uint8)
    return made.flatten(1)


def write(file: Path, architecture: str, formats: tuple[str, ...] = FORMATS, most: int = 0) -> Path:
    """A file whose matrices take turns at formats, "f32", "f16" and others of gguf's among them.

    Of several, of so many tensors at `most`, the first.
    """
    import gguf

    torch.manual_seed(0)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=most)
    for key, value in values(architecture).items():
        add = {float: writer.add_float32, str: writer.add_string}.get(type(value), writer.add_uint32)
        add(key, value)
    # A tokenizer that loads.
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "o", "to", *(f"token {i}" for i in range(3, TOKENS))])
    writer.add_token_scores([0.0] * TOKENS)
    writer.add_token_merges(["t o"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    turn = 0
    for name, shape in tensors(architecture).items():
        if len(shape) == 1:
            numbers = torch.randn(shape) / 10 + name.endswith("norm.weight")
            writer.add_tensor(name, numbers.numpy())
            continue
        format = formats[turn % len(formats)]
        if "gate_inp" in name or name.endswith("bias"):  # of a router, which nobody rounds
            format = "f32"
        elif not name.endswith("ffn_gate_exps.weight"):  # gate and up of experts are of one format
            turn += 1
        if format in ("f32", "f16"):
            weight = (torch.randn(shape) / 10).to(torch.float16 if format == "f16" else torch.float32)
            writer.add_tensor(name, weight.numpy())
        elif format == "q4_1":
            rows = gguf.quants.quantize(
                torch.randn(shape).numpy() / np.float32(10), gguf.GGMLQuantizationType.Q4_1
            )
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
        else:
            rows = blocks(format, math.prod(shape[:-1]), shape[-1]).view(*shape[:-1], -1).numpy()
            writer.add_tensor(name, rows, raw_dtype=gguf.GGMLQuantizationType[format.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(file.parent.glob(f"{file.stem}-00001-of-*")) if most else file
