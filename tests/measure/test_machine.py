"""The machine: read from the system, with an answer where the system has none."""

import dataclasses
import json
from pathlib import Path

import torch

from opsmith.measure import Cache, describe
from opsmith.measure.machine import _caches, _parse_cpuinfo


def test_this_machine_is_described_and_fits_in_json() -> None:
    machine = describe()
    back = json.loads(json.dumps(machine.to_json()))
    assert back["cpu"]
    assert back["threads"] == torch.get_num_threads()
    assert back["torch"] == torch.__version__
    assert back["memory_bytes"] > 0
    assert back["fingerprint"] == machine.fingerprint()


def test_the_fingerprint_follows_what_tuning_depends_on_and_nothing_else() -> None:
    machine = describe()
    same = dataclasses.replace(machine, commit="another", memory_bytes=1, system="another")
    assert same.fingerprint() == machine.fingerprint()
    for change in (
        {"cpu": "another"},
        {"isa": ("another",)},
        {"threads": machine.threads + 1},
        {"torch": "0"},
        {"gpu": "another"},
    ):
        assert dataclasses.replace(machine, **change).fingerprint() != machine.fingerprint(), change  # type: ignore[arg-type]


def test_caches_are_read_without_those_for_instructions(tmp_path: Path) -> None:
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("3", "Unified", "32M")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in {"level": level, "type": kind, "size": size}.items():
            (folder / name).write_text(text + "\n")
    assert _caches(tmp_path) == (Cache(1, 48 << 10), Cache(3, 32 << 20))


def test_a_system_that_hides_its_caches_has_a_large_one(tmp_path: Path) -> None:
    assert _caches(tmp_path / "missing") == ()
    assert dataclasses.replace(describe(), caches=()).last_level_cache == 64 << 20


def test_cpuinfo_of_two_architectures() -> None:
    x86 = "processor : 0\nmodel name : Some CPU\ncpu family : 26\nmodel : 2\nflags : fpu avx2 fma avx512f\n"
    assert _parse_cpuinfo(x86) == ("Some CPU (family 26, model 2)", ("avx2", "avx512f", "fma"))
    name, isa = _parse_cpuinfo("processor : 0\nFeatures : fp asimd sve bf16\n")
    assert name
    assert isa == ("asimd", "bf16", "sve")
