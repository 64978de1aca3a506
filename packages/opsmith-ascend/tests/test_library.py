"""The kernels in Ascend C as implementations: what is said where there is no NPU, and what one would be asked."""

import pytest
import torch

import opsmith.ops  # noqa: F401  registers the cards
import opsmith_ascend
from opsmith.operator import Make, registry
from opsmith_ascend.library import NAMESPACE

JOINED = {
    name: card
    for name, card in registry().items()
    if any(one.name == "ascend" for one in card.implementations)
}


def test_the_cards_of_the_library_have_them() -> None:
    assert JOINED.keys() >= {"rms_norm_quant", "quantized_embedding", "mla_kv_epilogue", "mla_q_epilogue"}


@pytest.mark.parametrize("name", JOINED)
def test_without_torch_npu_every_call_is_refused_and_says_why(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opsmith_ascend, "torch_npu", lambda: False)
    card = JOINED[name]
    sample = next(iter(card.samples(Make(torch.float32))))
    _, refused = card.candidates(*sample.args, **sample.kwargs)
    assert "torch_npu" in refused["ascend"]
    assert "emulated" in refused["ascend"]


@pytest.mark.parametrize("name", JOINED)
def test_with_torch_npu_and_no_library_the_next_step_is_told(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opsmith_ascend, "torch_npu", lambda: True)
    assert f"opsmith_npu::{name}" in str(JOINED[name].implementation("ascend").available())


def test_what_a_library_registers_is_launched_with_the_kernels_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stand-in for the library: it fills the outputs as the emulation does."""
    from opsmith_ascend import SOURCES
    from opsmith_ascend.emulation import emulate

    schema = "rms_norm_quant(Tensor?[] inputs, Tensor(a!)[] outputs, float[] sizes) -> ()"
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(schema)

    def run(inputs: list[torch.Tensor | None], outputs: list[torch.Tensor], sizes: list[float]) -> None:
        names = ("x", "weight", "bias", "scale", "offset"), ("q", "s")
        given, made = (dict(zip(n, t, strict=True)) for n, t in zip(names, (inputs, outputs), strict=True))
        emulate(SOURCES / "rms_norm_quant.cpp", given, made, sizes)

    library.impl("rms_norm_quant", run, "CPU")
    monkeypatch.setattr(opsmith_ascend, "torch_npu", lambda: True)
    implementation = registry()["rms_norm_quant"].implementation("ascend")
    assert implementation.available() is True
    x, weight = torch.randn(5, 40), torch.ones(40)
    q, s = implementation.fn(x, weight)
    want, scales = registry()["rms_norm_quant"].reference(x, weight)
    assert (q.int() - want.int()).abs().max() <= 1
    torch.testing.assert_close(s, scales)
    assert "runs on npu" in str(implementation.accepts(x, weight))
    library._destroy()
