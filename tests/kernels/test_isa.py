"""Tiers: the best one for what the CPU reports, and the forced one."""

from pathlib import Path

import pytest
from tests.kernels.conftest import AVX2, AVX512, reported

from opsmith.kernels import isa, libraries


@pytest.mark.parametrize(
    ("features", "tier"),
    [
        ((), "portable"),
        (("avx2",), "portable"),  # without FMA the code of the tier would not run
        (AVX2, "avx2"),
        ((*AVX2, "avx512f"), "avx2"),
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
    monkeypatch.setattr(isa, "TIERS", isa._ARM)
    monkeypatch.setattr(isa, "_LISTED", listed)
    monkeypatch.delenv("OPSMITH_ISA", raising=False)
    assert isa.tier() == tier
    monkeypatch.setattr(isa, "_LISTED", tmp_path / "nothing")  # not Linux
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


def test_features_are_what_the_kernel_lists_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        f"processor\t: 0\nvendor_id\t: GenuineIntel\nvmx flags\t: ept\nflags\t\t: {' '.join(AVX512)}\nflags\t\t: fpu\n"
    )
    monkeypatch.setattr(isa, "_LISTED", listed)
    monkeypatch.delenv("OPSMITH_ISA", raising=False)
    assert isa.tier() == "avx512"
    assert isa.is_intels()
    monkeypatch.setattr(isa, "_LISTED", tmp_path / "nothing")
    assert not isa.is_intels()
