"""`opsmith evaluate`: a tiny model in several formats, the rule behind the recommendation, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith.cli import main
from opsmith.cli.evaluate import Row, recommended
from opsmith.evaluation import Estimate, Evaluation

transformers = pytest.importorskip("transformers")

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "away"]
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of a few words, and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    where = tmp_path_factory.mktemp("model")
    vocabulary = {word: i for i, word in enumerate(["<s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(where)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(vocabulary), **SIZES))
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight.mul_(8)
    model.save_pretrained(where)
    chosen = torch.randint(len(WORDS), (300,), generator=torch.Generator().manual_seed(1)).tolist()
    (where / "text.txt").write_text(" ".join(WORDS[i] for i in chosen))
    return where


def test_formats_are_held_against_the_model_as_it_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = str(folder / "text.txt"), tmp_path / "out.json"
    formats = ["--format", "float32", "--format", "bfloat16", "--format", "int8", "--format", "int4"]
    args = ["evaluate", str(folder), "--text", text, *formats, "--group", "32", "--group", "64"]
    assert main([*args, "--asymmetric", "--calibration", text, "--window", "50", "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["machine"]["commit"]
    assert data["machine"]["torch"] == torch.__version__
    rows = {row["format"]: row for row in data["rows"]}
    assert list(rows)[:4] == ["float32, as it is", "bfloat16", "int8", "int4, groups of 32"]
    assert len(rows) == 3 + 2 * 2 * 2
    assert rows["float32, as it is"]["kl"] is None
    assert {row["predictions"] for row in rows.values()} == {300}  # each window begins with <s>
    kl = {name: row["kl"]["value"] for name, row in rows.items() if row["kl"]}
    assert 0 < kl["bfloat16"] < kl["int8"] < kl["int4, groups of 32"]
    for group in (32, 64):
        for zeros in ("", " with zeros"):
            label = f"int4, groups of {group}{zeros}"
            assert kl[f"{label}, calibrated"] < kl[label]
    linear = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96) + 13 * 64
    norms = 64 * 5
    assert rows["float32, as it is"]["bytes"] == 4 * (linear + norms)
    assert rows["bfloat16"]["bytes"] == 2 * (linear + norms)
    assert rows["int8"]["bytes"] < 4 * norms + 1.1 * linear
    assert rows["int4, groups of 64"]["bytes"] < rows["int4, groups of 32"]["bytes"] < rows["int8"]["bytes"]
    said = capsys.readouterr().out
    assert "int4, groups of 32 with zeros, calibrated" in said
    assert data["recommendation"] in said


def test_layers_that_are_skipped_stay_as_they_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["evaluate", str(folder), "--text", str(folder / "text.txt"), "--format", "int8", "--json"]
    assert main([*args, "--skip", "*"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[1]["kl"]["value"] == 0
    assert rows[1]["bytes"] == rows[0]["bytes"]


def test_a_folder_of_few_bits_is_measured_as_it_is(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    shutil.copytree(folder, packed)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    opsmith.save(opsmith.optimize(model, config=opsmith.Config(tune=False), quantize="int8"), packed)
    out, text = tmp_path / "out.json", str(folder / "text.txt")
    assert main(["evaluate", str(packed), "--text", text, "--window", "50", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    (only,) = found["rows"]  # its layers have no floats to make other formats of
    assert found["recommendation"] == "recommended: packed, as it is; no other format was evaluated"
    assert (
        main(
            [
                "evaluate",
                str(folder),
                "--text",
                text,
                "--window",
                "50",
                "--format",
                "int8",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    same = json.loads(out.read_text())["rows"][1]
    assert only["bytes"] == same["bytes"]
    assert only["perplexity"]["value"] == pytest.approx(same["perplexity"]["value"], rel=1e-4)


def row(name: str, nbytes: int, ratio: Estimate | None, kl: float = 0.0) -> Row:
    return Row(name, nbytes, Evaluation(Estimate(10), Estimate(kl, kl, kl), None, ratio, 100, 50))


@pytest.mark.parametrize(
    ("within", "chosen"),
    [
        (1.0, "recommended: int8:"),
        (4.0, "recommended: int4:"),
        (0.1, "recommended: bfloat16, as it is; nothing"),
    ],
)
def test_the_smallest_format_that_loses_little_for_certain_is_recommended(within: float, chosen: str) -> None:
    rows = [
        row("bfloat16, as it is", 200, None),
        row("float32", 400, Estimate(1.0, 1.0, 1.0)),
        row("int8", 100, Estimate(1.001, 0.999, 1.005), 0.002),
        row("int8_dynamic", 110, Estimate(1.001, 0.999, 1.005), 0.002),
        row("int4", 60, Estimate(1.005, 0.98, 1.03), 0.02),
        row("lucky", 20, Estimate(0.9, 0.89, 0.91), 0.5),
        row("unknown", 10, Estimate(1.0)),  # too few predictions for an interval
    ]
    assert recommended(rows, within).startswith(chosen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--format": "int3"}, "--format: there is no 'int3'; there are: float32"),
        ({"--group": "48"}, "evaluate: quantize_group: "),
        ({"--dtype": "float8"}, "evaluate: dtype: "),
        ({"--text": "nowhere.txt"}, "--text: nowhere.txt is no text that can be read"),
        ({"--calibration": "nowhere.txt"}, "--calibration: nowhere.txt is no text that can be read"),
        ({"--window": "1"}, "--window"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    folder: Path, change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"--text": str(folder / "text.txt"), "--format": "int4"} | change
    # Before any model is looked for.
    assert main(["evaluate", "nowhere", *[part for pair in options.items() for part in pair]]) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_model_without_a_tokenizer_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(folder / name)
    assert main(["evaluate", str(tmp_path), "--text", str(folder / "text.txt")]) == 1
    assert "has no tokenizer that loads" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "model.gguf"), "--text", str(folder / "text.txt")]) == 1
    assert "there is no file" in capsys.readouterr().err
