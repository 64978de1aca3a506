"""A call as text and back, as a profile names it and `opsmith bench --shape` takes it."""

from __future__ import annotations

import math

import pytest
import torch

import opsmith.ops  # noqa: F401  the cards register themselves
from opsmith.compiler.choose.select import signature
from opsmith.operator import registry
from opsmith.proof.replay import call_of, sample_of, spell

CARDS = registry()


def test_a_call_comes_back_as_it_was() -> None:
    call = {
        "x": torch.randn(4, 6, dtype=torch.bfloat16).t(),
        "weight": torch.randn(4, dtype=torch.bfloat16),
        "eps": 1e-5,
        "round_before_weight": True,
        "residual": None,
    }
    text = spell(CARDS["rms_norm"], call)
    assert text == "x=bfloat16[6,4]@1,6 weight=bfloat16[4] eps=1e-05 round_before_weight=True"
    sample, dtype = sample_of(CARDS["rms_norm"], text)
    assert dtype == torch.bfloat16
    (x, weight, eps), kwargs = sample.args, sample.kwargs
    assert (x.shape, x.stride(), x.dtype) == ((6, 4), (1, 6), torch.bfloat16)
    assert weight.shape == (4,)
    assert eps == 1e-5
    assert kwargs == {"round_before_weight": True}
    assert torch.isfinite(CARDS["rms_norm"].function(*sample.args, **sample.kwargs)).all()


def test_integers_stay_inside_what_they_point_into() -> None:
    call = {"ids": torch.zeros(2, 500, dtype=torch.int64), "table": torch.zeros(7, 3)}
    text = spell(CARDS["embedding"], call)
    assert text == "ids=int64[2,500]<7 table=float32[7,3]"
    sample, _ = sample_of(CARDS["embedding"], text)
    assert int(sample.args[0].max()) == 6
    logits = {"logits": torch.zeros(4, 9), "target": torch.zeros(4, dtype=torch.int64)}
    assert spell(CARDS["cross_entropy"], logits) == "logits=float32[4,9] target=int64[4]<9"


def test_what_random_integers_could_not_mean_has_no_text() -> None:
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    q = torch.zeros(3, 2, 4)
    call = {"q": q, "k": q, "v": q, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    assert spell(CARDS["attention_varlen"], call) is None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x", "'x' says nothing"),
        ("x=float31[2]", "PyTorch has no dtype 'float31'"),
        ("x=float32[2,3]@1", "2 sizes and 1 strides"),
        ("x=int64[2]", "integers need a bound"),
        ("y=float32[2,3]", "rms_norm takes x, weight, eps, residual, weight_offset"),
    ],
)
def test_a_text_that_says_nothing_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sample_of(CARDS["rms_norm"], text)


def test_without_a_source_of_numbers_tensors_have_no_memory() -> None:
    assert call_of("weight=cpu:float32[3,4] x=cpu:float32[2,4] activation=gelu")["x"].is_meta


def test_settings_come_back_from_a_plans_signature() -> None:
    call = {
        "x": torch.zeros(2, 4),
        "splits": (8, 4),
        "eps": 1e-6,
        "causal": True,
        "cap": math.inf,
        "how": "gelu",
    }
    again = call_of(signature(CARDS["packed_linear"], call).partition(" ")[2])
    assert again.pop("x").shape == (2, 4)
    assert again == {name: value for name, value in call.items() if name != "x"}
