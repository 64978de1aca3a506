"""Baselines: who may take part, and Liger's spelling of our calls, on a stand-in for Liger."""

import sys
import types
from typing import Any

import pytest
import torch

import opsmith.ops  # noqa: F401  registers the cards
from opsmith.operator import registry
from opsmith.proof.baselines import BASELINES, choose


def test_they_come_in_the_order_asked_for_and_once() -> None:
    assert [b.name for b in choose(["compile", "eager", "compile"], "cpu")] == ["compile", "eager"]


def test_liger_needs_a_gpu_and_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"cannot compare against liger: .* needs a GPU; add --device cuda"):
        choose(["liger"], "cpu")
    with pytest.raises(ValueError, match="liger: Liger-Kernel is not installed; pip install liger-kernel"):
        choose(["liger"], "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert choose(["liger"], "cuda")[0].title == "Liger"


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for Liger's functions that returns its arguments."""
    module = types.ModuleType("liger_kernel.transformers.functional")
    for name in ("layer_norm", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy"):
        setattr(module, f"liger_{name}", lambda *args, **options: (args, options))
    module.liger_rope = lambda *args: args  # type: ignore[attr-defined]
    for part in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def call(name: str) -> Any:
    return BASELINES["liger"].of(types.SimpleNamespace(name=name))  # type: ignore[arg-type]


def test_what_liger_gets(liger: types.ModuleType) -> None:
    x, w, b = torch.ones(2, 3), torch.ones(3), torch.zeros(3)
    assert call("layer_norm")(x, w, b, 1e-3)[0] == (x, w, b, 1e-3)
    assert call("rms_norm")(x, w, weight_offset=1.0)[0] == (x, w, 1e-6, 1.0, "gemma", False)
    assert call("rms_norm")(x, w, round_before_weight=True)[0][4] == "llama"
    assert call("silu_mul")(x, w)[0] == (x, w)
    assert call("gelu_mul")(x, w, tanh=True)[0] == (x, w)
    q, cos = torch.ones(1, 2, 3, 4), torch.ones(3, 4)
    assert [t.shape for t in call("rope_qk")(q, q, cos, cos)] == [q.shape, q.shape]
    options = call("cross_entropy")(x, w, z_loss=0.5, reduction="sum")[1]
    assert (options["lse_square_scale"], options["reduction"], options["ignore_index"]) == (0.5, "sum", -100)
    assert call("linear_cross_entropy")(x, w, b, label_smoothing=0.1)[1]["label_smoothing"] == 0.1


def test_what_liger_does_not_do_is_said(liger: types.ModuleType) -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="Liger's takes only: a weight, no residual"):
        call("rms_norm")(x, residual=x)
    with pytest.raises(ValueError, match="Liger's takes only: tanh"):
        call("gelu_mul")(x, x)
    assert call("embedding") == "we know of no embedding in Liger-Kernel"


def test_every_operator_has_an_eager_spelling() -> None:
    for card in registry().values():
        assert BASELINES["eager"].of(card) is card.eager
