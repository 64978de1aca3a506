"""The worked example in CUDA C++: compiles for GPUs that need not be here, and trains where its kernels cannot run."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from opsmith.authoring import load
from opsmith.authoring.project import compile as build, imported
from opsmith.kernels import nvcc
from opsmith.proof.verify import verify

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return imported(EXAMPLES / "train_cuda_layer_norm.py", "train_cuda_layer_norm")


@pytest.mark.skipif(nvcc.find() is None, reason="there is no nvcc")
def test_compiles_for_two_generations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path))
    steps: list[str] = []
    (kernels,) = build.projects_kernels(EXAMPLES / "cuda_layer_norm")
    said = build.compile_backend(kernels, "cuda", lambda done, total, file: steps.append(Path(file).name))
    assert "sm_80, sm_90a and newer" in said
    assert {"function.cpp", "function.cu"} < set(steps)


def test_the_card_is_kept_on_this_machine() -> None:
    card = load(EXAMPLES / "cuda_layer_norm").CARD
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for dtype in card.dtypes:
        findings = list(verify(card, [dtype], device))
        assert {f.implementation for f in findings} >= {"autograd", "eager"}
        assert [f for f in findings if not f.ok] == []


def test_a_training_loop_learns(training: ModuleType) -> None:
    losses = training.train(30, "cuda" if torch.cuda.is_available() else "cpu")
    assert losses[0] > 0.6
    assert losses[-1] < 0.2
