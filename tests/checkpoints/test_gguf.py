"""Models in GGUF files: the numbers that transformers reads from the same file, in the file's own bits."""

from __future__ import annotations

import copy
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import opsmith
from opsmith import Config
from opsmith.checkpoints import CheckpointError, gguf, header
from opsmith.ops import PackedExperts, PackedLinear
from opsmith.ops.packed_linear.module import PackedEmbedding
from tests.checkpoints import files

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "gemma3", "gemma2", "phi3")


def theirs(file: Path) -> Any:
    """The model that transformers makes of a file, unpacked to float32."""
    how: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    config = transformers.AutoConfig.from_pretrained(file.parent, **how)
    if hasattr(config, "moe_intermediate_size"):  # which it does not read from the file
        config.moe_intermediate_size, config.shared_expert_intermediate_size = files.EACH, files.INNER
        how["experts_implementation"] = "eager"  # the others take no float64
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, config=config, dtype="float32", **how
    ).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_is_the_one_that_transformers_unpacks(architecture: str, tmp_path: Path) -> None:
    file = files.write(tmp_path / "model.gguf", architecture)
    right, model = theirs(file), gguf.load(file, torch.float32)
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    assert len({m.format for m in packed}) == 7
    assert type(model) is type(right)
    for path, module in model.named_modules():
        if isinstance(module, PackedExperts):
            assert module.dequantize().equal(right.get_parameter(path)), path
        elif isinstance(module, PackedLinear) and not path.endswith(".table"):
            assert module.dequantize().equal(right.get_submodule(path).weight), path
        elif isinstance(module, PackedEmbedding):
            assert module.table.dequantize().equal(right.get_submodule(path).weight), path
    kept = dict(right.named_parameters())
    for path, parameter in model.named_parameters():
        assert parameter.equal(kept[path]), path
    ids = torch.randint(0, files.TOKENS, (2, 40))
    with torch.no_grad():
        eager = right(ids).logits
        wide = nn.Module.double(right)(ids).logits  # the model's own refuses
        got = model(ids).logits
    scale = wide.abs().max()
    assert float((got - wide).abs().max() / scale) <= 2 * float((eager - wide).abs().max() / scale) + 1e-6


def test_gpt_oss_has_the_files_numbers(tmp_path: Path) -> None:
    """transformers leaves its experts and sinks out: the names are written here a second time."""
    import gguf as reader

    file = files.write(tmp_path / "model.gguf", "gpt-oss", ("mxfp4",))
    model = gguf.load(file, torch.float32)
    right = type(model)._from_config(copy.deepcopy(model.config), experts_implementation="eager").eval()
    held = {}
    for t in reader.GGUFReader(file).tensors:
        numbers = torch.tensor(reader.quants.dequantize(t.data, t.tensor_type))
        held[t.name] = numbers.view(*reversed(t.shape.tolist()))
    names = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
    names |= {"ffn_gate_inp": "mlp.router", "attn_output": "self_attn.o_proj"}
    names |= {f"attn_{n}": f"self_attn.{n}_proj" for n in "qkv"}
    state = {"lm_head.weight": held["output.weight"], "model.norm.weight": held["output_norm.weight"]}
    state["model.embed_tokens.weight"] = held["token_embd.weight"]
    for i in range(files.LAYERS):
        at, to = f"blk.{i}.", f"model.layers.{i}."
        both = [f"{at}{name}.{end}" for name in names for end in ("weight", "bias")]
        state |= {name.replace(at, to): held[name] for name in both if name in held}
        for name, its in names.items():
            state = {key.replace(f"{to}{name}.", f"{to}{its}."): t for key, t in state.items()}
        state[f"{to}self_attn.sinks"] = held[f"{at}attn_sinks.weight"]
        for end, tail in (("weight", ""), ("bias", "_bias")):
            gate, up, down = (held[f"{at}ffn_{name}_exps.{end}"] for name in ("gate", "up", "down"))
            rows = torch.stack((gate, up), 2).flatten(1, 2)
            state[f"{to}mlp.experts.gate_up_proj{tail}"] = rows.mT if end == "weight" else rows
            state[f"{to}mlp.experts.down_proj{tail}"] = down.mT if end == "weight" else down
    right.load_state_dict(state)
    packed = [m for m in model.modules() if isinstance(m, PackedExperts)]
    assert [m.format for m in packed] == ["mxfp4"] * 2 * files.LAYERS
    assert model.config.sliding_window == 16
    ids = torch.randint(0, files.TOKENS, (2, 40))
    with torch.no_grad():
        eager, wide = right(ids).logits, nn.Module.double(right)(ids).logits
        got = model(ids).logits
    assert float((got - wide).abs().max()) <= 2 * float((eager - wide).abs().max()) + 1e-6
    # Of experts in floats nothing is packed.
    other = gguf.load(files.write(tmp_path / "other.gguf", "gpt-oss", ("f32",)), torch.float32)
    assert other.get_parameter("model.layers.0.mlp.experts.down_proj").shape == (
        files.EXPERTS,
        files.EACH,
        files.HIDDEN,
    )
    assert other(ids).logits.isfinite().all()


def test_a_mixtral_says_that_it_is_a_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes it for one: the names are written here a second time."""
    import gguf as reader

    said = {"expert_count": files.EXPERTS, "expert_used_count": 3, "feed_forward_length": files.EACH}
    values = files.values("llama") | {f"llama.{name}": value for name, value in said.items()}
    shapes = {
        n: s
        for n, s in files.tensors("qwen3moe").items()
        if not n.endswith(("q_norm.weight", "k_norm.weight"))
    }
    monkeypatch.setattr(files, "values", lambda _: values)
    monkeypatch.setattr(files, "tensors", lambda _: shapes)
    file = files.write(tmp_path / "model.gguf", "llama", ("q4_k", "q6_k"))
    model = gguf.load(file, torch.float32)
    assert isinstance(model, transformers.MixtralForCausalLM)
    assert (model.config.num_local_experts, model.config.num_experts_per_tok) == (files.EXPERTS, 3)
    right = type(model)._from_config(copy.deepcopy(model.config), experts_implementation="eager").eval()
    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
    }
    names |= {f"attn_{n}": f"self_attn.{n[0]}_proj" for n in ("q", "k", "v", "output")}
    names |= {
        "blk": "model.layers",
        "output_norm": "model.norm",
        "output": "lm_head",
        "token_embd": "model.embed_tokens",
    }
    state = {}
    for t in reader.GGUFReader(file).tensors:
        rows = torch.tensor(reader.quants.dequantize(t.data, t.tensor_type)).view(*reversed(t.shape.tolist()))
        if (
            heads := {"attn_q": files.HEADS, "attn_k": files.KV_HEADS}.get(t.name.split(".")[-2])
        ) is not None:
            rows = rows.view(heads, -1, 2, files.HIDDEN).transpose(1, 2).reshape(rows.shape)
        state[".".join(names.get(part, part) for part in t.name.split("."))] = rows
    for i in range(files.LAYERS):
        gate, up, down = (state.pop(f"model.layers.{i}.ffn_{n}_exps.weight") for n in ("gate", "up", "down"))
        state[f"model.layers.{i}.mlp.experts.gate_up_proj"] = torch.cat((gate, up), 1)
        state[f"model.layers.{i}.mlp.experts.down_proj"] = down
    right.load_state_dict(state)
    assert {m.format for m in model.modules() if isinstance(m, PackedExperts)} == {"q4_k", "q6_k"}
    ids = torch.randint(0, files.TOKENS, (2, 20))
    with torch.no_grad():
        eager, wide, got = right(ids).logits, nn.Module.double(right)(ids).logits, model(ids).logits
    assert float((got - wide).abs().max()) <= 2 * float((eager - wide).abs().max()) + 1e-6


def test_factors_of_long_contexts_are_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    half = files.depth("phi3") // 2
    shapes = files.tensors("phi3") | {f"rope_factors_{name}.weight": (half,) for name in ("long", "short")}
    values = files.values("phi3") | {"phi3.rope.scaling.original_context_length": 32}
    monkeypatch.setattr(files, "values", lambda _: values)
    monkeypatch.setattr(files, "tensors", lambda _: shapes)
    file = files.write(tmp_path / "model.gguf", "phi3", ("q8_0",))
    model, found = gguf.load(file, torch.float32), header.read(file)
    own = model.config.rope_parameters
    for name in ("long", "short"):
        assert (
            own[f"{name}_factor"] == found.rows(f"rope_factors_{name}.weight").view(torch.float32)[0].tolist()
        )
    assert (own["rope_type"], own["original_max_position_embeddings"]) == ("longrope", 32)
    assert model.model.rotary_emb.attention_scaling == pytest.approx((1 + math.log(4) / math.log(32)) ** 0.5)
    ids = torch.randint(0, files.TOKENS, (1, 40))
    right = transformers.Phi3ForCausalLM(copy.deepcopy(model.config)).model.rotary_emb
    for positions in (ids[:, :20], ids):
        at = torch.arange(positions.shape[1])[None]
        mine, its = (rotary(torch.ones(1), at) for rotary in (model.model.rotary_emb, right))
        assert mine[0].equal(its[0])


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("gpt-oss", "yarn"), ("gemma3", "linear"), ("qwen2", "yarn"), ("llama", "none")],
)
def test_rotations_are_scaled_as_the_file_says(
    architecture: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"type": kind, "factor": 4.0, "original_context_length": 32}
    values = files.values(architecture) | {
        f"{architecture}.rope.scaling.{name}": v for name, v in said.items()
    }
    monkeypatch.setattr(files, "values", lambda _: values)
    model = gguf.load(files.write(tmp_path / "model.gguf", architecture), torch.float32)
    own = model.config.rope_parameters
    own = own.get("full_attention", own)
    if kind == "none":
        assert own["rope_type"] == "default"
        return
    assert (own["rope_type"], own["factor"], own["original_max_position_embeddings"]) == (kind, 4, 32)
    values[f"{architecture}.rope.scaling.factor"] = float("nan")
    with pytest.raises(CheckpointError, match="rotations scaled by a factor of nan, where it is above 0"):
        gguf.load(files.write(tmp_path / "model.gguf", architecture), torch.float32)
    values[f"{architecture}.rope.scaling.type"] = "dynamic"
    with pytest.raises(
        CheckpointError, match="rotations scaled by 'dynamic', where linear and yarn are known"
    ):
        gguf.load(files.write(tmp_path / "model.gguf", architecture), torch.float32)


@pytest.mark.parametrize("architecture", ["starcoder2", "stablelm", "nemotron", "phi3", "gemma2"])
def test_rotations_caps_and_windows_are_the_files(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers passes not all of them on, and then has its own for every file."""
    said = {"rope.freq_base": 5e5, "rope.dimension_count": files.depth(architecture) * 3 // 8}
    said |= {"attn_logit_softcapping": 9.0, "final_logit_softcapping": 7.0}
    said |= {"attention.layer_norm_epsilon": 0.125, "attention.sliding_window": 24}
    values = files.values(architecture) | {f"{architecture}.{name}": v for name, v in said.items()}
    values[f"{architecture}.attention.head_count"] = files.HIDDEN // files.depth(architecture)
    monkeypatch.setattr(files, "values", lambda _: values)
    config = gguf._config(header.read(files.write(tmp_path / "model.gguf", architecture, ("f32",))))
    assert config.rope_parameters["rope_theta"] == 5e5
    assert config.rope_parameters.get("partial_rotary_factor", 0.375) == 0.375
    assert getattr(config, "attn_logit_softcapping", 9) == 9
    assert getattr(config, "final_logit_softcapping", 7) == 7
    assert getattr(config, "norm_eps", 0.125) == 0.125
    assert getattr(config, "sliding_window", 24) == 24


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62), ("gemma3", 26)])
def test_the_largest_gemmas_scale_attention_by_their_width(
    architecture: str, layers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = files.values(architecture) | {f"{architecture}.block_count": layers}
    monkeypatch.setattr(files, "values", lambda _: values)
    config = gguf._config(header.read(files.write(tmp_path / "model.gguf", architecture, ("f32",))))
    assert config.query_pre_attn_scalar == (256 if layers == 26 else files.HIDDEN // files.HEADS)


def test_load_optimizes_and_generates_what_the_unpacked_model_does(tmp_path: Path) -> None:
    file = files.write(tmp_path / "model.gguf", "llama")
    model = opsmith.load(file, config=Config(tune=False))
    ids = torch.randint(0, files.TOKENS, (1, 12))
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    right = theirs(file).generate(ids, **how)
    assert model.generate(ids, **how).equal(right)
    report = str(model.opsmith.report)
    assert "kept as the model has them: " in report
    assert "linear layers of q4_k" in report
    assert "not quantized" not in report
    assert model.config.eos_token_id == 2
    # Layers of one input and one format are one call, and stay what they are.
    assert opsmith.restore(model).generate(ids, **how).equal(right)


@pytest.mark.parametrize("cast", [lambda model: model.bfloat16(), lambda model: model])
def test_a_loaded_model_is_cast_and_its_packed_layers_are_not(cast: Any, tmp_path: Path) -> None:
    file, ids = files.write(tmp_path / "model.gguf", "gemma3"), torch.randint(0, files.TOKENS, (1, 12))
    model = gguf.load(file, torch.float32)
    assert any(isinstance(module, PackedEmbedding) for module in model.modules())
    opsmith.optimize(cast(model), dtype="bfloat16", config=Config(tune=False))
    with torch.no_grad():
        logits = model(ids).logits
        assert logits.dtype == torch.bfloat16
        assert logits.equal(opsmith.load(file, dtype="bfloat16", config=Config(tune=False))(ids).logits)


def test_experts_keep_the_files_bits_where_they_can(tmp_path: Path) -> None:
    file = files.write(tmp_path / "model.gguf", "qwen3moe", ("q4_k", "q6_k"))
    model = opsmith.load(file, config=Config(tune=False))
    assert model.config.moe_intermediate_size == files.EACH
    experts = model.model.layers[0].mlp.experts
    assert {experts.gate_up_proj.format, experts.down_proj.format} == {"q4_k", "q6_k"}
    ids = torch.randint(0, files.TOKENS, (1, 12))
    how = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    right = theirs(file)
    assert model.generate(ids, **how).equal(right.generate(ids, **how))
    report = str(model.opsmith.report)
    assert "2 expert weights of q4_k" in report
    assert "2 expert weights of q6_k" in report
    assert "left to transformers" not in report
    with torch.no_grad():
        got, wide = opsmith.restore(model)(ids).logits, nn.Module.double(right)(ids).logits
    assert float((got - wide).abs().max() / wide.abs().max()) < 1e-5
    # A type that no layer keeps: all experts of the layer are floats, which may be packed anew.
    file = files.write(tmp_path / "other.gguf", "qwen3moe", ("q8_0", "q4_1"))
    mixed, right = gguf.load(file, torch.float32), theirs(file)
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        assert mixed.get_parameter(path).equal(right.get_parameter(path))
    packed = opsmith.load(file, quantize="int8", config=Config(tune=False))
    packed(ids)
    assert "2 mixtures to int8" in str(packed.opsmith.report)


def test_experts_that_the_file_lacks_are_named(tmp_path: Path) -> None:
    file = files.write(tmp_path / "model.gguf", "qwen3moe")
    at = file.read_bytes().index(b"blk.0.ffn_up_exps")
    with pytest.raises(
        CheckpointError, match=r"it has no tensor for model.layers.0.mlp.experts.gate_up_proj"
    ):
        gguf.load(damaged(file, at, b"blk.0.ffn_zz_exps"), torch.float32)
    at = file.read_bytes().index(b"qwen3moe.expert_count") + 21 + 4
    with pytest.raises(
        CheckpointError, match=r"is \[4, 256, 256\] where its values say \[3, 256, 256\]|gate_inp"
    ):
        gguf.load(damaged(file, at, struct.pack("<I", 3)), torch.float32)


def test_layers_of_one_input_are_joined(tmp_path: Path) -> None:
    file = files.write(tmp_path / "model.gguf", "qwen3", ("q4_k",))
    model = opsmith.load(str(file), config=Config(tune=False))
    ids = torch.randint(0, files.TOKENS, (1, 9))
    with torch.no_grad():
        wide = nn.Module.double(theirs(file))(ids).logits
        for _ in range(2):
            got = model(ids).logits
            assert float((got - wide).abs().max() / wide.abs().max()) < 1e-5
    assert "joined: 4 groups of layers of one input" in str(model.opsmith.report)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    state = load_file(tmp_path / "model.safetensors")
    again = gguf.load(file, torch.float32)
    again.load_state_dict(state)
    with torch.no_grad():
        assert again(ids).logits.sub(got).abs().max() < 1e-5 * wide.abs().max()


def test_what_is_in_floats_or_in_other_formats(tmp_path: Path) -> None:
    file = files.write(tmp_path / "model.gguf", "llama", ("f32", "f16", "q4_1", "q8_0"))
    model, right = gguf.load(file, torch.float32), theirs(file)
    assert {m.format for m in model.modules() if isinstance(m, PackedLinear)} == {"q8_0"}
    for path, parameter in model.named_parameters():
        assert parameter.equal(right.get_parameter(path)), path
    half = gguf.load(file, torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(torch.tensor([[1, 2]])).logits.dtype == torch.bfloat16
    quantized = opsmith.load(file, quantize="int8", config=Config(tune=False))
    quantized(torch.tensor([[1, 2]]))
    assert "to int8" in str(quantized.opsmith.report)


def test_frequencies_of_a_rotation_are_the_files(tmp_path: Path) -> None:
    import gguf as theirs_

    file, by = files.write(tmp_path / "model.gguf", "llama"), torch.linspace(1, 8, files.depth("llama") // 2)
    plain = gguf.load(file, torch.float32)
    reader, other = theirs_.GGUFReader(file), tmp_path / "scaled.gguf"
    writer = theirs_.GGUFWriter(other, "llama")
    for key, value in files.values("llama").items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("rope_freqs.weight", by.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    scaled = gguf.load(other, torch.float32)
    assert scaled.model.rotary_emb.inv_freq.allclose(plain.model.rotary_emb.inv_freq / by)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = files.write(tmp_path / "model.gguf", "llama", ("q8_0",))
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(CheckpointError, match=r"^accelerate is not installed: pip install"):
        gguf.load(file, torch.float32)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    first = files.write(tmp_path / "model.gguf", "qwen3moe", most=9)
    assert first.name == "model-00001-of-00003.gguf"
    model = gguf.load(first, torch.float32)
    whole = gguf.load(files.write(tmp_path / "model.gguf", "qwen3moe"), torch.float32)
    state = model.state_dict()
    for name, t in whole.state_dict().items():
        assert t.equal(state[name]), name
    last = tmp_path / "model-00003-of-00003.gguf"
    with pytest.raises(CheckpointError, match=r"00003\.gguf is one of several: name the first of them"):
        opsmith.load(last)
    with pytest.raises(CheckpointError, match="is one of several: name the first of them"):
        opsmith.load(first.rename(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").rename(first)
    last.unlink()
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf cannot be read: No such file"):
        opsmith.load(first)
    last.write_bytes((tmp_path / "model-00002-of-00003.gguf").read_bytes())
    with pytest.raises(CheckpointError, match=r"its parts have \d+ tensors, not 27; copy them again"):
        opsmith.load(first)


def damaged(file: Path, at: int, value: bytes) -> Path:
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    other = file.with_name("damaged.gguf")
    other.write_bytes(data)
    return other


def test_files_that_are_no_models(tmp_path: Path) -> None:
    file = files.write(tmp_path / "model.gguf", "llama")
    whole = file.read_bytes()
    found = header.read(file)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        opsmith.load(tmp_path / "none.gguf")
    for length in (0, 3, 10, 40, 200, 3000, len(whole) // 2, len(whole) - 1):
        short = tmp_path / "short.gguf"
        short.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is no whole GGUF file"):
            opsmith.load(short)
    huge = struct.pack("<Q", 1 << 63)
    name = whole.index(b"blk.0.attn_q.weight")
    for at, value, message in (
        (0, b"GGML", "does not begin with GGUF"),
        (4, b"\x09", "version 9"),
        (8, huge, "counts 9223372036854775808 tensors"),
        (16, huge, "tensors and 9223372036854775808 values"),
        (24, huge, "a name of 9223372036854775808 bytes"),
        (name - 8, huge, "a name of 9223372036854775808 bytes"),
        (name + 19, b"\x09", "has 9 dimensions"),
        (name + 23, huge, "ends at byte|lies over"),
        (name + 23, struct.pack("<Q", 257), "are no blocks of"),
        (name + 39, b"\xff", "unknown type 255"),
        (name + 43, huge, "ends at byte"),
        (name + 43, struct.pack("<Q", found.tensors["blk.1.ffn_up.weight"].offset), "lies over"),
        (name + 43, b"\x01", "lies over another tensor, or at an odd place"),
        (name + 15, b"\xff", "not UTF-8"),
        (name, b"blk.0.attn_k", "two tensors have one name"),
        (name, b"blk.7", "it has no tensor for model.layers.0.self_attn.q_proj.weight"),
        (name, b"blk.0.attn_z", "it has no tensor for model.layers.0.self_attn.q_proj.weight"),
    ):
        with pytest.raises(CheckpointError, match=message):
            gguf.load(damaged(file, at, value), torch.float32)
    with pytest.raises(
        CheckpointError, match="its architecture is 'zonks', of which the names are not known"
    ):
        gguf.load(damaged(file, whole.index(b"llama"), b"zonks"), torch.float32)
    shape = found.tensors["blk.0.attn_norm.weight"]
    assert shape.shape == (files.HIDDEN,)
    at = whole.index(b"llama.embedding_length") + len("llama.embedding_length") + 4
    with pytest.raises(CheckpointError, match=r"is \[320, 256\] where its values say \[320, 128\]"):
        gguf.load(damaged(file, at, struct.pack("<I", 128)), torch.float32)
    for name_of, value, message in (
        (b"block_count", 1 << 31, "it has 2147483648 layers and 21 tensors"),
        (b"block_count", 3, "it has no tensor for model.layers.2"),
        (b"block_count", 1, "other tensors belong to no layer"),
        (b"attention.head_count", 0, "its values make no model"),
        (
            b"feed_forward_length",
            (1 << 32) - 1,
            r"its values make no model|is \[512, 256\] where its values say",
        ),
    ):
        at = whole.index(b"llama." + name_of) + 6 + len(name_of) + 4
        with pytest.raises(CheckpointError, match=message):
            gguf.load(damaged(file, at, struct.pack("<I", value)), torch.float32)
    with pytest.raises(CheckpointError, match="every scale must be finite"):
        gguf.load(damaged(file, found.tensors["token_embd.weight"].offset, b"\xff\x7f"), torch.float32)
    with pytest.raises(ValueError, match="load: dtype must be one of float32, bfloat16, float16, got int8"):
        opsmith.load(file, dtype=torch.int8)
