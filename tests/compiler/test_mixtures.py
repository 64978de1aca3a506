"""`optimize` on mixtures of experts of transformers: opsmith's implementation, proved, and theirs again."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

import opsmith
from opsmith.compiler.modules import mixtures
from opsmith.compiler.modules.quantize import Packing
from tests.decoding import test_experts as experts_models

CONFIGS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")


def model(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = hf.MixtralConfig(**{**sizes, **heads, "num_local_experts": 4, **more})
    made = hf.AutoModelForCausalLM.from_config(config)
    for name, weight in made.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(weight, 0, 0.3)
    return made.eval()


def taken(made: Any, verify: bool = True) -> mixtures.Mixtures:
    found = mixtures.Mixtures()
    found.take(made, verify)
    return found


def test_a_mixture_is_one_graph_and_given_back() -> None:
    made, ids = model(), torch.randint(0, 60, (2, 9))
    before = made.config._experts_implementation
    with torch.no_grad():
        expected = made(ids, use_cache=False).logits
        opsmith.optimize(made, {"input_ids": ids, "use_cache": False}, config=opsmith.Config(tune=False))
        torch.testing.assert_close(made(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-5)
    assert made.config._experts_implementation == "opsmith"
    assert "experts: 1 mixtures in one kernel each" in str(made.opsmith.report)
    opsmith.restore(made)
    assert made.config._experts_implementation == before


def test_a_mixture_learns_as_before() -> None:
    made = model()
    eager, ids = copy.deepcopy(made), torch.randint(0, 60, (2, 7))
    opsmith.optimize(made, config=opsmith.Config(tune=False, inductor=False))
    for each in (eager, made):
        each(ids, labels=ids).loss.backward()
    for (name, mine), theirs in zip(made.named_parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None, name
        assert theirs.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def test_what_somebody_has_asked_for_stays() -> None:
    made = model()
    made.config._experts_implementation_internal = "sonicmoe"
    assert taken(made).lines() == []
    assert made.config._experts_implementation == "sonicmoe"


def test_another_form_is_left_and_said() -> None:
    made = model(hidden_act="relu")
    before = made.config._experts_implementation
    (line,) = taken(made).lines()
    assert line.startswith("experts: 1 mixtures are left to transformers: their gate is none of ours")
    assert made.config._experts_implementation == before


def test_a_mixture_without_numbers_is_left_and_said() -> None:
    """A model made on the device meta, which gets its memory later."""
    with torch.device("meta"):
        made = opsmith.optimize(model(), config=opsmith.Config(tune=False, inductor=False))
    assert "1 mixtures are left to transformers: their weights are on the device meta" in str(
        made.opsmith.report
    )
    made.to_empty(device="cpu").init_weights()
    eager, ids = copy.deepcopy(made), torch.randint(0, 60, (2, 7))
    opsmith.restore(eager)
    with torch.no_grad():
        right = eager(ids, use_cache=False).logits
        torch.testing.assert_close(made(ids, use_cache=False).logits, right, rtol=1e-4, atol=1e-5)


def test_experts_that_compute_something_else_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith.decoding import experts

    right = experts.mixed
    monkeypatch.setattr(experts, "mixed", lambda *given: 1.001 * right(*given))
    made = model()
    (line,) = taken(made).lines()
    assert "in float64 they differ" in line
    assert made.config._experts_implementation != "opsmith"
    assert taken(made, verify=False).lines() == ["experts: 1 mixtures in one kernel each"]


def unpacked(made: Any) -> Any:
    """The model in float64, with the weights that its packed ones stand for."""
    twin = copy.deepcopy(made)
    wide = opsmith.restore(twin).double()
    made.opsmith.packing.unpack(wide, torch.float64)
    return wide


@pytest.mark.parametrize(
    ("name", "format"),
    [*((name, "int8") for name in CONFIGS), ("gpt_oss", "int4")]
    + [("mixtral", format) for format in ("int4", "bf16", "int8_dynamic")],
)
def test_experts_are_packed_and_given_back(name: str, format: str) -> None:
    layers = 2 if name == "deepseek_v3" else 1  # whose first one is no mixture
    made, ids = experts_models.model(name, layers), torch.randint(0, 60, (2, 9))
    state = {key: t.clone() for key, t in made.state_dict().items()}
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # Experts alone: other layers of int8_dynamic round their inputs, which nothing in float64 does.
    skip = ["*attn*", "*_proj", "*shared*", "lm_head"]
    with torch.no_grad():
        before = made(ids).logits
        settings = opsmith.Config(tune=False, quantize=format, quantize_skip=skip)
        opsmith.optimize(made, config=settings)
        got, right = made(ids).logits, unpacked(made)(ids).logits
        assert got.sub(right).abs().max() < 1e-5 * right.abs().max()
        assert got.sub(before).abs().max() > 1e-5 * right.abs().max()
        answer = made.generate(ids, **how)
    report = str(made.opsmith.report)
    records = [layer for layer in made.opsmith.packing.layers if layer.what == "mixture"]
    assert len(records) == 1
    assert {layer.status for layer in records} == {"packed"}
    assert "1 mixture" in report
    bits = {"int8": 1, "int8_dynamic": 1, "int4": 0.5 + 2 / 24, "bf16": 2}[format]
    numbers = sum(t.numel() for key, t in state.items() if key.endswith(("gate_up_proj", "down_proj")))
    assert sum(layer.nbytes for layer in records) < 1.6 * bits * numbers
    for key, t in made.state_dict().items():
        assert t.equal(state[key]), key
    opsmith.restore(made)
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, before, rtol=1e-5, atol=1e-6)
        assert answer.shape == (2, 13)


def test_packed_experts_follow_their_weights_and_are_released() -> None:
    made, ids = model(), torch.randint(0, 60, (1, 9))
    experts = made.model.layers[0].mlp.experts
    opsmith.optimize(made, config=opsmith.Config(tune=False, quantize="int8"))
    with torch.no_grad():
        first = made(ids).logits
        experts.down_proj.mul_(-1)
        second, right = made(ids).logits, unpacked(made)(ids).logits
    assert second.sub(right).abs().max() < 1e-5 * right.abs().max() < first.sub(second).abs().max()
    twin = pickle.loads(pickle.dumps(made))
    its = twin.model.layers[0].mlp.experts
    assert its.forward.__func__ is type(experts).forward
    opsmith.restore(made)
    opsmith.optimize(
        made, {"input_ids": ids}, config=opsmith.Config(tune=False, quantize="int8", quantize_release=True)
    )
    assert experts.down_proj.is_meta
    assert experts.gate_up_proj.is_meta
    with torch.no_grad():
        torch.testing.assert_close(made(ids).logits, second, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="were given back to the system"):
        opsmith.restore(made)


def test_experts_that_stay_as_they_are_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(made: Any, **more: Any) -> str:
        packing = Packing()
        packing.pack(made, opsmith.Config(quantize="int8", **more))
        (record,) = (layer for layer in packing.layers if layer.name.endswith("experts"))
        return f"{record.status}: {record.why}"

    assert why(model(hidden_act="relu")).startswith("left: their gate is none of ours")
    assert why(model(), quantize_skip=["*experts"]) == "left: its name matches '*experts' of quantize_skip"
    broken = model()
    broken.model.layers[0].mlp.experts.down_proj.data[2, 3, 4] = torch.inf
    assert why(broken).startswith("left: PackedLinear: every weight must be finite")
    from opsmith.decoding import experts

    right = experts.mixed
    monkeypatch.setattr(experts, "mixed", lambda *given: 1.001 * right(*given))
    assert why(model()).startswith("left: in float64 they differ")
    assert why(model(), verify=False) == "packed: "


def test_memory_of_packed_experts() -> None:
    made = model(hidden_size=256, intermediate_size=512, num_local_experts=16)
    experts = made.model.layers[0].mlp.experts
    own = experts.gate_up_proj.nbytes + experts.down_proj.nbytes
    seen = []
    of = mixtures.PackedExperts.of.__func__  # type: ignore[attr-defined]

    class Counted(mixtures.PackedExperts):
        @classmethod
        def of(cls, layers: Any, count: int) -> Any:
            def watched() -> Any:
                for layer in layers:
                    seen.append(layer.nbytes)
                    yield layer

            return of(cls, watched(), count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixtures, "PackedExperts", Counted)
        packed = mixtures.PackedMixture(experts, "int8", False, group_size=32, symmetric=True)
    # One expert after the other: what is packed, and no other copy of all.
    assert len(seen) == 32
    assert packed.nbytes == sum(seen) < 0.3 * own
