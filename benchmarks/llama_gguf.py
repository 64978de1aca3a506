"""Writes a Llama of 1.1 billion random weights as a GGUF file, for `opsmith bench-llm FILE --against llamacpp`.

    python benchmarks/llama_gguf.py q8_0|q4_0|... FILE

TinyLlama's sizes, other weights in each layer, every matrix in the one format: one that gguf-py writes, no K-quants.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

from opsmith.cli.llm.source import LLAMA

HIDDEN, INNER, TOKENS = LLAMA["hidden_size"], LLAMA["intermediate_size"], LLAMA["vocab_size"]
HEADS, KV_HEADS = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"]
KV = HIDDEN // HEADS * KV_HEADS
LAYER = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV, HIDDEN),
    "attn_v": (KV, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def describe(writer: gguf.GGUFWriter) -> None:
    """The sizes, and a tokenizer of words that nobody says."""
    writer.add_block_count(LLAMA["num_hidden_layers"])
    writer.add_context_length(LLAMA["max_position_embeddings"])
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(TOKENS)
    kind = gguf.TokenType
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    words = [f"\u2581w{i}" for i in range(TOKENS - 259)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *bytes_, *words])
    writer.add_token_scores([-float(i) for i in range(TOKENS)])
    writer.add_token_types(
        [kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256 + [kind.NORMAL] * len(words)
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("format", type=str.upper, choices=[f.name for f in gguf.GGMLQuantizationType])
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    format = gguf.GGMLQuantizationType[options.format]
    writer = gguf.GGUFWriter(options.file, "llama")
    describe(writer)
    random, ones = np.random.default_rng(0), np.ones(HIDDEN, np.float32)

    def matrix(name: str, shape: tuple[int, int]) -> None:
        numbers = random.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        writer.add_tensor(name, gguf.quants.quantize(numbers, format), raw_dtype=format)

    matrix("token_embd.weight", (TOKENS, HIDDEN))
    for layer in range(LLAMA["num_hidden_layers"]):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for name, shape in LAYER.items():
            matrix(f"blk.{layer}.{name}.weight", shape)
    writer.add_tensor("output_norm.weight", ones)
    matrix("output.weight", (TOKENS, HIDDEN))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
