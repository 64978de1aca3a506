"""`opsmith optimize`: tiny models of two families, and one clear line for every folder that is none."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.profiler.conftest import fixed_roofs  # noqa: F401  the roofs take seconds to measure

import opsmith
from opsmith.cli import main
from opsmith.ops.packed_linear.module import PackedLinear

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def without_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models as save_pretrained writes them."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**SIZES))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))
    for name, model in (("bert", bert), ("llama", llama)):
        model.save_pretrained(root / name)
    return {name: root / name for name in ("bert", "llama")}


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_of_few_bits_keeps_them(folders: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    opsmith.save(
        opsmith.optimize(model, config=opsmith.Config(tune=False), quantize="int8"), tmp_path / "few"
    )
    options = ["--length", "8", "--dtype", dtype, "--json", str(tmp_path / "out.json")]
    assert main(["optimize", str(tmp_path / "few"), *options, "--new-tokens", "4"]) == 0
    data = json.loads((tmp_path / "out.json").read_text())
    assert data["found"]["packed_linear"]["sites"] > 0
    assert (
        data["errors"]["opsmith"]["rms"]
        <= 2 * data["errors"]["eager"]["rms"] + torch.finfo(torch.bfloat16).eps
    )
    assert main(["profile", str(tmp_path / "few"), "--optimize", *options]) == 0
    phases = json.loads((tmp_path / "out.json").read_text())["phases"]
    rows = [row for phase in phases for row in phase["rows"]]
    assert {row["dtype"] for row in rows if row["operator"] == "packed_linear"} == {dtype}


@pytest.mark.parametrize(
    ("name", "dtype", "found"),
    [
        ("bert", "float32", {"attention": 1, "layer_norm": 3, "embedding": 3}),
        ("llama", "bfloat16", {"attention": 1, "embedding": 1}),
    ],
)
def test_a_model_is_optimized_and_its_folder_left_alone(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    dtype: str,
    found: dict[str, int],
) -> None:
    before = digest(folders[name])
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    options = ["--dtype", dtype, "--batch", "2", "--length", "8", "--plan", str(plan), "--json", str(out)]
    assert main(["optimize", str(folders[name]), *options]) == 0
    data = json.loads(out.read_text())
    assert data["model"] == {"bert": "BertModel", "llama": "LlamaForCausalLM"}[name]
    assert {operator: data["found"][operator]["sites"] for operator in found} == found
    assert data["found"]["linear"]["sites"] > 0
    assert data["times"]["2×8"]["checked"]
    bound = 2 * data["errors"]["eager"]["rms"] + torch.finfo(getattr(torch, dtype)).eps
    assert data["errors"]["opsmith"]["rms"] <= bound
    assert dtype in next(iter(step["signature"] for step in data["plan"]["shapes"][0]["steps"]))
    from opsmith import Plan

    assert Plan.load(plan).choices()
    if name == "llama":
        assert all(len(data["generate"]["seconds"][who]["token"]) == 3 for who in ("eager", "opsmith"))
        assert "tokens/s" in capsys.readouterr().out
    else:
        assert data["generate"] == {}
    assert digest(folders[name]) == before


def test_a_configuration_is_obeyed(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "opsmith.toml"
    config.write_text('tune = false\n[pin]\nattention = "eager"\n')
    args = ["optimize", str(folders["bert"]), "--length", "8", "--config", str(config)]
    assert main([*args, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["chosen"]
    assert {r["implementation"] for r in rows if r["operator"] == "attention"} == {"eager"}
    assert "pinned by the configuration" in {r["reason"] for r in rows}


def test_a_budget_that_is_spent_leaves_the_rest(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["optimize", str(folders["bert"]), "--length", "8", "--budget", "0.001"]
    assert main(args) == 0
    said = capsys.readouterr().out
    assert "found: no operator of ours" in said
    assert "next: the budget was spent before a graph" in said


@pytest.mark.parametrize("format", ["int8", "int8_dynamic", "int4"])
def test_packed_weights_are_held_against_the_model_as_it_was(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    config, out = tmp_path / "opsmith.toml", tmp_path / "out.json"
    config.write_text("tune = false\ninductor = false\n")
    args = ["optimize", str(folders["llama"]), "--length", "8", "--config", str(config), "--json", str(out)]
    assert main([*args, "--quantize", format, "--new-tokens", "0"]) == 0
    data = json.loads(out.read_text())
    assert data["quantize"] == format
    assert {layer["status"] for layer in data["report"]["quantized"]} == {"packed"}
    eager, ours = data["errors"]["eager"]["rms"], data["errors"]["opsmith"]["rms"]
    assert eager < 1e-5  # eager runs on the weights as they were
    assert 1e-3 < ours < 0.5
    captured = capsys.readouterr()
    said = captured.out + captured.err
    others = " and 1 linear layer to int8" if format == "int4" else ""  # the output layer
    assert f"{7 if others else 8} linear layers to {format}{others}; rounding took" in said
    assert f"{format} weights" in said


def test_a_product_with_other_weights_than_the_rounded_ones_is_no_result(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = PackedLinear.dequantize
    monkeypatch.setattr(PackedLinear, "dequantize", lambda layer, dtype: 1.01 * right(layer, dtype))
    assert main(["optimize", str(folders["llama"]), "--length", "8", "--quantize", "int8"]) == 1
    assert "against float64 with the rounded weights" in capsys.readouterr().err


def test_a_format_that_does_not_exist_is_one_line(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", str(folders["bert"]), "--length", "8", "--quantize", "int2"]) == 1
    assert "quantize must be one of bf16, int8, int8_dynamic, int4, got 'int2'" in capsys.readouterr().err


Damage = Callable[[Path], None]


def edit(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "config.json"
        data = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))

    return damage


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def of_another_model(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file({"elsewhere": torch.ones(2)}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (shutil.rmtree, "there is no folder"),
        (lambda folder: (folder / "config.json").unlink(), "holds no model: config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "is not readable JSON"),
        (edit(model_type=None), "names no model_type"),
        (edit(model_type=["bert"]), "names no model_type"),
        (edit(model_type="zonk"), "model type 'zonk' is unknown to the installed transformers: update it"),
        (
            edit(model_type="zonk", auto_map={"AutoModel": "code.Zonk"}),
            "code of its own, which is never loaded",
        ),
        (edit(hidden_size=48), "in the file and [48] by config.json"),
        (edit(hidden_size="many"), "config.json: Validation error for field 'hidden_size': "),
        (cut, "model.safetensors is damaged"),
        (garbage, "model.safetensors is damaged"),
        (pickled, "has no *.safetensors, the only weights that are read"),
        (of_another_model, "no weight in"),
    ],
)
def test_a_folder_that_is_no_model_is_one_line(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Damage,
    expected: str,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["bert"], folder)
    damage(folder)
    assert main(["optimize", str(folder), "--length", "8"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("opsmith: optimize: ")
    assert expected in err
    assert err.count("\n") == 1
    assert "--debug" not in err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--length", "65"], "--length 65 is more than the model's 64 positions"),
        (["--dtype", "int3", "--length", "8"], "dtype must be one of float32, bfloat16, float16, got int3"),
        (["--config", "none.toml"], "none.toml can't be read"),
        (["--length", "8", "--budget", "0"], "budget must be a number of seconds above 0, got 0"),
        (["--batch", "0"], "see `opsmith optimize --help`"),
        (["--plan", "/"], "--plan: / is a folder; name a file in it"),
        (["--plan", "/no/such/folder/plan.json"], "--plan: cannot write /no/such/folder/plan.json"),
    ],
)
def test_a_wrong_option_is_one_line(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    assert main(["optimize", str(folders["bert"]), *options]) == 1
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1
    assert "--debug" not in err


def test_more_tokens_than_positions_are_refused_before_the_work(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", str(folders["llama"]), "--length", "8", "--new-tokens", "64"]) == 1
    captured = capsys.readouterr()
    assert "--new-tokens 64 leaves no prompt in the model's 64 positions; name fewer" in captured.err
    assert captured.out == ""


def test_a_file_is_not_a_folder(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", str(folders["bert"] / "config.json")]) == 1
    assert "is a file; name the folder it lies in" in capsys.readouterr().err


def test_code_in_the_folder_does_not_run(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["bert"], folder)
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    edit(auto_map={"AutoModel": "code.Zonk", "AutoConfig": "code.Zonk"})(folder)
    main(["optimize", str(folder), "--length", "8"])
    capsys.readouterr()
    assert not (tmp_path / "ran").exists()


def test_a_model_that_takes_no_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=32
    )
    transformers.ViTModel(vision).save_pretrained(tmp_path / "vit")
    assert main(["optimize", str(tmp_path / "vit")]) == 1
    assert "a vit model takes no tokens" in capsys.readouterr().err
