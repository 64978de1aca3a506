"""What is particular to moe_route: that it routes as the models of transformers do, ties, groups, wrong numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opsmith.ops import moe_route


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def same(got: tuple[torch.Tensor, ...], ids: torch.Tensor, weights: torch.Tensor) -> None:
    """Sorted by id, as not all models sort by weight."""
    for (i, w), (j, v) in zip(zip(*got, strict=True), zip(ids, weights, strict=True), strict=True):
        assert torch.equal(i.sort().values, j.sort().values)
        torch.testing.assert_close(w[i.argsort()], v[j.argsort()].float(), rtol=1e-5, atol=1e-7)


def test_softmax_as_mixtral_and_gpt_oss_have_it() -> None:
    logits = torch.randn(50, 32)
    values, ids = logits.softmax(-1).topk(4)
    same(moe_route(logits, 4), ids, values / values.sum(-1, keepdim=True))
    same(moe_route(logits, 4, normalize=False, scale=2.0), ids, 2 * values)
    same(moe_route(logits, 4), ids, logits.topk(4).values.softmax(-1))


@pytest.mark.parametrize("model", ["deepseek_v2", "deepseek_v3"])
def test_it_routes_as_transformers_does(model: str) -> None:
    pytest.importorskip("transformers")
    if model == "deepseek_v2":
        from transformers import DeepseekV2Config as Config
        from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter as Router

        given: dict[str, Any] = {"topk_method": "group_limited_greedy", "n_routed_experts": 32}
        how: dict[str, Any] = {"normalize": False}
    else:
        from transformers import DeepseekV3Config as Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter as Router

        given, how = {"n_routed_experts": 32}, {"scoring": "sigmoid"}
    given |= {"n_group": 8, "topk_group": 3, "num_experts_per_tok": 6, "routed_scaling_factor": 2.5}
    router = Router(Config(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, **given))
    torch.nn.init.normal_(router.weight)
    if model == "deepseek_v3":
        how["bias"] = router.e_score_correction_bias.normal_(0, 0.2)
    with torch.no_grad():
        logits, weights, ids = router(torch.randn(40, 16))
    same(moe_route(logits, 6, groups=8, topk_groups=3, scale=2.5, **how), ids, weights)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_of_equal_experts_the_first_is_taken(scoring: str, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 1.0, 0.0, 3.0, 0.5]], dtype=dtype)
    ids, weights = moe_route(logits, 5, scoring=scoring)
    assert ids.tolist() == [[1, 3, 6, 0, 2]]
    assert weights.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert float(weights.sum()) == pytest.approx(1)
    ids, _ = moe_route(torch.zeros(1, 8, dtype=dtype), 3, scoring=scoring, groups=4, topk_groups=2)
    assert ids.tolist() == [[0, 1, 2]]


def test_scores_that_rounding_would_make_equal_are_told_apart() -> None:
    logits = torch.tensor([[40.0, 41.0, 42.0, 0.0]])  # sigmoids of 1 in float32
    assert moe_route(logits, 2, scoring="sigmoid")[0].tolist() == [[2, 1]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, 4), torch.tensor([0.0, 0.0, 0.0, 9.0], requires_grad=True)
    logits.requires_grad_()
    ids, weights = moe_route(logits, 2, scoring="sigmoid", bias=bias, normalize=False)
    assert ids.tolist() == [[3, 0]]
    assert weights.tolist() == [[0.5, 0.5]]
    weights.sum().backward()
    assert bias.grad is None
    torch.testing.assert_close(logits.grad, torch.tensor([[0.25, 0.0, 0.0, 0.25]]))


def test_rows_of_nan_choose_experts_that_are_there() -> None:
    logits = torch.full((3, 8), torch.nan)
    ids, weights = moe_route(logits, 4, groups=4, topk_groups=2)
    assert bool(((ids >= 0) & (ids < 8)).all())
    assert bool(weights.isnan().all())


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"k": 9}, ValueError, "k must be at most 8, the experts that can be chosen, got 9"),
        ({"k": 0}, ValueError, "k must be 1 or more, got 0"),
        ({"k": 1.5}, TypeError, "k must be a whole number, got 1.5"),
        ({"k": 5, "groups": 4, "topk_groups": 2}, ValueError, "k must be at most 4, .*got 5"),
        ({"groups": 3, "topk_groups": 1}, ValueError, "groups must divide the 8 experts, .*got groups=3"),
        ({"groups": 4}, ValueError, "groups and topk_groups belong together, got one of them"),
        ({"topk_groups": 2}, ValueError, "groups and topk_groups belong together, got one of them"),
        ({"scoring": "relu"}, ValueError, "scoring must be one of softmax, sigmoid, got 'relu'"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias must have shape \[8\] to fit logits, got \(7,\)"),
        ({"logits": torch.zeros(2, 2, 8)}, ValueError, r"logits must have shape \[T, E\].*got \(2, 2, 8\)"),
        (
            {"logits": torch.zeros(2, 8).long()},
            TypeError,
            "logits must be a floating-point tensor, got int64",
        ),
    ],
)
def test_errors_name_what_was_expected_and_what_came(how: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=f"moe_route: {message}"):
        moe_route(**({"logits": torch.zeros(2, 8), "k": 2} | how))
