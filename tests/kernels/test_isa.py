"""Tiers: the best one for what the CPU reports, and the forced one."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.kernels.conftest import AVX2, AVX512, reported

from opsmith.kernels import isa, libraries


@pytest.mark.parametrize(
    ("features", "tier"),
    [
        ((), "portable"),
        (("avx2",), "portable"),  # without FMA the code of the tier would not run
        (AVX2, "avx2"),
        ((*AVX2, "avx512_f"), "avx2"),
        ((*AVX2, "avx_vnni"), "avx_vnni"),
        ((*AVX512, "avx_vnni"), "avx512"),  # which is above it, and which many have without it
        (AVX512, "avx512"),
        ((*AVX512, "avx512_bf16"), "avx512"),
        ((*AVX512, "avx512_bf16", "avx512_vnni"), "avx512_bf16"),
        (("avx512_bf16", "avx512_vnni"), "portable"),
    ],
)
def test_the_best_tier(monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], tier: str) -> None:
    reported(monkeypatch, *features)
    assert isa.tier() == tier


@pytest.mark.parametrize(
    ("features", "tier"), [("fp asimd", "portable"), ("fp asimd asimdrdm asimddp", "dotprod")]
)
def test_the_best_tier_of_an_arm_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str, tier: str
) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text(f"processor\t: 0\nFeatures\t: {features}\n")
    monkeypatch.setattr(isa, "_ON_ARM", True)
    monkeypatch.setattr(isa, "TIERS", isa._ARM)
    monkeypatch.setattr(isa, "Path", lambda _: listed)
    monkeypatch.delenv("OPSMITH_ISA", raising=False)
    assert isa.tier() == tier
    monkeypatch.setattr(isa, "Path", lambda _: tmp_path / "nothing")  # not Linux
    assert isa.tier() == "portable"


def test_a_forced_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    reported(monkeypatch, *AVX2)
    monkeypatch.setenv("OPSMITH_ISA", "portable")
    assert isa.tier() == "portable"
    monkeypatch.setenv("OPSMITH_ISA", "avx512")
    with pytest.raises(
        ValueError, match="'avx512' is not supported by this CPU: expected one of portable, avx2"
    ):
        isa.tier()
    monkeypatch.setenv("OPSMITH_ISA", "AVX2")
    with pytest.raises(ValueError, match="'AVX2' is no tier: expected one of portable, avx2"):
        libraries.status()


def test_features_where_torch_only_knows_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"avx2": True, "avx512": True, "avx512_bf16": False, "vnni": True}
    old = SimpleNamespace(
        **{f"_is_{name}_supported": lambda value=value: value for name, value in groups.items()}
    )
    monkeypatch.setattr("torch.cpu", old)
    monkeypatch.setitem(sys.modules, "torch.cpu", old)
    monkeypatch.delenv("OPSMITH_ISA", raising=False)
    assert isa.tier() == "avx512"
