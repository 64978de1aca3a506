"""Loading the kernels, their status, building ahead of time, cleaning up."""

import os
import threading
import warnings

import pytest
from tests.kernels.conftest import AVX2, Project, reported

from opsmith.kernels import build, cache, compiler, isa
from opsmith.kernels.build import BuildError


def test_load_builds_once_for_all_threads(fresh: Project) -> None:
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(build.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8
    assert fresh.compiled() == ["link", "one.cpp", "two.cpp"]
    found = build.status()
    assert found.loaded
    assert found.built
    assert found.library is not None
    assert found.reason is None
    assert found.tier == isa.tier()
    assert not found.forced
    assert found.bytes > 0
    assert found.compiler is not None
    assert "logging g++ 1.0" in found.compiler


def test_load_turned_off(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not build.load()
    assert fresh.compiled() == []
    assert "OPSMITH_NATIVE=0" in (build.status().reason or "")


def test_load_warns_once_when_kernels_do_not_compile(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.write("two.cpp", "broken")
    monkeypatch.setenv("OPSMITH_NATIVE", "1")
    with pytest.raises(BuildError, match=r"two\.cpp:1"):
        build.load()
    monkeypatch.delenv("OPSMITH_NATIVE")
    with pytest.warns(RuntimeWarning, match=r"two\.cpp:1: .*") as caught:
        assert [build.load(), build.load()] == [False, False]
    assert len(caught) == 1
    found = build.status()
    assert not found.loaded
    assert "two.cpp:1" in (found.reason or "")


def test_load_takes_the_best_tier_that_the_compiler_knows(
    fresh: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported(monkeypatch, *AVX2)
    monkeypatch.setitem(isa.FLAGS, "avx2", ("-mno-such-instructions",))
    assert build.load()
    assert build.status().tier == "portable"


def test_load_builds_again_what_does_not_open(fresh: Project) -> None:
    (library,) = build.build()
    store = cache.configured()
    junk = store.folder("building") / "junk"
    junk.write_bytes(b"intact, but no library")
    store.seal(junk, library, {}, 0o700)
    fresh.compiled()
    assert build.load()
    assert fresh.compiled() == ["link", "one.cpp", "two.cpp"]


def test_build_ahead_of_time_and_clean(fresh: Project) -> None:
    before = build.status()
    assert not before.built
    assert not before.loaded
    assert before.library is None
    paths = build.build(["portable", "avx512"])  # any CPU can build for another one
    assert ["portable" in paths[0].name, "avx512" in paths[1].name] == [True, True]
    assert build.clean() > sum(len(p.name) for p in paths)
    assert not any(path.exists() for path in paths)
    with pytest.raises(ValueError, match="is no tier"):
        build.build(["neon"])


def test_the_kernels_of_this_machine() -> None:
    """The one test of the real library: built, or found, and loaded."""
    if compiler.find_compiler() is None or os.environ.get("OPSMITH_NATIVE") == "0":
        pytest.skip("native kernels need a C++ compiler")
    import torch

    assert build.load()
    found = build.status()
    assert found.loaded
    assert found.library is not None
    assert os.path.realpath(found.library) in torch.ops.loaded_libraries
