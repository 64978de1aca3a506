"""The tests that transformers has for every model, with each model optimized: `make hf-tests`.

    python -m tests.hf                          every architecture, without opsmith and with it
    python -m tests.hf llama bert -k outputs    some, and what pytest is to be told

They lie in the source distribution of transformers, which is fetched for them. A model that is set to `eval()` is to be
used, so there it is optimized. What passes without has to pass with; what does not is run under `torch.compile` alone,
which shows whose fault it is.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
import types
import unittest
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from tests.compiler.models import TINY

FOLDER = Path(__file__).parents[1] / "build" / "hf-tests"
# What is fetched: the tests, and what they import and we do not have otherwise.
SOURCES = {"5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71"}
PARAMETERIZED = "0.9.0", "4e0758e3d41bea3bbd05ec14fc2c24736723f243b28d702081aef438c9372b1b"

SIZES = TINY | {"vocab_size": 99}
WINDOW = {"sliding_window": 4}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
# What a tiny one of each needs beside the sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {**WINDOW, "query_pre_attn_scalar": 8},
    "qwen3": {},
    "mistral": WINDOW,
    "phi3": {},
    "gpt2": {"n_positions": 64},
    "gpt_neox": {},
    "mixtral": EXPERTS,
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {**MLA, **ROUTED, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 4},
    "bert": {},
    "roberta": {},
    "modernbert": {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2},
    "t5": {"num_layers": 2, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0},
    "bart": {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in STACK.items()},
    "gpt_oss": EXPERTS | WINDOW,
    "deberta-v2": {"relative_attention": True, "position_buckets": 4, "pos_att_type": ["p2c", "c2p"]},
    "falcon": {},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "bloom": {},
}
# The model itself, and with what it was trained for.
TASKS = ["", "_FOR_SEQ_TO_SEQ_CAUSAL_LM", "_FOR_MASKED_LM", "_FOR_CAUSAL_LM"]


class Tester:
    """What transformers' tests ask about a model: a tiny configuration, and inputs."""

    is_training = True
    batch_size, seq_length, num_choices = 3, 7, 3
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, family: str) -> None:
        self.family = family

    def get_config(self) -> Any:
        import transformers

        kind = type(transformers.AutoConfig.for_model(self.family))
        known = {*vars(kind()), *kind.attribute_map}
        return kind(**{name: n for name, n in SIZES.items() if name in known} | FAMILIES[self.family])

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        config = self.get_config()
        ids = torch.randint(3, SIZES["vocab_size"], (self.batch_size, self.seq_length))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if config.is_encoder_decoder:
            inputs |= {f"decoder_{name}": tensor.clone() for name, tensor in inputs.items()}
        return config, inputs


def common() -> Any:
    """The module of the tests; the two mixins that it imports and that are not shipped are left empty."""
    name = "transformers_tests"
    missing = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
    parts = {part for module in missing for part in (module, module.partition(".")[0])}
    for module in ["", *sorted(parts)]:
        made: Any = types.ModuleType(f"{name}.{module}".rstrip("."))
        made.__path__ = [] if module else [str(_unpacked() / "tests")]
        if module in missing:
            setattr(made, missing[module], type(missing[module], (), {}))
        sys.modules[made.__name__] = made
    return importlib.import_module(f"{name}.test_modeling_common")


def case(family: str) -> type:
    """The tests of one family, as a class that pytest collects."""
    from transformers.models.auto import modeling_auto

    module = common()
    config = Tester(family).get_config()
    maps = [getattr(modeling_auto, f"MODEL{task}_MAPPING") for task in TASKS]
    classes = dict.fromkeys(m[type(config)] for m in maps if type(config) in m)

    def set_up(self: Any) -> None:
        self.model_tester = Tester(family)

    mixins = (module.ModelTesterMixin, module.GenerationTesterMixin, unittest.TestCase)
    body = {"setUp": set_up, "all_model_classes": tuple(classes)[:2], "__module__": __name__}
    return type("Tests", mixins, body | {"is_encoder_decoder": config.is_encoder_decoder})


def compile_at_eval(compiled: Callable[[Any], object]) -> None:
    """From here on a model of transformers that is set to `eval()` is compiled."""
    from transformers import PreTrainedModel

    plain = PreTrainedModel.eval

    def evaluated(self: Any) -> Any:
        plain(self)
        compiled(self)
        return self

    PreTrainedModel.eval = evaluated  # type: ignore[method-assign]


def optimized(model: Any) -> None:
    """By opsmith; nothing is timed."""
    import opsmith

    if not hasattr(model, "opsmith"):
        opsmith.optimize(model, config=opsmith.Config(tune=False, inductor=False))


def captured(model: Any) -> None:
    """By PyTorch alone, as opsmith has it captured."""
    model.compile(backend="eager", dynamic=True)


COMPILED = {"with": optimized, "captured": captured}


def _unpacked() -> Path:
    return FOLDER / f"transformers-{version('transformers')}"


def fetch() -> None:
    """The source distribution of the transformers that is installed, and a package that its tests import."""
    have = version("transformers")
    if have not in SOURCES:
        sys.exit(
            f"hf-tests: no hash of the sources of transformers {have} is known: add it to SOURCES in {__file__}"
        )
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    quiet = ["--quiet", "--no-deps", "--require-hashes", "-r", str(FOLDER / "wanted.txt")]
    if not _unpacked().exists():
        _want("transformers", have, SOURCES[have])
        download = ["download", "--no-binary", ":all:", "--no-build-isolation", "-d", str(FOLDER)]
        subprocess.run([*pip, *download, *quiet], check=True)
        with tarfile.open(FOLDER / f"transformers-{have}.tar.gz") as archive:
            archive.extractall(FOLDER, filter="data")
    if not (FOLDER / "site" / "parameterized").exists():
        _want("parameterized", *PARAMETERIZED)
        subprocess.run([*pip, "install", "--target", str(FOLDER / "site"), *quiet], check=True)


def _want(package: str, number: str, digest: str) -> None:
    (FOLDER / "wanted.txt").write_text(f"{package}=={number} --hash=sha256:{digest}\n")


def outcomes(family: str, how: str, options: list[str]) -> tuple[dict[str, str], int]:
    """How each test of a family ended, and how often opsmith left something to eager PyTorch."""
    name = f"{family}-{how}"
    path = [str(FOLDER / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    told = {"OPSMITH_HF_FAMILY": family, "OPSMITH_HF_HOW": how, "HF_HUB_OFFLINE": "1"}
    # Their own markers and warnings are no faults of ours.
    ours = [
        "-o",
        "addopts=-p no:logging --import-mode=importlib --dist=worksteal",
        "-W",
        "default",
        "-n",
        "2",
    ]
    report = FOLDER / f"{name}.xml"
    report.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "--tb=short", f"--junitxml={report}", *ours, *options],
        env=os.environ | told | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
    )
    (FOLDER / f"{name}.log").write_text(run.stdout + run.stderr)
    if not report.exists():
        sys.exit(f"hf-tests: pytest did not run: see {FOLDER / name}.log")
    found = {}
    for test in ElementTree.parse(report).iter("testcase"):
        ended = {child.tag for child in test} & {"skipped", "failure", "error"}
        found[test.get("name", "")] = min(ended, default="passed")
    return found, run.stdout.count("opsmith: a")


def main(arguments: list[str]) -> int:
    """Runs each family twice, says how both went, and is 1 where opsmith fails what passes without and captured."""
    fetch()
    families = [a for a in arguments if a in FAMILIES] or list(FAMILIES)
    options = [a for a in arguments if a not in FAMILIES]
    results: dict[str, Any] = {}
    print("| architecture | passes without | with | fails with | fails captured | left to eager |")
    print("|---|--:|--:|---|---|--:|")
    for family in families:
        without, _ = outcomes(family, "without", options)
        found, left = outcomes(family, "with", options)
        passes = _passed(without)
        worse = [name for name in passes if found.get(name) != "passed"]
        # Whether PyTorch's capture fails them already: some replace what Dynamo reads.
        captured = outcomes(family, "captured", [*options, "-k", " or ".join(worse)])[0] if worse else {}
        theirs = [name for name in worse if captured.get(name) != "passed"]
        ours = [name for name in worse if name not in theirs]
        results[family] = {"passes": passes, "worse": ours, "captured": theirs, "left": left}
        row = family, len(passes), len(_passed(found)), ", ".join(ours), ", ".join(theirs), left
        print("|", " | ".join(map(str, row)), "|", flush=True)
        (FOLDER / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    return int(any(result["worse"] for result in results.values()))


def _passed(found: Mapping[str, str]) -> list[str]:
    return [name for name, ended in found.items() if ended == "passed"]


if "OPSMITH_HF_FAMILY" in os.environ:
    if os.environ["OPSMITH_HF_HOW"] in COMPILED:
        compile_at_eval(COMPILED[os.environ["OPSMITH_HF_HOW"]])
    Tests = case(os.environ["OPSMITH_HF_FAMILY"])
elif __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
