"""What the compiler finds in Hugging Face's architectures, small and with random weights, and that they stay the same.

    python benchmarks/architectures.py [llama phi3 ...] > table.md

Each is built from its configuration alone, optimized without timing (what is found does not depend on it), and held to
the model as it was: the error of its results, relative to the largest, beside eager PyTorch's own (both to float64,
where the model runs in float64), and the tokens of greedy decoding with a padded batch.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers

import opsmith

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 200,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
HEADS = GROUPED | {"head_dim": 16}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200, "n_positions": 128} | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 200} | {
    "decoder_start_token_id": 0
}
BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "vocab_size": 200,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"sliding_window": 8}
LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
DECODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3", "olmo", "olmo2", "granite", "starcoder2"), GROUPED),
    **dict.fromkeys(("cohere", "smollm3", "stablelm", "exaone4", "ernie4_5", "arcee", "nemotron"), GROUPED),
    **dict.fromkeys(("qwen3", "gemma", "glm4", "seed_oss", "hunyuan_v1_dense"), HEADS),
    **dict.fromkeys(("phi", "gpt_neox"), SIZES),
    **dict.fromkeys(("gemma2", "gemma3_text"), HEADS | WINDOW | {"query_pre_attn_scalar": 16}),
    "cohere2": GROUPED | WINDOW,
    "lfm2": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": GROUPED | EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": HEADS | EXPERTS,
    "olmoe": GROUPED | EXPERTS,
    "gpt_oss": HEADS | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": SIZES | LATENT | {"q_lora_rank": None},
    "deepseek_v3": SIZES | LATENT | {"q_lora_rank": 32},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gptj": GPT2 | {"rotary_dim": 8},
    "gpt_neo": SIZES | {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "opt": SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "falcon": SIZES,
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200, "pad_token_id": 0},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 200, "max_seq_len": 128},
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 200, "state_size": 8},
}
ENCODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("bert", "roberta", "mpnet", "xlm-roberta", "camembert", "nomic_bert"), SIZES),
    **dict.fromkeys(("albert", "electra"), SIZES | {"embedding_size": 32}),
    "distilbert": {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 200},
    "deberta-v2": SIZES
    | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16},
    "modernbert": SIZES | {"local_attention": 16, "global_attn_every_n_layers": 2} | {"cls_token_id": 1},
}
BOTH: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("t5", "mt5"), T5),
    "bart": BART,
    "marian": BART | {"pad_token_id": 0, "decoder_start_token_id": 0},
}
CLASSES = (
    (DECODERS, transformers.AutoModelForCausalLM),
    (ENCODERS, transformers.AutoModel),
    (BOTH, transformers.AutoModelForSeq2SeqLM),
)


def results(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """A model's main result where nothing is padded."""
    with torch.no_grad():
        result: torch.Tensor = model(**inputs)[0].double()
    kept = inputs["attention_mask"].bool()
    return result[kept] if result.shape[:2] == kept.shape else result


def row(name: str, config: dict[str, Any], auto: Any) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    model = auto.from_config(transformers.AutoConfig.for_model(name, **config)).eval()
    ids = torch.randint(3, 200, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask if auto is CLASSES[0][1] else mask.flip(1)}
    if auto is CLASSES[2][1]:
        inputs["decoder_input_ids"] = ids[:, :5]

    def tokens() -> Any:
        if auto is CLASSES[1][1]:
            return None
        fixed = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
        given = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
        return model.generate(**given, **fixed).tolist()

    eager, said = results(model, inputs), tokens()
    try:
        exact = results(copy.deepcopy(model).double(), inputs)
    except RuntimeError:  # a product that PyTorch does not have in float64
        exact = eager
    if not bool(exact.isfinite().all()):  # a mask made for float32 overflows
        exact = eager
    opsmith.optimize(model, inputs, config=opsmith.Config(tune=False))
    report = model.opsmith.report
    got, same = results(model, inputs), tokens() == said
    scale = float(exact.abs().max())
    ours, theirs = (float((r - exact).abs().max()) / scale for r in (got, eager))
    found = ", ".join(f"{n} {k}" for k, n in sorted(report.found.items())) or "nothing"
    note = "; ".join(filter(None, [*(g.left for g in report.graphs), *report.rolled_back]))
    said_so = "" if said is None else "the same" if same else "DIFFERENT"
    bound = f"{theirs:.1e}" if theirs else ""
    return f"| {name} | {found} | {ours:.1e} | {bound} | {said_so} | {note} |"


def table(names: list[str]) -> Iterator[str]:
    """The table, line by line."""
    yield "| architecture | found in two layers | error | eager's | tokens | left as it was |"
    yield "|---|---|--:|--:|---|---|"
    for models, auto in CLASSES:
        for name, config in models.items():
            if not names or name in names:
                yield row(name, config, auto)
                torch._dynamo.reset()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="architectures; all of them by default")
    wanted = parser.parse_args().names
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # the column says what was left
    for line in table(wanted):
        print(line, flush=True)
