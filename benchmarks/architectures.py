"""What the compiler finds in Hugging Face's architectures, that they say the same, and how fast they are then.

    python benchmarks/architectures.py                                  # all of them, an hour
    python benchmarks/architectures.py --only llama --only bert --dtype float32
    python benchmarks/architectures.py --table   # what was measured so far

Each is four layers of a real model's shape: its heads, its key heads and its features divided by one number, so that
at least 512 features stay; the vocabulary is cut and the weights are random. A batch of one and one of three, of which
two are padded, are held to the model as it was: the error of the results relative to the largest, beside eager
PyTorch's own (both to float64, where the model runs in float64); the tokens of greedy decoding; and the time for the
prompt and for each token after it, both by `generate`, in turns, as medians.

Each runs in a process of its own and leaves a file. What has one is not run again, so a run can be stopped and resumed.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer

import opsmith
from opsmith import measure
from opsmith.measure.stats import paired_ratio

PROMPT, TOKENS, VOCABULARY, BATCHES = 96, 32, 4096, (1, 3)
COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 64  # of sliding layers, so that the prompt is longer than one


def shape(
    hidden: int, heads: int, kv_heads: int | None, intermediate: int, head_dim: int | None = None, **more: Any
) -> dict[str, Any]:
    """A model's sizes by their usual names; those that its configuration does not have are left out."""
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"intermediate_size": intermediate, "head_dim": head_dim}
    return COMMON | {k: v for k, v in sizes.items() if v is not None} | more


def gpt2(hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    """The same by GPT-2's names."""
    names = {"n_embd": hidden, "n_layer": 4, "n_head": heads, "n_positions": 512}
    return {k: COMMON[k] for k in COMMON if k.endswith("_id") or k == "vocab_size"} | names | more


def t5(heads: int, ff: int, **more: Any) -> dict[str, Any]:
    """The same by T5's names."""
    sizes = {"d_model": 512, "d_kv": 64, "d_ff": ff, "num_layers": 4, "num_heads": heads}
    return sizes | {"vocab_size": VOCABULARY, "decoder_start_token_id": 0} | more


def bart(width: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    """The same by BART's names."""
    sides: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sides |= {f"{side}_layers": 4, f"{side}_attention_heads": heads, f"{side}_ffn_dim": ffn}
    return sides | {"d_model": width, "vocab_size": VOCABULARY, "max_position_embeddings": 512} | more


LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
}
# By type of model: what it is shaped after, by how much that was divided, and its configuration.
DECODERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("Llama 3.2 1B", 4, shape(512, 8, 2, 2048, 64)),
    "mistral": ("Mistral 7B", 4, shape(1024, 8, 2, 3584, 128, sliding_window=WINDOW)),
    "qwen2": ("Qwen2.5 0.5B", 1, shape(896, 14, 2, 4864)),
    "phi3": ("Phi-3 mini", 4, shape(768, 8, 8, 2048)),
    "olmo": ("OLMo 1B", 4, shape(512, 4, 4, 2048)),
    "nanochat": ("nanochat d20", 2, shape(640, 5, 5, 2560)),
    "olmo2": ("OLMo 2 1B", 4, shape(512, 4, 4, 2048)),
    "olmo3": ("Olmo 3 7B", 4, shape(1024, 8, 8, 2752, sliding_window=WINDOW)),
    "granite": (
        "Granite 3.1 2B",
        4,
        shape(512, 8, 2, 2048, embedding_multiplier=12.0, residual_multiplier=0.22),
    ),
    "starcoder2": ("StarCoder2 3B", 4, shape(768, 12, 1, 3072)),
    "cohere": ("Command R", 8, shape(1024, 8, 8, 2816)),
    "cohere2": ("Command R7B", 4, shape(1024, 8, 2, 3584, sliding_window=WINDOW)),
    "smollm3": ("SmolLM3 3B", 4, shape(512, 4, 1, 2752)),
    "stablelm": ("StableLM 2 1.6B", 4, shape(512, 8, 8, 1408)),
    "exaone4": ("EXAONE 4.0 32B", 8, shape(640, 5, 1, 3424, sliding_window=WINDOW)),
    "ernie4_5": ("ERNIE 4.5 0.3B", 1, shape(1024, 16, 2, 3072, 128)),
    "arcee": ("AFM 4.5B", 4, shape(640, 5, 1, 4608, 128)),
    "nemotron": ("Minitron 4B", 4, shape(768, 6, 2, 2304, 128)),
    "persimmon": ("Persimmon 8B", 8, shape(512, 8, None, 2048)),
    "helium": ("Helium 1 2B", 4, shape(640, 5, 5, 1760, 128)),
    "qwen3": ("Qwen3 0.6B", 1, shape(1024, 16, 8, 3072, 128)),
    "gemma": ("Gemma 2B", 4, shape(512, 2, 1, 4096, 256)),
    "gemma2": ("Gemma 2 2B", 4, shape(576, 2, 1, 2304, 256, sliding_window=WINDOW)),
    "gemma3_text": (
        "Gemma 3 270M",
        1,
        shape(640, 4, 1, 2048, 256, sliding_window=WINDOW, query_pre_attn_scalar=256)
        | {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "glm": ("GLM-Edge 1.5B", 4, shape(512, 4, 1, 1536, 128)),
    "glm4": ("GLM-4 9B", 4, shape(1024, 8, 1, 3424, 128)),
    "seed_oss": ("Seed-OSS 36B", 8, shape(640, 10, 1, 3456, 128)),
    "hunyuan_v1_dense": ("Hunyuan 1.8B", 4, shape(512, 4, 1, 1536, 128)),
    "phi": ("Phi-1.5", 4, shape(512, 8, 8, 2048)),
    "gpt_neox": ("Pythia 160M", 1, shape(768, 12, None, 3072)),
    "lfm2": (
        "LFM2 350M",
        1,
        shape(1024, 16, 8, 6656, layer_types=["conv", "conv", "full_attention", "conv"]),
    ),
    "mixtral": ("Mixtral 8x7B", 8, shape(512, 4, 1, 1792, 128, num_local_experts=8, num_experts_per_tok=2)),
    "qwen2_moe": (
        "Qwen1.5 MoE A2.7B",
        4,
        shape(512, 4, 4, 1408, num_experts=15, num_experts_per_tok=4, moe_intermediate_size=352)
        | {"shared_expert_intermediate_size": 1408},
    ),
    "qwen3_moe": (
        "Qwen3 30B A3B",
        4,
        shape(512, 8, 1, 1536, 128, num_experts=32, num_experts_per_tok=8, moe_intermediate_size=192),
    ),
    "olmoe": ("OLMoE 1B 7B", 4, shape(512, 4, 4, 256, num_experts=16, num_experts_per_tok=4)),
    "gpt_oss": (
        "gpt-oss 20B",
        4,
        shape(720, 16, 2, 720, 64, num_local_experts=8, num_experts_per_tok=4, sliding_window=WINDOW),
    ),
    "deepseek_v2": (
        "DeepSeek V2 Lite",
        4,
        shape(512, 4, 4, 2736, q_lora_rank=None, n_group=1, topk_group=1, moe_intermediate_size=352) | LATENT,
    ),
    "deepseek_v3": (
        "DeepSeek V3",
        8,
        shape(896, 16, 16, 2304, q_lora_rank=192, n_group=4, topk_group=2, moe_intermediate_size=256)
        | LATENT,
    ),
    "gpt2": ("GPT-2", 1, gpt2(768, 12)),
    "gpt_bigcode": ("StarCoderBase 1B", 4, gpt2(512, 4)),
    "gptj": ("GPT-J 6B", 4, gpt2(1024, 4, rotary_dim=64)),
    "codegen": ("CodeGen 350M", 1, gpt2(1024, 16, rotary_dim=32)),
    "gpt_neo": (
        "GPT-Neo 125M",
        1,
        shape(768, 12, None, 3072, num_layers=4, num_heads=12)
        | {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    ),
    "opt": ("OPT 125M", 1, shape(768, 12, None, 3072, ffn_dim=3072, word_embed_proj_dim=768)),
    "biogpt": ("BioGPT", 1, shape(1024, 16, None, 4096)),
    "falcon": ("Falcon 7B", 8, shape(576, 9, None, 2304)),
    "bloom": ("BLOOM 560M", 1, gpt2(1024, 16, hidden_size=1024)),
    "mpt": (
        "MPT 7B",
        4,
        {"d_model": 1024, "n_heads": 8, "n_layers": 4, "vocab_size": VOCABULARY, "max_seq_len": 512},
    ),
    "mamba": ("Mamba 130M", 1, COMMON | {"hidden_size": 768, "state_size": 16}),
}
_BERT = shape(768, 12, None, 3072)
ENCODERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "bert": ("BERT base", 1, _BERT),
    "roberta": ("RoBERTa base", 1, _BERT),
    "mpnet": ("MPNet base", 1, _BERT),
    "xlm-roberta": ("XLM-R base", 1, _BERT),
    "camembert": ("CamemBERT base", 1, _BERT),
    "nomic_bert": ("nomic-embed v1.5", 1, _BERT),
    "albert": ("ALBERT base", 1, _BERT | {"embedding_size": 128}),
    "electra": ("ELECTRA base", 1, _BERT | {"embedding_size": 768}),
    "distilbert": (
        "DistilBERT base",
        1,
        {"dim": 768, "hidden_dim": 3072, "n_layers": 4, "n_heads": 12, "vocab_size": VOCABULARY},
    ),
    "deberta-v2": (
        "DeBERTa v3 base",
        1,
        _BERT
        | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
        | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
    ),
    "modernbert": (
        "ModernBERT base",
        1,
        shape(768, 12, None, 1152, local_attention=WINDOW, global_attn_every_n_layers=3, cls_token_id=1),
    ),
}
BOTH: dict[str, tuple[str, int, dict[str, Any]]] = {
    "t5": ("T5 small", 1, t5(8, 2048)),
    "mt5": ("mT5 small", 1, t5(6, 1024, feed_forward_proj="gated-gelu")),
    "bart": ("BART base", 1, bart(768, 12, 3072)),
    "marian": (
        "OPUS-MT",
        1,
        bart(512, 8, 2048, activation_function="swish", pad_token_id=0, decoder_start_token_id=0),
    ),
    "m2m_100": ("NLLB 600M", 2, bart(512, 8, 2048, activation_function="relu")),
}
KINDS = {
    "decoder": (DECODERS, transformers.AutoModelForCausalLM),
    "encoder": (ENCODERS, transformers.AutoModel),
    "both": (BOTH, transformers.AutoModelForSeq2SeqLM),
}
NAMES = {name: kind for kind, (models, _) in KINDS.items() for name in models}


class Case:
    """One architecture in one dtype: the model as it was, its optimized copy, and the batches given to both."""

    def __init__(self, name: str, dtype: str) -> None:
        self.kind = NAMES[name]
        models, auto = KINDS[self.kind]
        self.like, self.divided, sizes = models[name]
        torch.manual_seed(0)
        eager = auto.from_config(transformers.AutoConfig.for_model(name, **sizes)).eval()
        self.eager: Any = eager.to(getattr(torch, dtype))
        self.batches = {rows: self._inputs(rows) for rows in BATCHES}
        ours = copy.deepcopy(self.eager)
        start = time.perf_counter()
        # Inductor's compilations would take longer than all else; what is measured is opsmith's own.
        self.ours: Any = opsmith.optimize(ours, self.batches[3], config=opsmith.Config(inductor=False))
        self.seconds = time.perf_counter() - start

    def _inputs(self, rows: int) -> dict[str, torch.Tensor]:
        """Token ids, of which each further row has fewer: decoders are padded at the left."""
        ids = torch.randint(3, VOCABULARY, (rows, PROMPT), generator=torch.Generator().manual_seed(rows))
        missing = 20 * torch.arange(rows)[:, None]
        mask = (torch.arange(PROMPT)[None] >= missing).long()
        inputs = {"input_ids": ids, "attention_mask": mask if self.kind == "decoder" else mask.flip(1)}
        return inputs | ({"decoder_input_ids": ids[:, :TOKENS]} if self.kind == "both" else {})

    def results(self, model: Any, rows: int) -> torch.Tensor:
        """A model's main result where nothing is padded."""
        inputs = self.batches[rows]
        result: torch.Tensor = model(**inputs)[0].double()
        kept = inputs["attention_mask"].bool()
        return result[kept] if result.shape[:2] == kept.shape else result

    def errors(self, rows: int) -> tuple[float, float | None]:
        """The error of our results relative to the largest one, and eager's; None where that is all there is."""
        got, eager = self.results(self.ours, rows), self.results(self.eager, rows)
        try:
            exact = self.results(copy.deepcopy(self.eager).double(), rows)
        except RuntimeError:  # a product that PyTorch does not have in float64
            exact = eager
        if not bool(exact.isfinite().all()):  # a mask made for float32 overflows
            exact = eager
        scale = float(exact.abs().max())
        ours, theirs = (float((r - exact).abs().max()) / scale for r in (got, eager))
        return ours, None if exact is eager else theirs

    def run(self, model: Any, rows: int, tokens: int) -> torch.Tensor:
        """So many greedy tokens; of an encoder its result."""
        inputs = self.batches[rows]
        if self.kind == "encoder":
            return model(**inputs)[0]  # type: ignore[no-any-return]
        given = {k: v for k, v in inputs.items() if not k.startswith("decoder")}
        how = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        return model.generate(**given, **how)  # type: ignore[no-any-return]

    def same_tokens(self, rows: int) -> float:
        """Which part of the tokens of greedy decoding is eager's."""
        ours, eager = (self.run(model, rows, TOKENS)[:, -TOKENS:] for model in (self.ours, self.eager))
        return float((ours == eager).double().mean())

    def times(self, rows: int, seconds: float) -> dict[str, list[list[float]]]:
        """Milliseconds of eager and ours in turns: of the prompt with its first token, and of each token after it."""
        taken: dict[str, list[list[float]]] = {"prompt": [[], []], "token": [[], []]}
        end = time.perf_counter() + seconds
        while len(taken["prompt"][0]) < 3 or (time.perf_counter() < end and len(taken["prompt"][0]) < 15):
            for i, model in enumerate((self.eager, self.ours)):
                first = self._clock(model, rows, 1)
                taken["prompt"][i].append(first)
                if self.kind != "encoder":
                    taken["token"][i].append((self._clock(model, rows, TOKENS) - first) / (TOKENS - 1))
        return taken

    def _clock(self, model: Any, rows: int, tokens: int) -> float:
        start = time.perf_counter()
        self.run(model, rows, tokens)
        return (time.perf_counter() - start) * 1e3


@torch.no_grad()
@measure.no_collection()
def study(name: str, dtype: str, seconds: float) -> dict[str, Any]:
    """All that is asked of one architecture, timing it for about so long."""
    case = Case(name, dtype)
    report = case.ours.opsmith.report
    record: dict[str, Any] = {
        "architecture": name,
        "like": case.like,
        "divided": case.divided,
        "dtype": dtype,
        "parameters": sum(p.numel() for p in case.eager.parameters()),
        "found": dict(sorted(report.found.items())),
        "left": list(filter(None, [*(g.left for g in report.graphs), *report.rolled_back])),
        "seconds_to_optimize": case.seconds,
        "error": {}, "tokens": {}, "times": {},
    }  # fmt: skip
    for rows in BATCHES:
        record["error"][rows] = case.errors(rows)
        record["tokens"][rows] = None if case.kind == "encoder" else case.same_tokens(rows)
        case.run(case.ours, rows, 1)  # captured before it is timed
        record["times"][rows] = case.times(rows, seconds / len(BATCHES))
    machine = measure.describe()
    threads = f"{machine.threads} thread{'s' * (machine.threads > 1)}"
    record["machine"], record["torch"] = f"{machine.cpu}, {threads}", torch.__version__
    record["commit"] = machine.commit
    return record | {"transformers": transformers.__version__, "date": time.strftime("%Y-%m-%d")}


def in_a_process(name: str, dtype: str, seconds: float, limit: float, folder: Path) -> dict[str, Any]:
    """The same in a process of its own, whose memory and captures end with it; or what went wrong there."""
    file = folder / f"{name}-{dtype}.json"
    command = [sys.executable, __file__, "--only", name, "--dtype", dtype, "--here"]
    try:
        done = subprocess.run(
            [*command, "--seconds", str(seconds), "--json", str(folder)],
            timeout=limit,
            capture_output=True,
            text=True,
        )
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except subprocess.TimeoutExpired:
        problem = [f"took longer than {limit:g} s"]
    if problem:
        return {"architecture": name, "dtype": dtype, "failed": problem[0]}
    record: dict[str, Any] = json.loads(file.read_text())
    return record


def _faster(record: dict[str, Any], what: str, rows: int) -> str:
    """How many times as fast; `=` where that is no difference, `?` where it concludes nothing."""
    eager, ours = record["times"][str(rows)][what]
    if not ours:
        return ""
    ratio = paired_ratio("ours", "eager", ours, eager)
    return {"inconclusive": "?", "no difference": "="}.get(ratio.verdict, f"{ratio.speedup:.2f}")


def tables(records: list[dict[str, Any]]) -> str:
    """What was found and how exact it is, and how fast it is over eager."""
    known = {(r["architecture"], r["dtype"]): r for r in records if "failed" not in r}
    dtypes = [d for d in ("float32", "bfloat16") if any(d == dtype for _, dtype in known)]
    names = [n for n in NAMES if any((n, d) in known for d in dtypes)]
    columns = " | ".join(f"{d} | eager's" for d in dtypes)
    lines = [f"| architecture | like | found in four layers | {columns} | tokens | left as it was |"]
    lines += [f"|---|---|---|{'--:|' * (2 * len(dtypes))}---|---|"]
    for name in names:
        by = [known.get((name, d)) for d in dtypes]
        first = next(r for r in by if r)
        found = ", ".join(f"{n} {k}" for k, n in first["found"].items()) or "nothing"
        like = first["like"] + (f" / {first['divided']}" if first["divided"] > 1 else "")
        errors = " | ".join(_errors(r) for r in by)
        left = "; ".join(dict.fromkeys(line for r in by if r for line in r["left"]))
        lines.append(f"| {name} | {like} | {found} | {errors} | {_tokens(known, name)} | {left} |")
    speeds = [(d, what, rows) for d in dtypes for what in ("prompt", "token") for rows in BATCHES]
    lines += ["", "| architecture | " + " | ".join(f"{d}, {w}, {n}" for d, w, n in speeds) + " |"]
    lines += ["|---|" + "--:|" * len(speeds)]
    for name in names:
        cells = [_faster(known[name, d], w, n) if (name, d) in known else "" for d, w, n in speeds]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    failed = [f"- {r['architecture']}, {r['dtype']}: {r['failed']}" for r in records if "failed" in r]
    return "\n".join([*lines, *(["", *failed] if failed else [])])


def _errors(record: dict[str, Any] | None) -> str:
    """The larger errors of the two batches."""
    if record is None:
        return " | "
    ours, eager = zip(*record["error"].values(), strict=True)
    return f"{max(ours):.1e} | " + ("" if None in eager else f"{max(eager):.1e}")


def _tokens(known: dict[tuple[str, str], dict[str, Any]], name: str) -> str:
    """Whether float32 gives eager's tokens."""
    record = known.get((name, "float32"))
    if record is None or None in record["tokens"].values():
        return ""
    part = min(record["tokens"].values())
    return "the same" if part == 1 else f"DIFFERENT: {part:.0%} are the same"


def main(
    only: Annotated[list[str] | None, typer.Option(help="Architectures; all of them by default.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16; both by default.")] = None,
    folder: Annotated[
        Path, typer.Option("--json", help="Where the files are: one for each architecture and dtype.")
    ] = Path("build/architectures"),
    seconds: Annotated[float, typer.Option(help="How long to time each.")] = 6.0,
    limit: Annotated[float, typer.Option(help="After how many seconds to give one up.")] = 180.0,
    table: Annotated[bool, typer.Option("--table", help="Print what there is, and run nothing.")] = False,
    here: Annotated[bool, typer.Option("--here", help="In this process, without a limit.")] = False,
) -> None:
    """Run what has no file yet, and print the tables."""
    unknown = [name for name in only or () if name not in NAMES]
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; there are: {', '.join(NAMES)}")
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")  # a column says what was left
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for name in only or NAMES:
        for kind in dtype or ("float32", "bfloat16"):
            file = folder / f"{name}-{kind}.json"
            start = time.perf_counter()
            if not file.exists() and not table:
                if here:
                    file.write_text(json.dumps(study(name, kind, seconds), indent=1))
                    return
                records.append(in_a_process(name, kind, seconds, limit, folder))
                result = records[-1].get("failed", "done")
                print(f"{name} {kind}: {result}, {time.perf_counter() - start:.0f} s", file=sys.stderr)
            elif file.exists():
                records.append(json.loads(file.read_text()))
    print(tables(records))


if __name__ == "__main__":
    typer.run(main)
