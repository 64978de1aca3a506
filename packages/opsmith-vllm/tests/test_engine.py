"""Tiny models in the engine: the same tokens as without the plugin, whatever the scheduler does."""

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Run, prompts

from opsmith.operator import Tolerance

EAGER = {"enforce_eager": True, "block_size": 32}
OURS = {
    "OpsmithRMSNorm",
    "OpsmithGemmaRMSNorm",
    "OpsmithSiluAndMul",
    "OpsmithGeluAndMul",
    "OpsmithRotaryEmbedding",
}
FIRST = prompts(150, 1, 90, 40, 120)
AGAIN = [ids[:100] + more for ids, more in zip(FIRST, prompts(7, 7, 7, 7, 7, seed=1), strict=True)]
# The last begins with all of the prompt before it, whose blocks are still there: of a window vLLM keeps no others.
WAVES = [FIRST, AGAIN, FIRST[:1], [FIRST[0] + AGAIN[0][-7:]]]
# What a scheduler has to do: prompts longer than a step takes, a cache too small for all, and prompts seen before.
TIGHT = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 18}


def plain(run: Run, model: Path) -> dict[str, Any]:
    """The engine without the plugin, and with room for everything."""
    return run(model, WAVES, plugin="off", new_tokens=40, enable_prefix_caching=False, **EAGER)


def tight(run: Run, model: Path) -> dict[str, Any]:
    return run(model, WAVES, new_tokens=40, abort=FIRST, **TIGHT, **EAGER)


@pytest.fixture(params=["llama", "gemma"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def test_our_layers_are_in_the_model(run: Run, model: Path) -> None:
    own, ours = plain(run, model), tight(run, model)
    assert not OURS & set(own["layers"])
    assert len(OURS & set(ours["layers"])) == 3  # a norm, an activation, a rotary embedding
    assert not [name for name in ours["layers"] if name.endswith(("RMSNorm", "AndMul")) and name not in OURS]
    assert set(own["refusals"]) == {"no plugin"}
    assert set(ours["refusals"]) == {""}
    assert "_C::cpu_attention_with_kv_cache" in own["operators"]
    assert "_C::cpu_attention_with_kv_cache" not in ours["operators"]


def test_tokens_are_those_of_the_engine_without_the_plugin(run: Run, model: Path) -> None:
    """In float32, greedily, with chunked prefill, cached prefixes, and sequences that had to give their blocks back."""
    own, ours = plain(run, model), tight(run, model)
    assert len(set(itertools.chain(*own["tokens"][0]))) > 10  # no model that says one thing
    assert (own["preemptions"], ours["preemptions"] > 0) == (0, True)
    assert (own["cached"][3], ours["cached"][3][0] > 0) == ([0], True)
    assert ours["tokens"] == own["tokens"]


def test_requests_that_are_aborted_change_nothing_for_others(run: Run, model: Path) -> None:
    assert tight(run, model)["after_abort"] == plain(run, model)["tokens"][0][-1]


def test_a_compiled_model_runs_our_operators(run: Run, model: Path) -> None:
    ours = run(model, [FIRST], new_tokens=40, block_size=32)
    wanted = {f"opsmith::{name}" for name in ("rms_norm", "gated", "rope_qk", "paged_attention", "attention")}
    assert wanted <= set(ours["operators"])
    assert "_C::cpu_attention_with_kv_cache" not in ours["operators"]
    assert ours["tokens"][0] == plain(run, model)["tokens"][0]


def test_a_compiled_model_keeps_the_engine_s_layers_where_none_was_named(run: Run, llama: Path) -> None:
    found = run(llama, [FIRST], plugin="auto", new_tokens=40, block_size=32)
    unmeasured = {f"opsmith::{name}" for name in ("rms_norm", "gated", "rope_qk")}
    assert not unmeasured & set(found["operators"])
    assert found["tokens"][0] == plain(run, llama)["tokens"][0]


def test_each_part_has_a_switch(run: Run, llama: Path) -> None:
    found = run(llama, [FIRST], plugin="norms, attention", new_tokens=40, **EAGER)
    assert OURS & set(found["layers"]) == {"OpsmithRMSNorm"}
    assert set(found["refusals"]) == {""}
    assert found["tokens"][0] == plain(run, llama)["tokens"][0]


def test_the_faster_is_taken_and_the_log_says_which(run: Run, gemma: Path) -> None:
    found = run(gemma, [FIRST], plugin="auto", new_tokens=40, **EAGER)
    told = re.findall(
        r"opsmith: (\w+) of .*: .* for .* µs, .* for .* µs, so (opsmith's|vLLM's own) is taken", found["log"]
    )
    # Norms of rows, with and without a residual, and of heads; attention with a window and without.
    kinds = Counter(kind for kind, _ in told)
    assert kinds == {"attention": 2, "gemma_rms_norm": 4, "gelu_and_mul": 1, "rotary_embedding": 1}
    refused = any(found["refusals"])
    assert refused == (("attention", "vLLM's own") in told)
    assert found["tokens"][0] == plain(run, gemma)["tokens"][0]


def test_logprobs_in_bfloat16_are_as_exact_as_the_engine_s_own(run: Run, model: Path) -> None:
    got, own = (
        run(model, [FIRST], plugin=plugin, new_tokens=1, logprobs=True, dtype="bfloat16", **EAGER)["logprobs"]
        for plugin in ("all", "off")
    )
    exact = exact_logprobs(model, FIRST)
    verdict = Tolerance().check_parts(
        (torch.tensor(a).bfloat16(), torch.tensor(b).bfloat16(), c)
        for a, b, c in zip(got, own, exact, strict=True)
        if len(c)
    )
    assert verdict.ok, verdict


def test_a_cache_in_eight_bits_is_left_to_vllm(run: Run, llama: Path) -> None:
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("vLLM's own cache in eight bits needs AVX-512")
    found = run(llama, [FIRST], kv_cache_dtype="fp8", **EAGER)
    assert all("the KV cache is fp8" in reason for reason in found["refusals"])
    lines = [line for line in found["log"].splitlines() if "attention is left to vLLM's own" in line]
    assert len(lines) == 1
    assert "_C::cpu_attention_with_kv_cache" in found["operators"]


def exact_logprobs(folder: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    """What transformers computes in float64, of each token but the first."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    found = []
    with torch.no_grad():
        for ids in sequences:
            logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            found.append(logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0])
    return found
