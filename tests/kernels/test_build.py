"""What is compiled when, with whom, and what is said when it fails."""

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.kernels.conftest import EXPORT, Project, call

from opsmith.kernels import build, cache, compiler
from opsmith.kernels.build import BuildError


def test_a_library_is_built_once(project: Project) -> None:
    first = project.build()
    assert (call(first, "one"), call(first, "two")) == (41, 2)
    assert project.compiled() == ["link", "one.cpp", "two.cpp"]
    assert project.build() == first
    assert project.compiled() == []


def test_an_edit_compiles_that_source_only(project: Project) -> None:
    first = project.build()
    project.compiled()
    before = project.sources[1].read_text()
    project.write("two.cpp", before.replace("2", "3"))
    second = project.build()
    assert second != first
    assert call(second, "two") == 3
    assert project.compiled() == ["link", "two.cpp"]
    project.write("two.cpp", before)
    assert project.build() == first  # content, not history
    assert project.compiled() == []


def test_an_edited_header_compiles_the_sources_that_include_it(project: Project) -> None:
    project.build()
    project.compiled()
    project.write("shared.h", "#pragma once\n#define SHARED 50\n")
    assert call(project.build(), "one") == 51
    assert project.compiled() == ["link", "one.cpp"]


def test_a_header_of_a_header_counts(project: Project) -> None:
    project.write("deep.h", "#define DEEP 1\n")
    project.write("shared.h", '#pragma once\n  #  include "deep.h"\n#define SHARED DEEP\n')
    assert call(project.build(), "one") == 2
    project.write("deep.h", "#define DEEP 5\n")
    assert call(project.build(), "one") == 6


def test_touching_compiles_nothing(project: Project) -> None:
    first = project.build()
    project.compiled()
    for path in (project.home / "src/cpu").iterdir():
        os.utime(path, (1, 1))
    assert project.build() == first
    assert project.compiled() == []


def test_names_that_a_shell_would_take_apart(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = project.home / "a $(b) 'c: d"
    folder.mkdir()
    text = f'#include "shared.h"\n{EXPORT}int three() {{ return SHARED; }}\n'
    (folder / "three & four.cpp").write_text(text)
    monkeypatch.chdir(project.home)
    sources = [path.relative_to(project.home) for path in folder.iterdir()]
    library = build.Library("my lib", sources, include_dirs=[Path("src/cpu")], tier="portable")
    (built,) = build.build_libraries([library])
    assert call(built, "three") == 40


def test_flags_tier_and_compiler_version_count(project: Project) -> None:
    paths = {project.build(), project.build(flags=["-DX=1"]), project.build(tier="avx2")}
    project.flag("version", "logging g++ 2.0")
    compiler.first_that_runs.cache_clear()
    paths.add(project.build())
    assert len(paths) == 4
    assert project.compiled() == sorted(["link", "one.cpp", "two.cpp"] * 4)


def test_what_a_wheel_brought_serves_whichever_compiler_built_it(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = project.build()
    project.compiled()
    wheels = cache.Store(project.home / "built")
    wheels.path.mkdir()
    cache.configured().folder("libraries").rename(wheels.folder("libraries"))
    monkeypatch.setattr(cache, "shipped", lambda: wheels)
    project.flag("version", "logging g++ 2.0")
    compiler.first_that_runs.cache_clear()
    brought = wheels.folder("libraries") / built.name
    assert project.build() == brought
    assert call(brought, "one") == 41
    assert project.compiled() == []
    project.write("two.cpp", f"{EXPORT}int two() {{ return 3; }}\n")
    assert call(project.build(), "two") == 3  # which no wheel has
    brought.write_bytes(b"damaged")
    project.write("two.cpp", f"#include <vector>\n{EXPORT}int two() {{ return 2; }}\n")
    assert call(project.build(), "two") == 2


def test_force_compiles_all(project: Project) -> None:
    first = project.build()
    project.compiled()
    assert project.build(force=True) == first
    assert project.compiled() == ["link", "one.cpp", "two.cpp"]


def test_an_edit_during_the_build_is_not_lost(project: Project) -> None:
    project.write("two.cpp", "")  # so that the compiler run that edits one.cpp is the run that reads it
    old = project.sources[0].read_text()
    project.sources[1].unlink()
    project.flag("edit", old.replace("+ 1", "+ 2"))
    assert call(project.build(), "one") == 42
    project.write("one.cpp", old)
    assert call(project.build(), "one") == 41  # nothing was kept under the key of the text before the edit


# Others at work, and builds that end badly


def test_two_processes_build_once(project: Project) -> None:
    hold = project.hold_compilers()
    running = [project.start(), project.start()]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    wait_for(project.home / "started")
    time.sleep(0.2)  # one compiles by now, the other most likely waits for it
    hold.unlink()
    outputs = [process.communicate(timeout=600) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert project.compiled() == ["link", "one.cpp", "two.cpp"]


def test_a_killed_build_leaves_nothing(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = project.hold_compilers()
    monkeypatch.setenv("MAX_JOBS", "1")  # one compiler, held, so that none starts later and counts
    victim = project.start()
    try:
        wait_for(project.home / "started")
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        building = project.home / "cache/kernels/building"
        assert list(building.iterdir())
        assert not list((project.home / "cache/kernels/libraries").iterdir())
        (project.home / "slow").unlink()
        library = project.build()  # while a compiler of the killed build is still at work
        assert (call(library, "one"), call(library, "two")) == (41, 2)
        assert project.compiled() == sorted(["one.cpp", "link", "one.cpp", "two.cpp"])
        assert not list(building.iterdir())
    finally:
        hold.unlink()
        os.killpg(victim.pid, signal.SIGKILL)
        victim.communicate()


def test_leftovers_of_other_builds_go_but_live_ones_stay(project: Project) -> None:
    project.build()
    store = cache.configured()
    for name in ("dead.1", "live.1"):
        store.folder("building").joinpath(name).mkdir()
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lock("live"):
            entered.set()
            leave.wait(600)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(600)
    try:
        project.build(flags=["-DX"])
        assert [path.name for path in store.folder("building").iterdir()] == ["live.1"]
    finally:
        leave.set()
        holder.join()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 600
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


# Messages


def test_a_compile_error_names_file_and_line(project: Project) -> None:
    project.write("two.cpp", f"\n\n{EXPORT}int two() {{ return undeclared; }}\n")
    with pytest.raises(BuildError) as caught:
        project.build()
    message = str(caught.value)
    assert f"{project.home}/src/cpu/two.cpp:3: 'undeclared' was not declared" in message
    assert "return undeclared;" in message
    assert "ninja" not in message
    assert "FAILED" in caught.value.output
    project.compiled()
    project.write("two.cpp", f"{EXPORT}int two() {{ return 2; }}\n")
    assert call(project.build(), "two") == 2


def test_an_error_in_a_header_names_the_header(project: Project) -> None:
    project.write("shared.h", "#pragma once\n#define SHARED 1\nint broken(\n")
    with pytest.raises(BuildError, match=r"src/cpu/shared\.h:3: |src/cpu/one\.cpp:2: "):
        project.build()


def test_a_missing_definition_is_named(project: Project) -> None:
    project.write("two.cpp", f"int absent();\n{EXPORT}int two() {{ return absent(); }}\n")
    with pytest.raises(BuildError, match=r"linking failed: .*undefined reference to `absent\(\)'"):
        project.build()


def test_unknown_tier_and_equal_names(project: Project) -> None:
    with pytest.raises(ValueError, match="'sse9' is no tier: expected one of portable, avx2"):
        project.build(tier="sse9")
    with pytest.raises(ValueError, match="different names"):
        build.build_libraries([build.Library("fake", [project.sources[0]] * 2, tier="portable")])


def test_progress_is_for_terminals(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = io.StringIO()
    monkeypatch.setattr(sys, "stderr", silent)
    project.build()
    assert silent.getvalue() == ""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    project.build(force=True)
    assert "building fake kernels (portable)" in shown.getvalue()
    assert "3/3" in shown.getvalue()


def test_units_share_headers_where_there_are_many(tmp_path: Path) -> None:
    def units(count: int, flags: tuple[str, ...] = ("-O2",), binds: bool = True) -> list[compiler.Unit]:
        return [
            compiler.Unit(tmp_path / f"{binds}_{len(flags)}_{i}.cpp", (), flags, binds=binds)
            for i in range(count)
        ]

    gcc, clang = (
        compiler.Compiler(("c++",), v) for v in ("g++ (Debian) 12.2.0", "Debian clang version 14.0.6")
    )
    bindings, kernels = units(6), units(7, binds=False)
    by_another = compiler.Unit(tmp_path / "gpu.cu", (), (), compiler=gcc)

    def shared(*given: compiler.Unit, by: compiler.Compiler = gcc) -> list[list[compiler.Unit]]:
        return [sharing for _, _, sharing in compiler._sharing(by, given)]

    assert shared(*kernels[:2], *bindings, by_another) == [bindings]
    assert shared(*kernels, *bindings, by_another) == [bindings, kernels]
    assert shared(*kernels, *bindings, by=clang) == []
    assert shared(*kernels[:5], *units(5)) == []
    watched = units(6, ("-O2", "-g1"))
    assert shared(*bindings, *watched) == [bindings, watched]  # a header serves those of its own flags
    assert shared(*bindings[:5], *watched[:5]) == []
