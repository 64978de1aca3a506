"""A small project with a compiler that logs, to try the build on."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from opsmith.kernels import build, compiler, isa, libraries

# Logs every compiler run. A test makes it misbehave with files: a compiler that finds "slow" waits while
# "hold" is there, one that finds "full" runs into a full disk, one that finds "edit" replaces its source.
WRAPPER = """\
#!/bin/sh
here={here}
case "$*" in
--version) echo "$(cat $here/version)"; exit 0 ;;
*" -c "*) echo "$*" | sed 's/.* -c //; s/ -o.*//' >> $here/log ;;
*) echo link >> $here/log ;;
esac
if [ -e $here/slow ]; then touch $here/started; while [ -e $here/hold ]; do sleep 0.05; done; fi
if [ -e $here/full ]; then cat $here/version > /dev/full || exit 1; fi
if [ -e $here/edit ]; then g++ "$@" && mv $here/edit $here/src/cpu/one.cpp; exit $?; fi
exec g++ "$@"
"""


@dataclass
class Project:
    """Two small sources that share a header, a compiler that logs, and a cache of their own."""

    home: Path

    @property
    def sources(self) -> list[Path]:
        return sorted((self.home / "src/cpu").glob("*.cpp"))

    def write(self, name: str, text: str) -> None:
        (self.home / "src/cpu" / name).write_text(text)

    def flag(self, name: str, text: str = "") -> Path:
        path = self.home / name
        path.write_text(text)
        return path

    def build(self, *, force: bool = False, watch: compiler.Watch | None = None, **options: Any) -> Path:
        options = {"include_dirs": [self.home / "src/cpu"], "tier": "portable", **options}
        library = build.Library("fake", self.sources, **options)
        return build.build_libraries([library], force=force, watch=watch)[0]

    def compiled(self) -> list[str]:
        """What the compiler was run on since the last call: names of sources, and ``link``."""
        log = self.home / "log"
        names = sorted(Path(line).name for line in log.read_text().splitlines()) if log.exists() else []
        log.unlink(missing_ok=True)
        return [name for name in names if name != "tier.cpp"]  # which asks what the compiler knows

    def hold_compilers(self) -> Path:
        """Compilers that start now go on when the file is removed."""
        self.flag("slow")
        return self.flag("hold")

    def start(self) -> "subprocess.Popen[str]":
        """The same build in another process."""
        # Ctrl-C arrives also where the tests were started in the background, where shells have it ignored.
        code = (
            "import signal, sys; from pathlib import Path; from opsmith.kernels import build;"
            "signal.signal(signal.SIGINT, signal.default_int_handler);"
            "home = Path(sys.argv[1]) / 'src/cpu'; sources = sorted(home.glob('*.cpp'));"
            "print('ready', flush=True);"
            "fake = build.Library('fake', sources, include_dirs=[home], tier='portable');"
            "print(*build.build_libraries([fake]))"
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


def at_once(holds: Callable[[], bool]) -> None:
    """Check the same in four threads, over and over."""
    held: list[bool] = []

    def work() -> None:
        held.extend(holds() for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert held == [True] * 200  # an exception ends its thread early


EXPORT = 'extern "C" __attribute__((visibility("default"))) '


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    (tmp_path / "src/cpu").mkdir(parents=True)
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
    for name in ("_loaded", "_refused"):
        monkeypatch.setattr(libraries, name, {})
    monkeypatch.setattr(libraries, "_tier", None)
    monkeypatch.setattr(libraries, "SOURCES", project.home)  # whose one family is src
    monkeypatch.setattr(libraries, "_offered", {"of_src": "src"})
    monkeypatch.setattr(libraries, "_bindings", {})
    monkeypatch.setattr(libraries, "_followers", [])  # it offers nothing
    monkeypatch.setattr(libraries, "_wanted_beside", [])
    for name in ("OPSMITH_ISA", "OPSMITH_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    return project


def no_compiler(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(project.home / "tmp"))


def reported(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(isa, "_listed", lambda *keys: set(names))
    monkeypatch.delenv("OPSMITH_ISA", raising=False)


AVX2 = ("avx2", "fma", "f16c")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
