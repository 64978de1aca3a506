"""The build: what is compiled when, what is loaded, and what happens when something is in the way."""

import ctypes
import errno
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from opsmith.kernels import build, cache, compiler, isa
from opsmith.kernels.build import BuildError

# Logs every compiler run; "slow", "full" and "edit" are files that a test creates to make it misbehave.
WRAPPER = """\
#!/bin/sh
here={here}
case "$*" in
--version) echo "$(cat $here/version)"; exit 0 ;;
*" -c "*) echo "$*" | sed 's/.* -c //; s/ -o.*//' >> $here/log ;;
*) echo link >> $here/log ;;
esac
if [ -e $here/slow ]; then echo $$ > $here/started; sleep 60; fi
if [ -e $here/full ]; then cat $here/version > /dev/full || exit 1; fi
if [ -e $here/edit ]; then g++ "$@" && mv $here/edit $here/src/one.cpp; exit $?; fi
exec g++ "$@"
"""


@dataclass
class Project:
    """Two small sources that share a header, a compiler that logs, and a cache of their own."""

    home: Path

    @property
    def sources(self) -> list[Path]:
        return sorted((self.home / "src").glob("*.cpp"))

    def write(self, name: str, text: str) -> None:
        (self.home / "src" / name).write_text(text)

    def flag(self, name: str, text: str = "") -> Path:
        path = self.home / name
        path.write_text(text)
        return path

    def build(self, **options: Any) -> Path:
        return build.build_library(
            "fake", self.sources, include_dirs=[self.home / "src"], **{"tier": "portable", **options}
        )

    def compiled(self) -> list[str]:
        """What the compiler was run on since the last call: names of sources, and ``link``."""
        log = self.home / "log"
        names = sorted(Path(line).name for line in log.read_text().splitlines()) if log.exists() else []
        log.unlink(missing_ok=True)
        return names

    def start(self) -> "subprocess.Popen[str]":
        """The same build in another process."""
        code = (
            "import sys; from pathlib import Path; from opsmith.kernels import build;"
            "home = Path(sys.argv[1]) / 'src'; sources = sorted(home.glob('*.cpp'));"
            "print(build.build_library('fake', sources, include_dirs=[home], tier='portable'))"
        )
        command = [sys.executable, "-c", code, str(self.home)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def call(library: Path, function: str) -> int:
    # dlopen answers by inode, and a rebuilt file may get that of the one before: load a copy.
    copy = library.with_name(f"{time.monotonic_ns()}.so")
    copy.write_bytes(library.read_bytes())
    try:
        return int(getattr(ctypes.CDLL(str(copy)), function)())
    finally:
        copy.unlink()


EXPORT = 'extern "C" __attribute__((visibility("default"))) '


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    (tmp_path / "src").mkdir()
    (tmp_path / "tmp").mkdir()
    found = Project(tmp_path)
    found.write("shared.h", "#pragma once\n#define SHARED 40\n")
    found.write("one.cpp", f'#include "shared.h"\n{EXPORT}int one() {{ return SHARED + 1; }}\n')
    found.write("two.cpp", f"#include <vector>\n{EXPORT}int two() {{ return 2; }}\n")
    found.flag("version", "logging g++ 1.0")
    wrapper = found.flag("cxx", WRAPPER.format(here=tmp_path))
    wrapper.chmod(0o700)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return found


@pytest.fixture
def fresh(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """``load`` as in a new process, with the small sources for kernels."""
    for name in ("_outcome", "_reason", "_loaded"):
        monkeypatch.setattr(build, name, None)
    monkeypatch.setattr(build, "SOURCES", project.home / "src")
    for name in ("OPSMITH_ISA", "OPSMITH_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    return project


def no_compiler(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(project.home / "tmp"))


# What is compiled when


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
    for path in (project.home / "src").iterdir():
        os.utime(path, (1, 1))
    assert project.build() == first
    assert project.compiled() == []


def test_flags_tier_and_compiler_version_count(project: Project) -> None:
    paths = {project.build(), project.build(flags=["-DX=1"]), project.build(tier="avx2")}
    project.flag("version", "logging g++ 2.0")
    compiler._find_compiler.cache_clear()
    paths.add(project.build())
    assert len(paths) == 4
    assert project.compiled() == sorted(["link", "one.cpp", "two.cpp"] * 4)


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
    project.flag("slow")
    running = [project.start(), project.start()]
    wait_for(project.home / "started")
    (project.home / "slow").unlink()
    # The sleep of the compilers that already started is cut short, so that the test is not.
    time.sleep(0.5)
    stop_sleepers(running)
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert project.compiled() == ["link", "one.cpp", "two.cpp"]


def test_a_killed_build_leaves_nothing(project: Project) -> None:
    project.flag("slow")
    victim = project.start()
    try:
        wait_for(project.home / "started")
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        (project.home / "slow").unlink()
        building = project.home / "cache/kernels/building"
        assert list(building.iterdir())
        assert not list((project.home / "cache/kernels/libraries").iterdir())
        project.compiled()
        library = project.build()  # while the compilers of the killed build still run
        assert (call(library, "one"), call(library, "two")) == (41, 2)
        assert project.compiled() == ["link", "one.cpp", "two.cpp"]
        assert not list(building.iterdir())
    finally:
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
            leave.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    entered.wait(60)
    try:
        project.build(flags=["-DX"])
        assert [path.name for path in store.folder("building").iterdir()] == ["live.1"]
    finally:
        leave.set()
        holder.join()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def stop_sleepers(processes: "list[subprocess.Popen[str]]") -> None:
    """End the ``sleep`` of every wrapper that these processes started; the wrappers then go on."""
    sessions = {process.pid for process in processes}
    for entry in Path("/proc").iterdir():
        try:
            name, fields = (entry / "stat").read_text().rsplit(")", 1)
            if name.endswith("(sleep") and int(fields.split()[3]) in sessions:
                os.kill(int(entry.name), signal.SIGTERM)
        except (OSError, ValueError):
            continue


# What is loaded


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
        from opsmith.kernels import build
        print(build.load(), build.load(), build.status().compiler)
        print(torch.nn.functional.layer_norm(torch.ones(2, 8), (8,)).sum().item())
    """
    (project.home / "bin").mkdir()
    environment = {**os.environ, "PATH": str(project.home / "bin")}
    del environment["CXX"]
    environment.pop("OPSMITH_NATIVE", None)
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "None", "0.0"]
    assert len(re.findall("RuntimeWarning", done.stderr)) == 1
    assert "apt-get install g++" in done.stderr


def test_a_wrong_cxx_is_named(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(BuildError, match="CXX=/nowhere/g\\+\\+ does not run"):
        project.build()


# Messages


def test_a_compile_error_names_file_and_line(project: Project) -> None:
    project.write("two.cpp", f"\n\n{EXPORT}int two() {{ return undeclared; }}\n")
    with pytest.raises(BuildError) as caught:
        project.build()
    message = str(caught.value)
    assert f"{project.home}/src/two.cpp:3: 'undeclared' was not declared" in message
    assert "return undeclared;" in message
    assert "ninja" not in message
    assert "FAILED" in caught.value.output
    project.compiled()
    project.write("two.cpp", f"{EXPORT}int two() {{ return 2; }}\n")
    assert call(project.build(), "two") == 2


def test_an_error_in_a_header_names_the_header(project: Project) -> None:
    project.write("shared.h", "#pragma once\n#define SHARED 1\nint broken(\n")
    with pytest.raises(BuildError, match=r"src/shared\.h:3: |src/one\.cpp:2: "):
        project.build()


def test_a_missing_definition_is_named(project: Project) -> None:
    project.write("two.cpp", f"int absent();\n{EXPORT}int two() {{ return absent(); }}\n")
    with pytest.raises(BuildError, match=r"linking failed: .*undefined reference to `absent\(\)'"):
        project.build()


def test_unknown_tier_and_equal_names(project: Project) -> None:
    with pytest.raises(ValueError, match="'sse9' is no tier: expected one of portable, avx2"):
        project.build(tier="sse9")
    with pytest.raises(ValueError, match="different names"):
        build.build_library("fake", [project.sources[0]] * 2, tier="portable")


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


# Tiers


def reported(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(isa, "_reported", lambda: set(names))
    monkeypatch.delenv("OPSMITH_ISA", raising=False)


AVX2 = ("avx2", "fma3", "f16c")
AVX512 = (*AVX2, "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")


@pytest.mark.parametrize(
    ("features", "tier"),
    [
        ((), "portable"),
        (("avx2",), "portable"),  # without FMA the code of the tier would not run
        (AVX2, "avx2"),
        ((*AVX2, "avx512_f"), "avx2"),
        (AVX512, "avx512"),
        ((*AVX512, "avx512_bf16"), "avx512"),
        ((*AVX512, "avx512_bf16", "avx512_vnni"), "avx512_bf16"),
        (("avx512_bf16", "avx512_vnni"), "portable"),
    ],
)
def test_the_best_tier(monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], tier: str) -> None:
    reported(monkeypatch, *features)
    assert isa.tier() == tier


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
        build.status()


def test_features_where_torch_only_knows_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {"avx2": True, "avx512": True, "avx512_bf16": False, "vnni": True}
    old = SimpleNamespace(
        **{f"_is_{name}_supported": lambda value=value: value for name, value in groups.items()}
    )
    monkeypatch.setattr("torch.cpu", old)
    monkeypatch.setitem(sys.modules, "torch.cpu", old)
    monkeypatch.delenv("OPSMITH_ISA", raising=False)
    assert isa.tier() == "avx512"


# load, status, clean


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
