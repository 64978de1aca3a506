"""The table of the rotary embedding, against Hugging Face's functions and the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from opsmith.ops import rope_table
from opsmith.ops.rope.table import frequencies_of

DIM, TRAINED, LONGEST = 64, 4096, 16384
LISTS = {
    "short_factor": [1.0 + 0.01 * i for i in range(DIM // 2)],
    "long_factor": [1.5 + 0.5 * i for i in range(DIM // 2)],
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "original_max_position_embeddings": 8192, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.25},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 0.5},
    {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, "factor": 4.0, **LISTS},
    {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, **LISTS},
    {"rope_type": "longrope", "attention_factor": 1.19, "original_max_position_embeddings": TRAINED, **LISTS},
    {"rope_type": "proportional", "partial_rotary_factor": 0.25},
]


def name_of(scaling: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in scaling.items() if not isinstance(v, list))


@pytest.mark.parametrize("length", [100, 2 * LONGEST])
@pytest.mark.parametrize("scaling", SCALINGS, ids=name_of)
def test_frequencies_and_factor_are_those_of_hugging_face(scaling: dict[str, Any], length: int) -> None:
    transformers = pytest.importorskip("transformers")
    utilities = pytest.importorskip("transformers.modeling_rope_utils")
    theta = 500000.0
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    init = utilities.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    theirs, factor = init(config, "cpu", seq_len=length)
    given = {"max_position_embeddings": LONGEST, **config.rope_parameters}
    mine, my_factor = frequencies_of(DIM, length, scaling=given)
    assert my_factor == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(mine, theirs.double(), rtol=2e-6, atol=0)
    cos, sin = rope_table(DIM, length, theta=theta, scaling={"max_position_embeddings": LONGEST, **scaling})
    angles = torch.arange(100)[:, None] * theirs.double()
    torch.testing.assert_close(cos[:100, : DIM // 2].double(), angles.cos() * factor, rtol=0, atol=2e-4)
    torch.testing.assert_close(sin[:100, DIM // 2 :].double(), angles.sin() * factor, rtol=0, atol=2e-4)


def test_the_older_spelling_and_missing_values_mean_the_same() -> None:
    new = rope_table(DIM, 10, scaling={"rope_type": "linear", "factor": 3.0})
    old = rope_table(DIM, 10, scaling={"type": "linear", "factor": 3.0, "rope_theta": None})
    plain = rope_table(DIM, 10, scaling={"rope_type": "default"})
    assert all(torch.equal(a, b) for a, b in zip(new, old, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(plain, rope_table(DIM, 10), strict=True))
    assert not torch.equal(new[0], plain[0])


def test_the_base_of_the_parameters_takes_the_place_of_theta() -> None:
    inside = rope_table(DIM, 10, scaling={"rope_type": "default", "rope_theta": 5e5})
    assert torch.equal(inside[0], rope_table(DIM, 10, theta=5e5)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_angles_are_exact_far_out(dtype: torch.dtype) -> None:
    cos, sin = rope_table(6, 100_001, theta=1e4, dtype=dtype)
    assert cos.shape == sin.shape == (100_001, 6)
    assert cos.dtype == sin.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    for i in range(6):
        angle = 100_000 * 1e4 ** (-2 * (i % 3) / 6)
        assert cos[-1, i].item() == pytest.approx(math.cos(angle), abs=unit + 1e-10)
        assert sin[-1, i].item() == pytest.approx(math.sin(angle), abs=unit + 1e-10)


def test_a_table_of_no_rows() -> None:
    assert [t.shape for t in rope_table(8, 0)] == [(0, 8), (0, 8)]
    assert rope_table(8, 0, scaling={"type": "dynamic", "factor": 2.0})[0].shape == (0, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rope_table(7, 4), ValueError, "dim must be a positive even number, got 7"),
        (lambda: rope_table(0, 4), ValueError, "dim must be a positive even number, got 0"),
        (lambda: rope_table(8, -1), ValueError, "length must not be negative, got -1"),
        (lambda: rope_table(8, 4, theta=0.0), ValueError, "theta must be a positive number, got 0.0"),
        (lambda: rope_table(8, 4, dtype=torch.int64), TypeError, "dtype must be floating-point, got int64"),
        (lambda: rope_table(8, 4, scaling=2.0), TypeError, "scaling must be a mapping, got float"),
        (lambda: rope_table(8, 4, scaling={"type": "cubic"}), ValueError, "default, linear.*got 'cubic'"),
        (lambda: rope_table(8, 4, scaling={"type": "linear"}), ValueError, "linear scaling needs 'factor'"),
        (
            lambda: rope_table(8, 4, scaling={"type": "yarn", "factor": 2.0}),
            ValueError,
            "yarn scaling needs 'original_max_position_embeddings'",
        ),
        (
            lambda: rope_table(
                8, 4, scaling={"type": "longrope", "factor": 2.0, **LISTS, "max_position_embeddings": 9}
            ),
            ValueError,
            r"short_factor must have 4 numbers for dim=8, got \(32,\)",
        ),
    ],
)
def test_errors_name_what_was_expected_and_what_came(call, error, message) -> None:
    with pytest.raises(error, match=f"rope_table: .*{message}"):
        call()
