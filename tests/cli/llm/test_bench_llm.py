"""`opsmith bench-llm`: a whole run on a small model, and that a wrong contestant is never timed."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import files as gguf_files

import opsmith
from opsmith.cli import CommandError, main, pictures
from opsmith.cli.hf import load_with_tokenizer
from opsmith.cli.llm import contestant, generator
from opsmith.cli.llm.bench import Bench, Said, _same
from opsmith.cli.llm.source import resolve
from opsmith.measure import WrongResult

transformers = pytest.importorskip("transformers")


def small(**changed: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changed})).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    small().save_pretrained(path)
    return path


def test_a_whole_run(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--format", "int8", "--prompt", "12", "--new-tokens", "6", "--rounds", "2"]
    files = ["--json", str(tmp_path / "bench.json"), "--svg", str(tmp_path / "bench.svg")]
    assert main(["bench-llm", str(folder), *arguments, *files]) == 0
    data = json.loads((tmp_path / "bench.json").read_text())
    [cell] = data["cells"]
    assert (cell["batch"], cell["prompt"], data["dtype"]) == (1, 12, "float32")
    assert list(cell["contestants"]) == ["hf", "int8"]
    eager, ours = cell["contestants"].values()
    assert 0 < eager["error"] < 1e-5 < ours["error"] < 0.5
    assert ours["bytes_read"] < eager["bytes_read"]
    assert ours["ratios"]["hf"]["token"]["pairs"] == 2
    assert eager["of_read_roof"] == pytest.approx(
        eager["bytes_read"] * eager["tokens_per_second"] / cell["read_bandwidth"]
    )
    assert "batch 1, prompt 12" in capfd.readouterr().out
    assert "tokens/s" in (tmp_path / "bench.svg").read_text()


def test_a_file_is_unpacked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = gguf_files.write(tmp_path / "model.gguf", "llama", ("q8_0",))
    source = resolve(str(file), tmp_path)
    assert source.gguf == file
    assert source.dtype == torch.float32
    weights = load_with_tokenizer(source.folder)[0].state_dict()
    assert not torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])
    torch.testing.assert_close(dict(weights), dict(load_with_tokenizer(file)[0].state_dict()), rtol=0, atol=0)
    assert capfd.readouterr() == ("", "")  # of transformers' own bar too


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--format", "int5"], "--format: 'int5' is not known; there are: float32, bfloat16"),
        (["--against", "vllm"], "--against: 'vllm' is not known; there are: hf, compile, llamacpp"),
        (["--dtype", "int8"], "--dtype: 'int8' is not known"),
        (["--context", "127"], "127 tokens and 4 after them are more than the model's 128 positions"),
        (["--prompt", "512"], "name fewer by --prompt, --context and --new-tokens"),
        (["--against", "llamacpp", "--llamacpp", "/no/python"], "there is no Python /no/python"),
        (["--format", "gguf"], "--format gguf: needs a .gguf file; name one as MODEL, or gemma"),
        (["--svg", "curves.gif"], "curves.gif is no .svg or .png file"),
    ],
)
def test_what_cannot_be_is_one_line(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench-llm", str(folder), "--prompt", "8", "--new-tokens", "4", *arguments]) == 1
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_an_encoder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=64)).save_pretrained(tmp_path)
    assert main(["bench-llm", str(tmp_path), "--prompt", "8", "--new-tokens", "4"]) == 1
    assert "a bert model generates no text; name a causal one" in capsys.readouterr().err


def test_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    for name, said in {
        "nothing": "nothing is no folder",
        str(tmp_path / "broken.gguf"): "does not load",
    }.items():
        assert main(["bench-llm", name]) == 1
        assert said in capsys.readouterr().err


class Played:
    """A contestant without a process, whose logits are a little off, and which may take other tokens when timed."""

    def __init__(self, logits: torch.Tensor, timed: list[int]) -> None:
        self.hello = {"weight_bytes": 100, "cache_element": 4, "about": ""}
        self.logits, self.timed = logits, timed
        self.asked = 0

    def ask(self, ids: Any, new: int, forced: Any = None, logits: str | None = None) -> dict[str, Any]:
        self.asked += logits is None
        if logits is not None:
            np.save(logits, self.logits.numpy())
        return {"tokens": [self.timed], "first": 0.1, "steps": [0.01] * (new - 1), "peak_bytes": 1}


EXACT = torch.randn(1, 3, 16, generator=torch.Generator().manual_seed(0))
TOKENS = EXACT.argmax(-1).tolist()


def bench(tmp_path: Path) -> Bench:
    source: Any = SimpleNamespace(config=small().config)
    return Bench(
        SimpleNamespace(status=lambda _: pytest.MonkeyPatch.context()), source, tmp_path, "float32", 3, 2
    )  # type: ignore[arg-type]


def said(logits: torch.Tensor) -> Said:
    return Said(TOKENS, logits, TOKENS)


def test_a_wrong_contestant_has_no_time(tmp_path: Path) -> None:
    rough = EXACT * (1 + 1e-3)  # with the weights as int4 rounds them
    known = {"exact": said(EXACT), "hf float32": said(EXACT * (1 + 1e-7)), "exact int4": said(rough)}
    off = EXACT * (1 + 1e-5)
    good, wrong = Played(EXACT * (1 + 1e-7), TOKENS[0]), Played(off, TOKENS[0])
    cell = bench(tmp_path)._cell((1, 4), [[1, 2, 3, 4]], {"hf": good, "float32": good}, known)
    assert cell["contestants"]["float32"]["tokens_per_second"] == pytest.approx(100)
    with pytest.raises(WrongResult, match="float32: wrong value: relative error of the logits 1"):
        bench(tmp_path)._cell((1, 4), [[1, 2, 3, 4]], {"hf": good, "float32": wrong}, known)
    rounded = bench(tmp_path)._cell((1, 4), [[1, 2, 3, 4]], {"int4": Played(rough, TOKENS[0])}, known)
    assert rounded["contestants"]["int4"]["error_of_arithmetic"] < 1e-6
    assert rounded["contestants"]["int4"]["error"] == pytest.approx(1e-3, rel=0.1)
    for other in (
        EXACT,
        EXACT.roll(1),
        EXACT * torch.nan,
    ):  # the exact result with other weights is not int4's
        with pytest.raises(WrongResult, match="int4"):
            bench(tmp_path)._cell((1, 4), [[1, 2, 3, 4]], {"int4": Played(other, TOKENS[0])}, known)
    # Who rounds what layers get may be off by as much as that takes.
    known["exact int8_dynamic"] = Said(TOKENS, EXACT, TOKENS, rows=1e-5)
    bench(tmp_path)._cell((1, 4), [[1, 2, 3, 4]], {"int8_dynamic": wrong}, known)


def test_a_timed_run_says_what_the_checked_one_did(tmp_path: Path) -> None:
    other = [*TOKENS[0][:2], (TOKENS[0][2] + 1) % 16]
    known = {"exact": said(EXACT), "hf float32": said(EXACT)}
    with pytest.raises(WrongResult, match="timed, it generated"):
        bench(tmp_path)._cell((1, 4), [[1, 2, 3, 4]], {"hf": Played(EXACT, other)}, known)
    # Where it would have left the text that it was led along, what it says behind that is its own.
    led = Said([[5, 6, 7]], EXACT, [[5, 8, 9]])
    _same("one", [[5, 8, 1, 2]], led, EXACT)
    with pytest.raises(WrongResult, match=r"\[5, 6\], checked, \[5, 8\]"):
        _same("one", [[5, 6, 7, 2]], led, EXACT)
    # Logits that are off by half of what lies between two tokens do not tell these apart.
    between = float(EXACT[0, 1, 8] - EXACT[0, 1, 6])
    off = EXACT.clone()
    off[0, 1, 0] += abs(between) / 2 + 1e-3
    _same("one", [[5, 6, 7, 2]], led, off)


def test_what_a_process_says_is_passed_on(tmp_path: Path) -> None:
    def started(code: str) -> contestant.Contestant:
        return contestant.Contestant("one", [sys.executable, "-c", code], {}, tmp_path / "log")

    with pytest.raises(CommandError, match="one ended with status 3: out of luck"):
        started("import sys; print('out of luck', file=sys.stderr); sys.exit(3)")
    with pytest.raises(CommandError, match="one: no such model"):
        started('print(\'{"error": "no such model"}\')')
    one = started(
        "import sys; print('{}', flush=True); sys.stdin.readline(); print('{\"first\": 1}', flush=True)"
    )
    assert one.ask(ids=[[1]]) == {"first": 1}
    with pytest.raises(CommandError, match="one ended with status 0"):
        one.ask(ids=[[1]])
    one.close()


def test_a_process_runs_a_files_own_bits(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    file = gguf_files.write(tmp_path / "model.gguf", "llama", ("q8_0",))
    spec = {"kind": "gguf", "gguf": str(file), "dtype": "float32", "threads": 1}
    command = [sys.executable, "-m", contestant.__name__]
    one = contestant.Contestant("gguf", command, spec, tmp_path / "log")
    try:
        answer = one.ask(ids=[[1, 2, 3, 4]], new=3)
    finally:
        one.close()
    shapes = gguf_files.tensors("llama") | {"token_embd.weight": (0,)}  # of which a token reads a row
    numbers = sum(map(math.prod, shapes.values()))
    assert len(answer["tokens"][0]) == 3
    assert answer["weight_bytes"] / numbers == pytest.approx(1 + 2 / 32, rel=0.01)


LLAMA = """
import numpy as np
__version__ = "0"
logits = np.zeros(16, np.float32)
class Llama:
    ctx = model = None
    def __init__(self, path, **options):
        print("noise of a library")
    def reset(self): self.seen = []
    def n_vocab(self): return 16
    def eval(self, tokens):
        self.seen += tokens
        logits[:] = 0
        logits[(self.seen[-1] + 1) % 16] = len(self.seen)
def llama_get_logits_ith(ctx, i): return np.ctypeslib.as_ctypes(logits)
def llama_model_size(model): return 1000
"""


def test_the_driver_of_llamacpp(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    driver = Path(contestant.__file__).with_name("llamacpp.py")
    code = "import sys, runpy; sys.path.insert(0, {!r}); runpy.run_path({!r}, run_name='__main__')"
    code = code.format(str(tmp_path), str(driver))
    spec = {"gguf": "a.gguf", "threads": 1, "longest": 32}
    one = contestant.Contestant("llamacpp", [sys.executable, "-c", code], spec, tmp_path / "log")
    assert one.hello["weight_bytes"] == 1000
    assert one.ask(ids=[[1, 2, 3]], new=4)["tokens"] == [[4, 5, 6, 7]]
    answer = one.ask(ids=[[1, 2, 3]], new=3, forced=[[9, 9, 9]], logits=str(tmp_path / "logits.npy"))
    assert len(answer["steps"]) == 2
    assert np.load(tmp_path / "logits.npy").argmax(-1).tolist() == [[4, 10, 10]]
    one.close()


def test_generate_is_the_models_own() -> None:
    model, ids = small(eos_token_id=7), torch.tensor([[5, 6, 7, 8], [1, 2, 3, 4]])
    plain = generator.generate(model, ids, 5)
    assert len(plain.steps) == 4
    assert plain.logits is None
    assert model.generation_config.eos_token_id == 7
    with torch.no_grad():
        longer = model(torch.cat([ids, plain.tokens], 1)).logits[:, 3:-1]
    checked = generator.generate(model, ids, 5, check=True)
    assert checked.logits is not None
    torch.testing.assert_close(checked.logits, longer)
    assert checked.tokens.tolist() == plain.tokens.tolist() == longer.argmax(-1).tolist()
    others = torch.tensor([[9, 8, 7, 6, 5], [5, 5, 5, 5, 5]])
    led = generator.generate(model, ids, 5, forced=others, check=True)
    assert led.logits is not None
    assert led.tokens.tolist() == others.tolist()
    with torch.no_grad():
        torch.testing.assert_close(led.logits, model(torch.cat([ids, others], 1)).logits[:, 3:-1])


@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_that_a_token_reads(tied: bool) -> None:
    model = small(tie_word_embeddings=tied)
    table = 96 * 32 * 4
    everything = sum(p.nbytes for p in model.parameters())
    assert generator.weight_bytes(model) == everything - (0 if tied else table)
    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
    opsmith.optimize(model, quantize="int8")
    packed = sum(layer.nbytes for layer in model.opsmith.report.quantized)
    assert generator.weight_bytes(model) == everything - linear + packed - (0 if tied else table)
    opsmith.restore(model)


def test_of_a_mixture_a_token_reads_the_experts_that_it_is_sent_to() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.GptOssConfig(
        **sizes, vocab_size=96, intermediate_size=32, num_local_experts=8, num_experts_per_tok=2, head_dim=8
    )
    model = transformers.GptOssForCausalLM(config).eval()
    of_experts = sum(p.nbytes for name, p in model.named_parameters() if ".experts." in name)
    rest = sum(p.nbytes for p in model.parameters()) - of_experts - 96 * 32 * 4
    assert generator.weight_bytes(model) == rest + of_experts / 4
    biases = sum(p.nbytes for name, p in model.named_parameters() if name.endswith("_proj_bias"))
    linear = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Linear))
    opsmith.optimize(model, quantize="int8", config=opsmith.Config(tune=False))
    packed = {layer.name: layer.nbytes for layer in model.opsmith.report.quantized}
    experts = packed.pop("model.layers.0.mlp.experts")
    right = rest - linear + sum(packed.values()) + (experts + biases) / 4
    assert generator.weight_bytes(model) == right
    opsmith.restore(model)


def test_the_bytes_of_a_cache() -> None:
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, num_key_value_heads=1, num_attention_heads=4, head_dim=8, sliding_window=16
    )
    row = 2 * 8 * 4  # keys and values of one token
    assert generator.cache_bytes(config, 3, 10, 4) == 3 * 6 * 10 * row
    assert generator.cache_bytes(config, 1, 100, 4) == (5 * 16 + 100) * row


def test_curves_show_what_was_run(tmp_path: Path) -> None:
    def cell(batch: int, prompt: int, **speeds: float) -> dict[str, Any]:
        rows = {name: {"tokens_per_second": s, "first_seconds": 1 / s} for name, s in speeds.items()}
        return {"batch": batch, "prompt": prompt, "contestants": rows}

    cells = [cell(1, 8, hf=1.0, llamacpp=3.0), cell(4, 8, hf=2.0), cell(1, 64, hf=0.5, llamacpp=2.0)]
    data = {"model": "one", "dtype": "float32", "machine": {"cpu": "some", "threads": 2}, "cells": cells}
    pictures.curves(data, tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    assert all(word in drawn for word in ("llamacpp", "tokens before, batch 1", "sequences, prompt 8"))
