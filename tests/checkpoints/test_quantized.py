"""Folders that others quantized: packed layers with the numbers that their formats say."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import opsmith
from opsmith import Config
from opsmith.checkpoints import CheckpointError, folder, quantized
from opsmith.checkpoints.compressed import from_words
from opsmith.ops import PackedExperts, PackedLinear

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors  # noqa: E402

Tensors = dict[str, torch.Tensor]
GROUP = 32


def words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight numbers that follow each other in a row as an int32, number j at the place `order[j]`."""
    eights = numbers.long().unflatten(1, (-1, 8))
    found = sum(eights[..., j] << 4 * at for j, at in enumerate(order))
    assert isinstance(found, torch.Tensor)
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def four_bits(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [n, k], scales and zeros [groups, n], and what they stand for."""
    q, zero = torch.randint(0, 16, (n, k)), torch.randint(1, 16, (k // GROUP, n))
    scale = (torch.rand(k // GROUP, n) / 32 + 1e-3).half()
    spread = [t.t().repeat_interleave(GROUP, 1) for t in (zero, scale.float())]
    return q, scale, zero, (q - spread[0]) * spread[1]


def gptq(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    q, scale, zero, weight = four_bits(n, k)
    parts = {"qweight": words(q).t(), "scales": scale, "qzeros": words(zero - 1)}
    return parts | {"g_idx": torch.arange(k, dtype=torch.int32) // GROUP}, weight


def gptq_of_rows(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    q, scale, zero, _ = four_bits(n, k)
    parts = {"qweight": words(q).t(), "scales": scale[:1], "qzeros": words(zero[:1] - 1)}
    return parts | {"g_idx": torch.zeros(k).int()}, (q - zero[:1].t()) * scale[:1].t().float()


def bytes_of_gptq(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    """As Qwen's folders of 8 bits have them."""
    q, scale = torch.randint(0, 256, (n, k)).byte(), (torch.rand(k // GROUP, n) / 512 + 1e-4).half()
    parts = {"qweight": q.view(torch.int32).t(), "scales": scale}
    parts["qzeros"] = torch.full((k // GROUP, n), 127).byte().view(torch.int32)
    parts["g_idx"] = torch.arange(k, dtype=torch.int32) // GROUP
    return parts, (q.float() - 128) * scale.float().t().repeat_interleave(GROUP, 1)


def bytes_of_gptq_rows(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    parts, _ = bytes_of_gptq(n, k)
    parts |= {name: parts[name][:1] for name in ("scales", "qzeros")} | {"g_idx": torch.zeros(k).int()}
    q = parts["qweight"].t().contiguous().view(torch.uint8)
    return parts, (q.float() - 128) * parts["scales"].float().t()


def words_of_rows(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    q, scale, _, _ = four_bits(n, k)
    parts = {"weight_packed": words(q), "weight_scale": scale[:1].t(), "weight_shape": torch.tensor([n, k])}
    return parts, (q - 8) * scale[:1].t().float()


def of_activations(k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The groups of numbers that were taken in another order than they lie in, and where each was taken."""
    place = torch.randperm(k)
    return (place // GROUP).int(), place


def gptq_of_activations(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    parts, weight = gptq(n, k)
    groups, place = of_activations(k)
    q = from_words(parts["qweight"].t(), 4, k)[:, place]
    return parts | {"qweight": words(q).t(), "g_idx": groups}, weight[:, place]


def words_of_activations(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    parts, weight = words_of_compressed(n, k)
    groups, place = of_activations(k)
    q = from_words(parts["weight_packed"], 4, k)[:, place]
    return parts | {"weight_packed": words(q), "weight_g_idx": groups}, weight[:, place]


def awq(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    q, scale, zero, weight = four_bits(n, k)
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    return {"qweight": words(q.t(), order), "scales": scale, "qzeros": words(zero, order)}, weight


def fp8(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    numbers = (torch.randn(n, k) * 16).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-n // 128), -(-k // 128)) / 256
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return {"weight": numbers, "weight_scale_inv": scale}, numbers.float() * spread


def words_of_compressed(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    q, scale, zero, weight = four_bits(n, k)
    parts = {"weight_packed": words(q), "weight_scale": scale.t(), "weight_zero_point": words(zero).t()}
    return parts | {"weight_shape": torch.tensor([n, k])}, weight


def bytes_of_compressed(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    numbers, scale = torch.randint(-128, 128, (n, k)).to(torch.int8), torch.rand(n, 1) / 512
    return {"weight": numbers, "weight_scale": scale}, numbers * scale


def floats_of_compressed(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    numbers, scale = (torch.randn(n, k) * 16).to(torch.float8_e4m3fn), torch.rand(n, 1) / 256
    return {"weight": numbers, "weight_scale": scale}, numbers.float() * scale


def floats_of_one_scale(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    numbers, scale = (torch.randn(n, k) * 16).to(torch.float8_e4m3fn), torch.rand(1) / 256
    return {"weight": numbers, "weight_scale": scale, "input_scale": torch.rand(1)}, numbers.float() * scale


def floats_of_a_number(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    """As Mistral's folders have them."""
    numbers, scale = (torch.randn(n, k) * 16).to(torch.float8_e4m3fn), torch.rand(()).bfloat16() / 256
    parts = {"weight": numbers, "weight_scale_inv": scale, "activation_scale": torch.rand(())}
    return parts, numbers.float() * scale


def pairs_of_compressed(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
    bytes_, scale = torch.randint(0, 256, (n, k // 2)).byte(), torch.randint(118, 123, (n, k // 32)).byte()
    values = torch.tensor([*FP4_VALUES])[torch.stack((bytes_ & 15, bytes_ >> 4), 2).flatten(1).int()]
    return {"weight_packed": bytes_, "weight_scale": scale}, values * (
        2.0 ** (scale.float() - 127)
    ).repeat_interleave(32, 1)


def compressed(bits: int, inputs: Any = None, group: int | None = GROUP) -> dict[str, Any]:
    weights = {"num_bits": bits, "group_size": group}
    groups = {"group_0": {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


Kind = tuple[Callable[[int, int], tuple[Tensors, torch.Tensor]], dict[str, Any], str]
KINDS: dict[str, Kind] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, "int4"),
    "gptq, desc_act": (
        gptq_of_activations,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        "int4",
    ),
    "gptq, rows": (gptq_of_rows, {"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4"),
    "gptq, bytes": (bytes_of_gptq, {"quant_method": "gptq", "bits": 8, "group_size": GROUP}, "q8_0"),
    "gptq, bytes of rows": (
        bytes_of_gptq_rows,
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        "int8",
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, "int4"),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    "fp8 of one scale": (floats_of_one_scale, {"quant_method": "fp8"}, "fp8"),
    "fp8 of a number": (floats_of_a_number, {"quant_method": "fp8", "weight_block_size": None}, "fp8"),
    "fbgemm": (floats_of_compressed, {"quant_method": "fbgemm_fp8"}, "fp8"),
    "modelopt": (floats_of_one_scale, {"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    "four bits": (words_of_compressed, compressed(4), "int4"),
    "four bits, rows": (words_of_rows, compressed(4, group=None), "int4"),
    "four bits, actorder": (words_of_activations, compressed(4), "int4"),
    "eight bits": (bytes_of_compressed, compressed(8), "int8"),
    "eight bits twice": (bytes_of_compressed, compressed(8, {"dynamic": True}), "int8_dynamic"),
    "floats": (floats_of_compressed, compressed(8), "fp8"),
    "floats of one scale": (floats_of_one_scale, compressed(8, {"dynamic": False}), "fp8"),
    "floats of four bits": (pairs_of_compressed, compressed(4, group=32), "mxfp4"),
}


def written(place: Path, kind: str, tied: bool = False) -> Any:
    """A folder of that kind, and the model with the numbers that its layers stand for."""
    make, how, _ = KINDS[kind]
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=tied)
    ).eval()
    tensors = dict(model.state_dict())
    if tied:
        del tensors["lm_head.weight"]
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            if module.bias is not None:
                nn.init.normal_(module.bias)
            parts, weight = make(*module.weight.shape)
            del tensors[f"{path}.weight"]
            tensors |= {f"{path}.{end}": t.contiguous() for end, t in parts.items()}
            module.weight.data = weight
    place.mkdir(exist_ok=True)
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, place / "model.safetensors")
    data = model.config.to_dict() | {"quantization_config": how, "architectures": ["LlamaForCausalLM"]}
    (place / "config.json").write_text(json.dumps(data | {"dtype": "float32"}))
    return model


SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
MLA = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
MIXTURES: dict[str, Any] = {
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, num_experts=4, head_dim=16),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES, **MLA, n_routed_experts=8, n_group=4, topk_group=2, first_k_dense_replace=1
    ),
}


def mixture(place: Path, kind: str, name: str) -> Any:
    """A folder of a mixture of experts, each a layer of its own, and the model with their numbers."""
    make, how, _ = KINDS[kind]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        MIXTURES[name](), experts_implementation="eager"
    ).eval()
    tensors: Tensors = {}

    def keep(path: str, weight: torch.Tensor) -> torch.Tensor:
        parts, of = make(*weight.shape)
        tensors.update({f"{path}.{end}": t.contiguous() for end, t in parts.items()})
        return of

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path != "lm_head":
            module.weight.data = keep(path, module.weight)
        if not hasattr(module, "gate_up_proj"):
            continue
        calls = ("gate_proj", "up_proj", "down_proj")
        if name == "mixtral":
            path, calls = path.replace(".mlp.", ".block_sparse_moe."), ("w1", "w3", "w2")
        for e in range(len(module.down_proj)):
            gate, up, down = (
                keep(f"{path}.{e}.{call}", t)
                for call, t in zip(
                    calls, (*module.gate_up_proj[e].chunk(2), module.down_proj[e]), strict=True
                )
            )
            module.gate_up_proj.data[e], module.down_proj.data[e] = torch.cat((gate, up)), down
    for path, t in model.state_dict().items():
        if path.endswith("e_score_correction_bias"):
            t.copy_(torch.rand_like(t))
        layer = path.removesuffix(".weight")
        if not path.endswith(("experts.gate_up_proj", "experts.down_proj")) and not any(
            key.startswith(f"{layer}.") for key in tensors
        ):
            router = path.replace(".mlp.", ".block_sparse_moe.") if name == "mixtral" else path
            tensors[router] = t.detach().clone().contiguous()
    place.mkdir(exist_ok=True)
    save_file(tensors, place / "model.safetensors")
    data = model.config.to_dict() | {"quantization_config": how, "architectures": [type(model).__name__]}
    (place / "config.json").write_text(json.dumps(data | {"dtype": "float32"}))
    return model


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "eight bits twice" and "act" not in kind])
def test_experts_have_the_folders_numbers(kind: str, name: str, tmp_path: Path) -> None:
    right = mixture(tmp_path, kind, name)
    model, ids = loaded(tmp_path), torch.randint(0, 96, (2, 9))
    experts = {path: m for path, m in model.named_modules() if isinstance(m, PackedExperts)}
    assert len(experts) == (2 if name == "deepseek_v3" else 4)
    for path, module in experts.items():
        assert module.format == KINDS[kind][2]
        assert module.dequantize().equal(right.get_parameter(path)), path
    with torch.no_grad():
        eager, wide = right(ids).logits, right.double()(ids).logits
        error = [
            float((logits - wide).abs().max() / wide.abs().max()) for logits in (model(ids).logits, eager)
        ]
    assert error[0] <= 2 * error[1] + 1e-6


@pytest.mark.parametrize(("kind", "name"), [("fp8", "deepseek_v3"), ("gptq", "mixtral")])
def test_a_mixture_is_loaded_and_generates(kind: str, name: str, tmp_path: Path) -> None:
    right, ids = mixture(tmp_path, kind, name), torch.randint(0, 96, (1, 9))
    model = opsmith.load(tmp_path, config=Config(tune=False))
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(ids, **how).equal(right.generate(ids, **how))
    assert f"expert weights of {KINDS[kind][2]}" in str(model.opsmith.report)
    first = (
        "model.layers.1.mlp.experts.1.up_proj"
        if name != "mixtral"
        else ("model.layers.1.block_sparse_moe.experts.1.w3")
    )
    others = first.replace("up_proj", "gate_proj").replace("w3", "w1")  # which it is put together with
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{first}.weight_scale_inv" if kind == "fp8" else f"{first}.scales"]
    says = "weight_scale" if kind == "fp8" else "scales"
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{others}: it has no '{says}'"):
        loaded(tmp_path)


def oss(place: Path) -> Any:
    """A folder as GPT-OSS was published, and the model with the numbers that transformers reads in it."""
    torch.manual_seed(0)
    own = {"num_hidden_layers": 2, "num_local_experts": 6, "intermediate_size": 96, "head_dim": 16}
    own["num_key_value_heads"] = 2
    model = transformers.GptOssForCausalLM._from_config(
        transformers.GptOssConfig(**SIZES | own, sliding_window=16), experts_implementation="eager"
    ).eval()
    tensors: Tensors = {}
    for name, t in model.named_parameters():
        nn.init.normal_(t, std=0.1)
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = t.detach()
            continue
        e, k, n = t.shape
        tensors[f"{name}_blocks"] = blocks = torch.randint(0, 256, (e, n, k // 32, 16)).byte()
        tensors[f"{name}_scales"] = scales = torch.randint(118, 123, (e, n, k // 32)).byte()
        t.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    place.mkdir(exist_ok=True)
    save_file(tensors, place / "model.safetensors")
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    data = model.config.to_dict() | {"quantization_config": how, "architectures": [type(model).__name__]}
    (place / "config.json").write_text(json.dumps(data | {"dtype": "float32"}))
    return model


def test_gpt_oss_is_loaded_as_it_was_published(tmp_path: Path) -> None:
    right, ids = oss(tmp_path), torch.randint(0, 96, (2, 40))
    model = opsmith.load(tmp_path, config=Config(tune=False))
    experts = {path: m for path, m in model.named_modules() if isinstance(m, PackedExperts)}
    assert len(experts) == 4
    for path, module in experts.items():
        assert module.format == "mxfp4"
        assert module.dequantize().mT.equal(right.get_parameter(path)), path
    with torch.no_grad():
        eager, wide = right(ids).logits, copy.deepcopy(right).double()(ids).logits
        error = [(logits - wide).abs().max() for logits in (model(ids).logits, eager)]
    assert error[0] <= 2 * error[1] + 1e-6
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert model.generate(ids[:1], **how).equal(right.generate(ids[:1], **how))
    assert "expert weights of mxfp4" in str(model.opsmith.report)
    with pytest.raises(ValueError, match=r"save: model.layers.0.mlp.experts is a GptOssExperts, which"):
        model.save_pretrained(tmp_path / "again")
    path = "model.layers.1.mlp.experts.down_proj"
    for change, message in (
        (lambda t: t.pop(f"{path}_scales"), "it has no 'scales'"),
        (lambda t: t[f"{path}_scales"].fill_(255), "every scale must be finite, got 255"),
        (lambda t: t.update({f"{path}_blocks": t[f"{path}_blocks"][:5]}), "where there are 6 experts"),
        (lambda t: t.update({f"{path}_blocks": t[f"{path}_blocks"][:, 1:]}), "scale must be uint8"),
    ):
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        (tmp_path / "other").mkdir(exist_ok=True)
        save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "other/model.safetensors")
        (tmp_path / "other/config.json").write_text((tmp_path / "config.json").read_text())
        with pytest.raises(CheckpointError, match=message):
            loaded(tmp_path / "other")


def test_experts_in_the_order_of_activations_are_refused(tmp_path: Path) -> None:
    mixture(tmp_path, "gptq, desc_act", "mixtral")
    with pytest.raises(CheckpointError, match=r"experts: .*layer 0 has columns in the order of activations"):
        loaded(tmp_path)


def loaded(place: Path) -> Any:
    return quantized.load(place, folder.configuration(place), torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_have_the_folders_numbers(kind: str, tmp_path: Path) -> None:
    right = written(tmp_path, kind, tied=kind == "gptq")
    model, format = loaded(tmp_path), KINDS[kind][2]
    packed = {path: m for path, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert len(packed) == 14
    assert {m.format for m in packed.values()} == {format}
    for path, module in packed.items():
        assert module.dequantize().equal(right.get_submodule(path).weight), path
    ids = torch.randint(0, 96, (2, 20))
    with torch.no_grad():
        exact = right(ids).logits
        # Rounding the inputs of layers to 8 bits, too, costs what it costs.
        bound = 0.1 if format == "int8_dynamic" else 1e-5
        assert float((model(ids).logits - exact).abs().max() / exact.abs().max()) < bound
    assert model.lm_head.weight.equal(right.lm_head.weight)


def test_some_layers_have_other_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQModel says of which by their names."""

    def make(n: int, k: int) -> tuple[Tensors, torch.Tensor]:
        return (bytes_of_gptq if k == 160 else gptq)(n, k)

    how: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    how["dynamic"] = {r"-:.*lm_head.*": {}, r"+:.*\.down_proj.*": {"bits": 8}}
    monkeypatch.setitem(KINDS, "gptq", (make, how, ""))
    right, model = written(tmp_path, "gptq"), loaded(tmp_path)
    packed = {path: m for path, m in model.named_modules() if isinstance(m, PackedLinear)}
    assert {path.rpartition(".")[2] for path, m in packed.items() if m.format == "q8_0"} == {"down_proj"}
    for path, module in packed.items():
        assert module.dequantize().equal(right.get_submodule(path).weight), path


def test_a_folder_whose_configuration_says_nothing(tmp_path: Path) -> None:
    """Numbers without their scales are no weights."""
    right = written(tmp_path, "modelopt")
    data = json.loads((tmp_path / "config.json").read_text())
    del data["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"proj.weight_scale, but config.json no quantization_config"):
        opsmith.load(tmp_path)
    how = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(how))
    ids = torch.randint(0, 96, (1, 9))
    with torch.no_grad():
        assert opsmith.load(tmp_path, config=Config(tune=False))(ids).logits.allclose(
            right(ids).logits, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["awq", "gptq, desc_act"])
def test_load_optimizes_what_is_in_few_bits(kind: str, tmp_path: Path) -> None:
    right, ids = written(tmp_path, kind), torch.randint(0, 96, (1, 9))
    model = opsmith.load(tmp_path, config=Config(tune=False))
    with torch.no_grad():
        assert model(ids).logits.allclose(right(ids).logits, atol=1e-5)
    assert "kept as the model has them: 14 linear layers of int4" in str(model.opsmith.report)
    half = opsmith.load(tmp_path, dtype="bfloat16", config=Config(tune=False))
    with torch.no_grad():
        assert half(ids).logits.dtype == torch.bfloat16


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    def with_(kind: str, changes: dict[str, Any], tensors: Callable[[Tensors], object] = len) -> None:
        written(tmp_path, kind)
        data = json.loads((tmp_path / "config.json").read_text())
        data["quantization_config"] |= changes
        (tmp_path / "config.json").write_text(json.dumps(data))
        found = load_file(tmp_path / "model.safetensors")
        tensors(found)
        save_file(found, tmp_path / "model.safetensors")

    first = "model.layers.0.self_attn.q_proj"
    for kind, changes, change, message in (
        (
            "gptq",
            {"quant_method": "hqq"},
            len,
            "is quantized by 'hqq', which is not known; there are: gptq, awq",
        ),
        ("gptq", {"bits": 3}, len, "it has 3 bits, where 4 and 8 are known"),
        ("awq", {"bits": 8}, len, "it has 8 bits, where 4 are known"),
        ("gptq, bytes", {}, lambda t: t[f"{first}.qzeros"].add_(1), "its 8 bits have zeros"),
        (
            "gptq, bytes",
            {},
            lambda t: t[f"{first}.g_idx"].copy_(t[f"{first}.g_idx"].flip(0)),
            "order of activ",
        ),
        ("four bits", compressed(3), len, "it has 3 bits, where 4 and 8 are known"),
        ("four bits", compressed(4, group=-1), len, r"group_size must be one of \(32, 64, 128\), got -1"),
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            len,
            "its checkpoint_format is 'marlin', where gptq and gptq_v2",
        ),
        (
            "gptq",
            {},
            lambda t: t.update({f"{first}.qweight": torch.ones(8, 64)}),
            "words must be int32 in rows",
        ),
        ("awq", {}, lambda t: t.update({f"{first}.qweight": torch.tensor(1)}), "words must be int32 in rows"),
        (
            "gptq",
            {},
            lambda t: t.update({f"{first}.scales": torch.tensor(1)}),
            "q_proj: .*scale must be float16",
        ),
        (
            "four bits",
            {"config_groups": None},
            len,
            "q_proj: config_groups must be groups of layers by name, got None",
        ),
        (
            "four bits",
            compressed(4) | {"config_groups": {"a": {"targets": ["re:("]}}},
            len,
            "q_proj: missing ",
        ),
        ("gptq", {}, lambda t: t[f"{first}.g_idx"].add_(1), "groups must have 32 of 64 numbers each"),
        ("gptq", {}, lambda t: t.update({f"{first}.g_idx": torch.zeros(8)}), "groups must have 32 of 64"),
        ("four bits, actorder", {}, lambda t: t[f"{first}.weight_g_idx"].fill_(-1), "groups must have 32"),
        ("gptq", {}, lambda t: t.pop(f"{first}.scales"), "q_proj: it has no 'scales'"),
        ("gptq", {}, lambda t: t[f"{first}.scales"].fill_(torch.inf), "every scale must be finite"),
        ("gptq", {}, lambda t: t.pop("model.norm.weight"), "it has no tensor for model.norm.weight"),
        ("fp8", {"weight_block_size": [64, 64]}, len, r"its blocks are \[64, 64\]"),
        (
            "fp8",
            {},
            lambda t: t.pop(f"{first}.weight_scale_inv"),
            "it has .* torch.float8_e4m3fn for .*q_proj",
        ),
        ("awq", {"version": "gemv"}, len, "its version is 'gemv', where gemm is known"),
        (
            "fp8",
            {},
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 1)}),
            r"up_proj: .*scale must be float32 \[2, 1\], .* got float32 \[3, 1\]",
        ),
        (
            "four bits",
            {},
            lambda t: t.update({f"{first}.weight_scale": torch.ones(64, 4).to(torch.float8_e4m3fn)}),
            r"its scales are float8 \(nvfp4\)",
        ),
        (
            "awq",
            {},
            lambda t: t.update({"model.layers.0.mlp.act.scales": torch.ones(160)}),
            "mlp.act.scales: scales of activations are not known",
        ),
        (
            "eight bits",
            {},
            lambda t: t.update({f"{first}.weight_zero_point": torch.ones(64, 1).to(torch.int8)}),
            "its 8 bits have zeros",
        ),
        ("eight bits", {"config_groups": {}}, len, "none of 0 groups of layers is for it"),
        (
            "eight bits",
            compressed(8, {"dynamic": False}),
            len,
            "its inputs are rounded by scales of the checkpoint",
        ),
    ):
        with_(kind, changes, change)  # type: ignore[arg-type]
        with pytest.raises(CheckpointError, match=message):
            loaded(tmp_path)
    written(tmp_path, "gptq")
    sizes = json.loads((tmp_path / "config.json").read_text()) | {"vocab_size": 1 << 50}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(CheckpointError, match=r"config\.json makes no model: "):
        loaded(tmp_path)
    written(tmp_path, "gptq")
    other = load_file(tmp_path / "model.safetensors")
    save_file({"model.norm.weight": other["model.norm.weight"]}, tmp_path / "more.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model.norm.weight is in model.safetensors and in more.safetensors"
    ):
        loaded(tmp_path)
