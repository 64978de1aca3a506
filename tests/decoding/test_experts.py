"""`model.set_experts_implementation("opsmith")` on mixtures of transformers: what eager computes, and its gradients."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers as hf

from opsmith import decoding
from opsmith.operator import Tolerance

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
CONFIGS: dict[str, Any] = {
    "mixtral": lambda sizes: hf.MixtralConfig(**sizes, num_local_experts=4),
    "qwen2_moe": lambda sizes: hf.Qwen2MoeConfig(**sizes, num_experts=4, shared_expert_intermediate_size=24),
    "olmoe": lambda sizes: hf.OlmoeConfig(**sizes, num_experts=4),
    "qwen3_moe": lambda sizes: hf.Qwen3MoeConfig(**sizes, num_experts=4, head_dim=8),
    "gpt_oss": lambda sizes: hf.GptOssConfig(**sizes, num_local_experts=4, head_dim=8),
    "deepseek_v3": lambda sizes: hf.DeepseekV3Config(
        **{**sizes, **MLA, "num_key_value_heads": 4},
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
    ),
}


def model(name: str, layers: int = 2) -> Any:
    torch.manual_seed(0)
    decoding.register(wanted=True)
    config = CONFIGS[name](SIZES | {"num_hidden_layers": layers})
    made = hf.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if "experts" in key:  # GPT-OSS's biases would be zeros
                weight.normal_(0, 0.3)
    return made.eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of `opsmith.ops.experts`."""
    from opsmith.decoding import experts as ours

    seen: list[Any] = []
    original = ours.experts
    monkeypatch.setattr(ours, "experts", lambda *args, **how: seen.append(how) or original(*args, **how))
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_eagers(name: str, dtype: torch.dtype, calls: list[Any]) -> None:
    made = model(name).to(dtype)
    exact = copy.deepcopy(made).double()
    ids = torch.randint(0, 60, (3, 17))
    with torch.no_grad():
        # The router chooses by its own rounding: the reference is told what was chosen.
        chosen: list[torch.Tensor] = []
        blocks = [
            (m, n) for n, m in made.named_modules() if n.endswith("experts") and hasattr(m, "gate_up_proj")
        ]
        assert blocks
        hooks = [m.register_forward_pre_hook(lambda _, args: chosen.append(args[1])) for m, _ in blocks]
        eager = made(ids).logits
        for hook in hooks:
            hook.remove()
        told = iter(chosen)
        for _, path in blocks:
            exact.get_submodule(path).register_forward_pre_hook(
                lambda _, args: (args[0], next(told), args[2])
            )
        right = exact(ids).logits
        made.set_experts_implementation("opsmith")
        ours = made(ids).logits
    assert len(calls) == len(blocks)
    verdict = Tolerance().check(ours, eager, right)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_eagers(name: str, calls: list[Any]) -> None:
    made, ids = model(name), torch.randint(0, 60, (2, 9))
    found = []
    for implementation in ("eager", "opsmith"):
        made.set_experts_implementation(implementation)
        made.zero_grad()
        made(ids, labels=ids).loss.backward()
        found.append({key: p.grad.clone() for key, p in made.named_parameters() if p.grad is not None})
    assert calls
    assert found[0].keys() == found[1].keys()
    for key, grad in found[0].items():
        torch.testing.assert_close(found[1][key], grad, rtol=1e-3, atol=1e-5, msg=key)


def test_a_form_that_is_not_ours_is_left_to_transformers(calls: list[Any]) -> None:
    made, ids = model("mixtral"), torch.randint(0, 60, (1, 5))
    for layer in made.model.layers:
        layer.mlp.experts.act_fn = torch.nn.ReLU()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("opsmith")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with torch.no_grad():
            eager = made(ids).logits
            made.set_experts_implementation("opsmith")
            torch.testing.assert_close(made(ids).logits, eager, rtol=1e-4, atol=1e-5)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
    assert calls == []
    assert heard == [
        "MixtralExperts: experts are left to transformers: their gate is none of ours (MixtralExperts)"
    ]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_it_is_traced_in_one_graph(name: str, calls: list[Any]) -> None:
    made, ids = model(name), torch.randint(0, 60, (1, 7))
    with torch.no_grad():
        eager = made(ids, use_cache=False).logits
        made.set_experts_implementation("opsmith")
        torch.compiler.reset()
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)(ids, use_cache=False).logits
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)
