"""Packed models as folders: what is read again has the values that were written, whatever they came from."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import opsmith
from opsmith import Config
from opsmith.checkpoints import CheckpointError, compressed, saving
from opsmith.ops import PackedExperts, PackedLinear
from opsmith.ops.packed_linear.module import PackedEmbedding

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from tests.checkpoints import files  # noqa: E402
from tests.checkpoints.test_quantized import KINDS, mixture, written  # noqa: E402

QUICK = Config(tune=False)
SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}


def llama(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config).eval()
    for name, t in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(t)
    return model


def ids() -> torch.Tensor:
    return torch.randint(0, 96, (2, 9), generator=torch.Generator().manual_seed(0))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids()).logits  # type: ignore[no-any-return]


def packed(model: Any) -> dict[str, PackedLinear]:
    """The packed layers of a model, its own or those that stand in for its own, which `load` has as its own."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {path: m for path, m in modules.items() if isinstance(m, PackedLinear)}


def same(again: Any, layers: dict[str, Any], model: Any) -> None:
    """Hold a model that was read again to the packed layers and the parameters of the one that was saved."""
    assert set(packed(again)) == layers.keys()
    for path, layer in packed(again).items():
        assert layer.dequantize().equal(layers[path].dequantize()), path
        if layer.bias is not None:
            assert layer.bias.equal(model.get_submodule(path).bias), path
    for path, parameter in again.named_parameters():
        assert parameter.equal(model.get_parameter(path)), path


def pack(model: Any, **how: Any) -> Any:
    """The model with modules in few bits of its own, the output layer aside."""
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and path != "lm_head":
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, PackedLinear.from_linear(layer, **how))
    return model


FORMS: list[tuple[dict[str, Any], str]] = [  # how a layer is packed, and the format that it is read in again
    ({"format": "int8"}, "int8"),
    ({"format": "int8_dynamic"}, "int8_dynamic"),
    ({"format": "int4", "group_size": 64}, "int4"),
    ({"format": "int4", "group_size": 32, "symmetric": False}, "int4"),
    ({"format": "fp8", "group_size": 0}, "fp8"),
    ({"format": "fp8", "group_size": 128}, "fp8"),
    ({"format": "q8_0"}, "q8_0"),
    ({"format": "q5_0"}, "q8_0"),
    ({"format": "q4_0"}, "int4"),
    ({"format": "mxfp4"}, "mxfp4"),
]


@pytest.mark.parametrize(("how", "format"), FORMS)
@pytest.mark.parametrize(("n", "k"), [(48, 64), (200, 320), (37, 192)])
def test_a_layer_comes_back(how: dict[str, Any], format: str, n: int, k: int) -> None:
    torch.manual_seed(0)
    layer = PackedLinear.from_linear(nn.Linear(k, n), **how)
    scheme, parts = compressed.write(layer)
    assert scheme is not None
    again = compressed.read(parts, scheme)
    assert (again.format, again.symmetric) == (format, layer.symmetric)
    assert again.dequantize().equal(layer.dequantize())
    if how["format"] not in ("int8_dynamic", "fp8"):  # whose weight is as large as its numbers
        size = 1 if format == "mxfp4" else 4  # of what they lie in
        assert parts["weight_packed"].shape == (n, -(-k * layer.bits // 8 // size))


def test_floats_of_four_bits_are_written_in_whole_groups() -> None:
    layer = PackedLinear.from_linear(nn.Linear(50, 48), format="mxfp4")
    with pytest.raises(ValueError, match="rows of 50 numbers, where mxfp4 has whole groups of 32"):
        compressed.write(layer)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", ["bf16", "int8", "int8_dynamic", "int4"])
def test_a_quantized_model_is_read_again(how: str, tied: bool, tmp_path: Path) -> None:
    config = Config(tune=False, quantize=how, quantize_symmetric=tied, quantize_group=32)
    model = opsmith.optimize(llama(tied), config=config)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    opsmith.save(model, tmp_path)
    assert all(t.equal(before[name]) for name, t in model.state_dict().items())
    again, layers = opsmith.load(tmp_path, config=QUICK), model.opsmith.packing.packed
    if how == "bf16":
        for path, layer in layers.items():
            assert again.get_submodule(path).weight.equal(layer.dequantize()), path
    else:
        same(again, layers, model)
    assert not again.config.tie_word_embeddings  # the output layer is packed, and its table is not
    saved = json.loads((tmp_path / "config.json").read_text())
    groups = saved.get("quantization_config", {"config_groups": {}})["config_groups"]
    assert len(groups) == {"bf16": 0, "int4": 2}.get(how, 1)  # int4's output layer is int8
    assert str(tmp_path) not in json.dumps(saved)


def test_it_computes_the_same(tmp_path: Path) -> None:
    model = opsmith.optimize(llama(), ids(), config=Config(tune=False, quantize="int4", quantize_group=32))
    opsmith.save(model, tmp_path)
    assert logits(opsmith.load(tmp_path, config=QUICK)).equal(logits(model))


def test_what_learned_since_is_what_is_saved(tmp_path: Path) -> None:
    model = opsmith.optimize(llama(), config=QUICK, quantize="int8")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    opsmith.save(model, tmp_path)
    own = PackedLinear.from_linear(model.lm_head, format="int8").dequantize()
    assert packed(opsmith.load(tmp_path, config=QUICK))["lm_head"].dequantize().equal(own)


def test_layers_that_are_left_and_released_ones(tmp_path: Path) -> None:
    how = {
        "quantize": "int8",
        "quantize_skip": ["*.mlp.*"],
        "quantize_release": True,
        "quantize_embedding": True,
    }
    model = opsmith.optimize(llama(), config=Config(tune=False, **how))
    layers = dict(model.opsmith.packing.packed)
    table = layers.pop("model.embed_tokens").dequantize()
    with pytest.raises(ValueError, match=r"save_pretrained: .* given back .* by opsmith\.save"):
        model.save_pretrained(tmp_path)
    opsmith.save(model, tmp_path)
    again = opsmith.load(tmp_path, config=QUICK)
    assert again.model.embed_tokens.weight.equal(table)
    again.model.embed_tokens.weight = model.model.embed_tokens.weight = nn.Parameter(table)
    same(again, layers, model)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == [
        f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up", "down")
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_others_quantized_is_saved_by_its_own_method(kind: str, tmp_path: Path) -> None:
    written(tmp_path / "theirs", kind)
    model = opsmith.load(tmp_path / "theirs", config=QUICK)
    model.save_pretrained(tmp_path / "ours")
    again = opsmith.load(tmp_path / "ours", config=QUICK)
    assert len(packed(again)) == 14
    same(again, packed(model), model)
    assert {layer.format for layer in packed(again).values()} == {KINDS[kind][2]}
    restored = opsmith.restore(again)  # it is a packed model still
    restored.save_pretrained(tmp_path / "again")
    names = ("config.json", "model.safetensors")
    first, last = ([(tmp_path / one / name).read_bytes() for name in names] for one in ("ours", "again"))
    assert first == last


@pytest.mark.parametrize(
    ("kind", "name"),
    [("fp8", "deepseek_v3"), ("four bits", "mixtral"), ("eight bits", "qwen3_moe"), ("gptq", "qwen3_moe")],
)
def test_experts_are_layers_of_their_own(kind: str, name: str, tmp_path: Path) -> None:
    mixture(tmp_path / "theirs", kind, name)
    model = opsmith.load(tmp_path / "theirs", config=QUICK)
    model.save_pretrained(tmp_path / "ours")
    again = opsmith.load(tmp_path / "ours", config=QUICK)
    experts = [path for path, m in packed(again).items() if isinstance(m, PackedExperts)]
    assert len(experts) == (2 if name == "deepseek_v3" else 4)
    same(again, packed(model), model)
    expert = "block_sparse_moe.experts.3.w3" if name == "mixtral" else "mlp.experts.3.up_proj"
    assert f"model.layers.1.{expert}.weight_scale" in load_file(tmp_path / "ours" / "model.safetensors")


@pytest.mark.parametrize("how", ["bf16", "int8_dynamic", "int4"])
def test_a_quantized_mixture_is_read_again(how: str, tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        **SIZES, **HEADS, head_dim=16, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).eval()
    opsmith.optimize(model, config=Config(tune=False, quantize=how, quantize_group=32))
    opsmith.save(model, tmp_path)
    again = opsmith.load(tmp_path, config=QUICK)
    layers: dict[str, Any] = {}
    for path, one in model.opsmith.packing.packed.items():
        each = getattr(one, "packed", None) if path.endswith("experts") else None
        names = [f"{path}.gate_up_proj", f"{path}.down_proj"] if each else [path]
        layers |= zip(names, each or [one], strict=True)
    if how == "bf16":
        state = again.state_dict()
        for path, layer in layers.items():
            assert state[path if path in state else f"{path}.weight"].equal(layer.dequantize()), path
    else:
        same(again, layers, model)
    if how == "int8_dynamic":  # whose experts are int8, and a group by themselves
        groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["config_groups"]
        first = r"re:model\.layers\.0\.mlp\.experts\.\d+\.gate_proj$"
        assert [group["targets"] for group in groups.values()][1][0] == first


def test_blocks_of_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = files.write(tmp_path / "tiny.gguf", "gemma3", ("q8_0", "q5_0", "q4_0", "f16"))
    model = opsmith.load(file, config=QUICK)
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    model.save_pretrained(tmp_path / "saved")
    again = opsmith.load(tmp_path / "saved", config=QUICK)
    table = model.get_input_embeddings()
    assert again.get_input_embeddings().weight.equal(table.table.dequantize())
    model.set_input_embeddings(again.get_input_embeddings())
    same(again, packed(model), model)
    file = files.write(tmp_path / "nested.gguf", "llama", ("q4_k",))
    with pytest.raises(ValueError, match=r"save: model.*: q4_k has scales of two levels.*the .gguf file is"):
        opsmith.load(file, config=QUICK).save_pretrained(tmp_path / "none")
    assert not list((tmp_path / "none").iterdir())


def test_a_copy_saves_itself(tmp_path: Path) -> None:
    written(tmp_path / "theirs", "eight bits")
    model = opsmith.load(tmp_path / "theirs", config=QUICK)
    path = "model.layers.0.mlp.up_proj"
    for name, again in (("copy", copy.deepcopy(model)), ("pickled", pickle.loads(pickle.dumps(model)))):
        again.get_submodule(path).scale.mul_(2)
        again.save_pretrained(tmp_path / name)
        found = packed(opsmith.load(tmp_path / name, config=QUICK))[path].dequantize()
        assert found.equal(2 * packed(model)[path].dequantize())


def test_weights_lie_in_files_of_a_size(tmp_path: Path) -> None:
    model = pack(llama(), format="int4", group_size=32)
    for most in (25_000, 50_000):  # the second into the folder of the first
        opsmith.save(model, tmp_path, max_shard_size=most)
        held = sorted(tmp_path.glob("*.safetensors"))
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        found = {name: file.name for file in held for name in load_file(file)}
        assert found == index["weight_map"]
        sizes = [sum(t.nbytes for t in load_file(file).values()) for file in held]
        assert max(sizes) <= most
        assert sum(sizes) == index["metadata"]["total_size"]
        assert held[-1].name == f"model-{len(held):05}-of-{len(held):05}.safetensors"
        same(opsmith.load(tmp_path, config=QUICK), packed(model), model)
    opsmith.save(model, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_a_folder_is_there_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = pack(llama(), format="int8")
    opsmith.save(model, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    model.lm_head.weight.data.mul_(2)

    def full(tensors: Any, file: Path, **options: Any) -> None:
        if file.name == "1":
            raise OSError("no space left on device")
        kept(tensors, file, **options)

    kept = saving.save_file
    with monkeypatch.context() as patch:
        patch.setattr(saving, "save_file", full)
        with pytest.raises(OSError, match="no space left"):
            opsmith.save(model, tmp_path, max_shard_size=25_000)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before

    def ends(file: Path, to: Path) -> Path:
        if file.name == "config.json":
            raise KeyboardInterrupt
        return moved(file, to)

    moved = Path.replace
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", ends)
        with pytest.raises(KeyboardInterrupt):
            opsmith.save(model, tmp_path)
    assert (tmp_path / "model.safetensors").is_file()  # all else is there before it
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        opsmith.load(tmp_path)


def test_what_has_no_form_is_refused(tmp_path: Path) -> None:
    whole: Any = pack(llama(), format="int8")
    whole.model.rotary_emb.inv_freq.mul_(2)
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=2)
    turned = opsmith.optimize(
        transformers.GPT2LMHeadModel(config).eval(), ids(), config=QUICK, quantize="int8"
    )
    zero = PackedLinear.from_int4(
        torch.zeros(16, 32).byte(),
        torch.ones(1, 16).half(),
        torch.full((1, 16), 16).to(torch.int8),
        group_size=32,
    )
    with pytest.raises(ValueError, match="it has a zero of 16, where compressed-tensors has 15 at most"):
        compressed.write(zero)
    for model, error, message in (
        (nn.Linear(3, 3), TypeError, "save: expected a model of transformers, got Linear"),
        (llama(), ValueError, r"save: no layer is packed; optimize\(model, quantize"),
        (whole, ValueError, "save: no folder holds model.rotary_emb.inv_freq, and config.json makes others"),
        (
            turned,
            ValueError,
            "save: transformer.h.0.attn.c_attn is a Conv1D, which compressed-tensors has no form of",
        ),
    ):
        with pytest.raises(error, match=message):
            opsmith.save(model, tmp_path / "none")
    with pytest.raises(ValueError, match="save: max_shard_size must be a number of bytes, got '5GB'"):
        opsmith.save(whole, tmp_path / "none", max_shard_size="5GB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="save: max_shard_size must be a number of bytes, got True"):
        opsmith.save(whole, tmp_path / "none", max_shard_size=True)
    assert not (tmp_path / "none").exists()
    layer = PackedLinear.from_linear(nn.Linear(64, 48), format="q8_0")
    scheme, parts = compressed.write(layer)
    assert scheme is not None
    for changes, message in (
        (
            {"weight_scale": parts["weight_scale"].float() * 1.001},
            "its 8 bits have torch.float32 scales for groups",
        ),
        ({"weight_zero_point": torch.zeros(12, 2, dtype=torch.int32)}, "its 8 bits have zeros"),
        ({"weight_g_idx": torch.arange(64)}, "in the order of activations"),
    ):
        with pytest.raises(ValueError, match=message):
            compressed.read(parts | changes, scheme)
    wide = compressed.read(
        parts | {"weight_scale": parts["weight_scale"][:, :1]},
        scheme | {"weights": {"num_bits": 8, "group_size": 64}},
    )
    assert wide.dequantize()[:, :32].equal(layer.dequantize()[:, :32])
