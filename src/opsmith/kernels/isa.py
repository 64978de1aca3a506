"""Instruction-set tiers: which ones there are, what compiles each, and which one this CPU gets."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")

# Weakest first; every tier compiles the same sources. On 64-bit ARM the portable one is NEON's, which all of them have.
FLAGS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _AVX2,
    "avx_vnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    "dotprod": ("-march=armv8.2-a+dotprod",),
}
_ARM = ("portable", "dotprod")
_ON_ARM = platform.machine() in ("aarch64", "arm64")
# Of this machine.
TIERS: tuple[str, ...] = _ARM if _ON_ARM else tuple(tier for tier in FLAGS if tier not in _ARM[1:])

# One that the tier below lacks: assemblers may be older than their compilers.
INSTRUCTIONS: dict[str, str] = {
    "portable": "",
    "avx2": "vfmadd231ps %ymm0, %ymm0, %ymm0",
    "avx_vnni": "{vex} vpdpbusd %ymm0, %ymm0, %ymm0",
    "avx512": "vpermw %zmm0, %zmm0, %zmm0",
    "avx512_bf16": "vdpbf16ps %zmm0, %zmm0, %zmm0",
    "dotprod": "sdot v0.4s, v0.16b, v0.16b",
}

_HAS_AVX2 = ("avx2", "fma", "f16c")
_HAS_AVX512 = (*_HAS_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")

# What the CPU must report. Nothing asks for AMX: many CPUs have AVX-512 without it.
_NEEDS: dict[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": _HAS_AVX2,
    "avx_vnni": (*_HAS_AVX2, "avx_vnni"),
    "avx512": _HAS_AVX512,
    "avx512_bf16": (*_HAS_AVX512, "avx512_bf16", "avx512_vnni"),
    "dotprod": ("asimddp",),
}
_LISTED = Path("/proc/cpuinfo")


def _listed(*names: str) -> set[str]:
    """What Linux lists of the first processor under one of these names."""
    with contextlib.suppress(OSError), _LISTED.open() as listed:
        for name, _, words in (line.partition(":") for line in listed):
            if name.strip() in names:
                return set(words.split())
    return set()


def is_intels() -> bool:
    """True for a processor of Intel's, whose libraries ask for that name."""
    return _listed("vendor_id") == {"GenuineIntel"}


def supported() -> tuple[str, ...]:
    """The tiers this CPU can run, weakest first.

    >>> supported()[0]
    'portable'
    """
    found = _listed("flags", "Features")  # what this CPU has, and Linux has switched on
    return tuple(name for name in TIERS if found.issuperset(_NEEDS[name]))


def tier() -> str:
    """The tier that kernels run in: the best this CPU supports, or the one that ``OPSMITH_ISA`` forces.

    Raises:
        ValueError: ``OPSMITH_ISA`` names a tier that does not exist or that this CPU cannot run.
    """
    allowed = supported()
    forced = os.environ.get("OPSMITH_ISA")
    if not forced:
        return allowed[-1]
    if forced in allowed:
        return forced
    problem = "is not supported by this CPU" if forced in TIERS else "is no tier"
    raise ValueError(f"OPSMITH_ISA={forced!r} {problem}: expected one of {', '.join(allowed)}, or unset it")
