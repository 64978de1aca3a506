"""Loading the kernels, their status, building ahead of time, cleaning up."""

import os
import threading
import warnings

import pytest
from tests.kernels.conftest import AVX2, Project, reported

from opsmith.kernels import cache, compiler, isa, libraries
from opsmith.kernels.build import BuildError


def test_load_builds_once_for_all_threads(fresh: Project) -> None:
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(libraries.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8
    assert fresh.compiled() == ["link", "one.cpp", "two.cpp"]
    found = libraries.status()
    assert found.loaded == ("src",)
    assert found.libraries["src"] is not None
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
        assert not libraries.load()
    assert fresh.compiled() == []
    assert "OPSMITH_NATIVE=0" in (libraries.status().reason or "")


def test_load_warns_once_when_kernels_do_not_compile(fresh: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh.write("two.cpp", "broken")
    monkeypatch.setenv("OPSMITH_NATIVE", "1")
    with pytest.raises(BuildError, match=r"two\.cpp:1"):
        libraries.load()
    monkeypatch.delenv("OPSMITH_NATIVE")
    with pytest.warns(RuntimeWarning, match=r"two\.cpp:1: .*") as caught:
        assert [libraries.load(), libraries.load()] == [False, False]
    assert len(caught) == 1
    found = libraries.status()
    assert not found.loaded
    assert "two.cpp:1" in (found.reason or "")


def test_load_takes_the_best_tier_that_the_compiler_knows(
    fresh: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported(monkeypatch, *AVX2)
    monkeypatch.setitem(isa.FLAGS, "avx2", ("-mno-such-instructions",))
    assert libraries.load()
    assert libraries.status().tier == "portable"


def test_load_builds_again_what_does_not_open(fresh: Project) -> None:
    (library,) = libraries.build()
    store = cache.configured()
    junk = store.folder("building") / "junk"
    junk.write_bytes(b"intact, but no library")
    store.seal(junk, library, {}, 0o700)
    fresh.compiled()
    assert libraries.load()
    assert fresh.compiled() == ["link", "one.cpp", "two.cpp"]


def test_build_ahead_of_time_and_clean(fresh: Project) -> None:
    before = libraries.status()
    assert before.libraries == {"src": None}
    assert not before.loaded
    paths = libraries.build(["portable", "avx512"])  # any CPU can build for another one
    assert ["portable" in paths[0].name, "avx512" in paths[1].name] == [True, True]
    assert libraries.clean() > sum(len(p.name) for p in paths)
    assert not any(path.exists() for path in paths)
    with pytest.raises(ValueError, match="is no tier"):
        libraries.build(["neon"])


def test_the_kernels_of_this_machine() -> None:
    """The one test of the real libraries: built, or found, and loaded."""
    if compiler.find_compiler() is None or os.environ.get("OPSMITH_NATIVE") == "0":
        pytest.skip("native kernels need a C++ compiler")
    import torch

    assert libraries.load()
    found = libraries.status()
    assert set(found.loaded) == set(found.libraries) == set(libraries.kernels().values())
    for path in found.libraries.values():
        assert path is not None
        assert os.path.realpath(path) in torch.ops.loaded_libraries
