"""Which stored files are used, and what happens when they cannot be stored or built."""

import errno
import os
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
from tests.kernels.conftest import Project, call, no_compiler

from opsmith.kernels import build, cache
from opsmith.kernels.build import BuildError


@pytest.mark.parametrize(
    "damage", ["truncated", "changed", "empty", "no manifest", "bad manifest", "old manifest"]
)
def test_a_damaged_library_is_built_again(project: Project, damage: str) -> None:
    library = project.build()
    manifest = library.with_name(library.name + ".json")
    content = library.read_bytes()
    other = content[:-1] + bytes([content[-1] ^ 1])
    {
        "truncated": lambda: library.write_bytes(content[:1000]),
        "changed": lambda: library.write_bytes(other),
        "empty": lambda: library.write_bytes(b""),
        "no manifest": manifest.unlink,
        "bad manifest": lambda: manifest.write_text("{"),
        "old manifest": lambda: manifest.write_text('{"sha256": "0"}'),
    }[damage]()
    project.compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert project.build() == library
    assert library.read_bytes() == content
    assert project.compiled() == ["link"]  # the objects were sound


def test_a_damaged_object_is_compiled_again(project: Project) -> None:
    library = project.build()
    library.unlink()
    for path in cache.configured().folder("objects").glob("*.o"):
        path.write_bytes(b"junk")
    project.compiled()
    assert call(project.build(), "one") == 41
    assert project.compiled() == ["link", "one.cpp", "two.cpp"]


def test_files_are_the_users_alone(project: Project) -> None:
    old = os.umask(0)
    try:
        project.build()
    finally:
        os.umask(old)
    store = cache.configured()
    assert not [p for p in [store.path.parent, *store.path.parent.rglob("*")] if p.stat().st_mode & 0o077]


def test_a_library_that_others_can_write_is_refused(project: Project) -> None:
    library = project.build()
    library.chmod(0o770)
    project.compiled()
    assert project.build() == library
    assert library.stat().st_mode & 0o777 == 0o700
    assert project.compiled() == ["link"]


def test_a_folder_that_others_can_write_is_refused(project: Project) -> None:
    library = project.build()
    library.parent.chmod(0o770)
    with pytest.warns(RuntimeWarning, match="can be written by other users; run: chmod go-w") as caught:
        other = project.build()
    assert len(caught) == 1
    assert other.is_relative_to(project.home / "tmp")
    assert call(other, "one") == 41


def test_files_of_another_user_are_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    library = project.build()
    if os.getuid() == 0:
        os.chown(library.parent, 12345, 12345)
    else:
        owner = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert cache.configured().manifest(library) is None
    assert "belongs to another user" in (cache.configured().distrust() or "")


def test_a_planted_link_is_refused(project: Project) -> None:
    library = project.build()
    copy = project.home / "elsewhere.so"
    os.replace(library, copy)
    library.symlink_to(copy)
    assert cache.configured().manifest(library) is None
    assert project.build() == library
    assert not library.is_symlink()


def test_a_library_of_newer_torch_headers_is_built_again(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write(
        "binding.cpp", '#include <torch/csrc/stable/tensor.h>\nextern "C" int bound() { return 3; }\n'
    )
    library = project.build()
    project.compiled()
    monkeypatch.setattr(build, "_torch_version", lambda: (9, 0))
    assert project.build() == library
    assert project.compiled() == []
    monkeypatch.setattr(build, "_torch_version", lambda: (2, 0))
    assert project.build() == library
    assert project.compiled() == ["binding.cpp", "link"]


def test_old_files_go(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_KEEP", {"libraries": 1, "objects": 2})
    first = project.build()
    os.utime(first, (1, 1))
    for path in cache.configured().folder("objects").glob("*.o"):
        os.utime(path, (1, 1))
    second = project.build(flags=["-DX"])
    names = [path.name for path in second.parent.iterdir()]
    assert sorted(names) == [second.name, second.name + ".json"]
    assert len(list(cache.configured().folder("objects").iterdir())) == 4
    project.compiled()
    assert project.build(flags=["-DX"]) == second
    assert project.compiled() == []


def test_what_is_used_outlives_what_is_newer(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_KEEP", {"libraries": 2, "objects": 100})
    first, second = project.build(), project.build(flags=["-DX"])
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    assert project.build() == first
    third = project.build(flags=["-DY"])
    assert {path for path in first.parent.iterdir() if path.suffix == ".so"} == {first, third}


# Folders, disks and compilers that are not there


def test_a_cache_that_cannot_be_written(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_CACHE", str(project.flag("file") / "cache"))  # below a file: also root cannot
    with pytest.warns(RuntimeWarning, match="cannot keep kernels in the cache folder") as caught:
        library = project.build()
    assert len(caught) == 1
    assert library.is_relative_to(project.home / "tmp" / f"opsmith-{os.getuid()}")
    assert call(library, "one") == 41
    project.compiled()
    assert project.build() == library  # found there, with no more warnings
    assert project.compiled() == []
    monkeypatch.setenv("OPSMITH_CACHE", str(project.home / "cache"))
    assert project.build() != library  # a cache that can be written is not passed over for what lies there


def test_a_read_only_cache_is_still_read(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    library = project.build()
    # Root writes to read-only folders, so the error of a read-only file system is made here.
    real = os.open

    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(project.home / "cache")):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", open_)
    assert project.build() == library
    with pytest.warns(RuntimeWarning, match="Read-only file system"):
        other = project.build(flags=["-DX"])
    assert other.is_relative_to(project.home / "tmp")


def test_a_planted_temporary_folder_is_refused(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_CACHE", str(project.flag("file") / "cache"))
    planted = project.home / "tmp" / f"opsmith-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(BuildError, match=r"no folder to build kernels in: .*can be written by other users"):
        project.build()


def test_a_disk_that_fills_while_compiling(project: Project) -> None:
    flag = project.flag("full")
    with pytest.raises(BuildError, match=r"the disk is full.*OPSMITH_CACHE"):
        project.build()
    flag.unlink()
    assert call(project.build(), "one") == 41


def test_a_disk_that_fills_while_storing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(BuildError, match="the disk is full"):
            project.build()
    store = cache.configured()
    assert not [*store.folder("libraries").iterdir(), *store.folder("building").iterdir()]
    assert call(project.build(), "one") == 41


def test_a_built_library_needs_no_compiler(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    library = project.build()
    no_compiler(project, monkeypatch)
    assert project.build() == library
    with pytest.raises(
        BuildError, match=r"no C\+\+ compiler .* is on PATH. Install one \(Debian, Ubuntu: apt-get"
    ):
        project.build(flags=["-DX"])
    library.write_bytes(b"junk")
    with pytest.raises(BuildError, match="apt-get"):
        project.build()


def test_no_compiler_in_a_process_of_its_own(project: Project) -> None:
    code = """
        import torch
        import opsmith.ops
        from opsmith.kernels import libraries
        print(libraries.load(), libraries.load("gelu"), libraries.status().compiler)
        print(torch.nn.functional.layer_norm(torch.ones(2, 8), (8,)).sum().item())
    """
    (project.home / "bin").mkdir()
    environment = {**os.environ, "PATH": str(project.home / "bin")}
    del environment["CXX"]
    environment.pop("OPSMITH_NATIVE", None)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "None", "0.0"]
    assert len(re.findall("RuntimeWarning", done.stderr)) == 1
    assert "apt-get install g++" in done.stderr


def test_a_wrong_cxx_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(BuildError, match="CXX=/nowhere/g\\+\\+ does not run"):
        project.build()
