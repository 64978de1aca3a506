"""What a measurement was taken on: processor, caches, threads, versions, commit."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Assumed where the system tells nothing: larger than most, so that a pool sized by it is rather too cold.
_FALLBACK_LAST_LEVEL = 64 << 20


@dataclass(frozen=True)
class Cache:
    """One level of the data caches, and its size."""

    level: int
    bytes: int


@dataclass(frozen=True)
class Machine:
    """The machine as a measurement sees it; everything needed to say where a number comes from.

    >>> describe().threads >= 1
    True
    """

    cpu: str
    cores: int
    threads: int
    isa: tuple[str, ...]
    caches: tuple[Cache, ...]
    memory_bytes: int
    system: str
    python: str
    torch: str
    capability: str
    gpu: str | None
    gpu_cache_bytes: int
    commit: str | None

    @property
    def last_level_cache(self) -> int:
        """Bytes of the last-level cache that one CPU sees, or a generous guess where the system is silent."""
        return max((cache.bytes for cache in self.caches), default=_FALLBACK_LAST_LEVEL)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, with the fingerprint."""
        return {**asdict(self), "last_level_cache": self.last_level_cache, "fingerprint": self.fingerprint()}

    def fingerprint(self) -> str:
        """Sixteen hex digits that change when tuning results stop being valid: CPU, ISA, threads, torch."""
        key = [self.cpu, sorted(self.isa), self.threads, self.torch, self.gpu]
        return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def describe() -> Machine:
    """Describes this machine, with the number of threads that torch uses now.

    >>> machine = describe()
    >>> machine.last_level_cache > 0
    True
    """
    cpu, flags = _cpuinfo()
    gpu, gpu_cache = _gpu()
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        isa=flags,
        caches=_caches(),
        memory_bytes=_memory(),
        system=platform.platform(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        capability=torch.backends.cpu.get_cpu_capability(),
        gpu=gpu,
        gpu_cache_bytes=gpu_cache,
        commit=_commit(),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


# What decides which kernel runs; the rest of the flags would only make the record long.
_RELEVANT = re.compile(r"sse4|ssse3|avx|fma|f16c|bf16|vnni|amx|asimd|sve|neon|i8mm|fphp|dotprod")


@functools.lru_cache(maxsize=1)
def _cpuinfo() -> tuple[str, tuple[str, ...]]:
    return _parse_cpuinfo(_read(Path("/proc/cpuinfo")))


def _parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip().lower(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine() or "unknown"
    # Some hypervisors hide the name; family and model still tell two generations apart.
    if family := fields.get("cpu family"):
        name = f"{name} (family {family}, model {fields.get('model', '?')})"
    flags = (fields.get("flags") or fields.get("features") or "").split()
    return name, tuple(sorted(flag for flag in flags if _RELEVANT.search(flag)))


@functools.lru_cache(maxsize=1)
def _caches(cpu: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> tuple[Cache, ...]:
    found = []
    for index in sorted(cpu.glob("index*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size"))
        level = _read(index / "level")
        if size and level.isdigit() and _read(index / "type") != "Instruction":
            found.append(Cache(int(level), int(size[1]) * _UNITS[size[2]]))
    return tuple(sorted(found, key=lambda cache: cache.level))


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def _gpu() -> tuple[str | None, int]:
    if not torch.cuda.is_available():
        return None, 0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(properties.name), int(getattr(properties, "L2_cache_size", 0))


@functools.lru_cache(maxsize=1)
def _commit() -> str | None:
    """The commit of this project's checkout, ``-dirty`` where files differ from it; None when installed."""
    root = Path(__file__).resolve().parents[3]
    # An installed copy may lie inside somebody else's repository, whose commit says nothing about ours.
    if not (root / ".git").exists() or not (root / "src" / "opsmith").is_dir():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
