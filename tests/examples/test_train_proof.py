"""The training proof itself: curves and gradients on models small enough for a test."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from opsmith.authoring.project import imported

FILE = Path(__file__).parents[2] / "examples" / "train_proof.py"


@pytest.fixture(scope="module")
def proof() -> ModuleType:
    return imported(FILE, "train_proof")


@pytest.mark.parametrize("model", ["llama", "bert"])
def test_a_model_learns_the_same_with_our_operators(proof: ModuleType, model: str) -> None:
    size = proof.Size(layers=2, width=64, heads=2, inner=96, length=48, batch=4)
    found = proof.prove(model, size, steps=12)
    assert found["holds"]["loss"], found["largest_difference"]
    assert found["holds"]["gradients"], found["gradients"]
    for losses in found["losses"].values():
        assert len(losses) == 12
        assert losses[-1] < losses[0] - 0.1


def test_a_wrong_operator_shows_in_the_gradients(proof: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(proof.Eager):  # type: ignore[misc, name-defined]
        @staticmethod
        def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(gate) * up * (1 + 1e-4)

    monkeypatch.setitem(proof.OPERATORS, "opsmith", Wrong)
    found = proof.prove(
        "llama", proof.Size(layers=1, width=32, heads=1, inner=48, length=16, batch=2), steps=6
    )
    assert not found["holds"]["gradients"]


def test_step_by_step_attention_is_the_same_function(proof: ModuleType) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 16, dtype=torch.float64).unbind()
    for causal in (False, True):
        stepwise = proof.EagerAttention.attention(q, k, v, causal=causal)
        torch.testing.assert_close(stepwise, proof.Eager.attention(q, k, v, causal=causal))
