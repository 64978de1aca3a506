"""`make sanitize`: a planted fault of each kind is reported, so that a clean run means something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsmith.kernels import build, compiler

SANITIZE = Path(__file__).parents[2] / ".ci" / "sanitize"
COMPILER = compiler.find_compiler()
HEAD = "#include <cstdlib>\n#include <thread>\n" + 'extern "C" __attribute__((visibility("default"))) int '
FAULTS = {
    "clean": ("address,undefined", "run(int n) { return n + 1; }", ""),
    "bounds": (
        "address,undefined",
        "run(int n) { int* p = (int*)malloc(4 * n); p[0] = 0; int r = p[n]; free(p); return r; }",
        "heap-buffer-overflow",
    ),
    "lifetime": (
        "address,undefined",
        "run(int n) { int* p = (int*)malloc(4 * n); p[0] = 0; free(p); return p[0]; }",
        "heap-use-after-free",
    ),
    "overflow": (
        "address,undefined",
        "run(int n) { int most = 2147483647; return most + n; }",
        "signed integer overflow",
    ),
    "race": (
        "thread",
        "run(int n) { int r = 0; auto f = [&] { for (int i = 0; i < n; ++i) ++r; };"
        " std::thread a(f), b(f); a.join(); b.join(); return r; }",
        "data race",
    ),
    "no race": (
        "thread",
        "run(int n) { int r = 0; auto f = [&] { for (int i = 0; i < n; ++i) ++r; };"
        " std::thread a(f); a.join(); std::thread b(f); b.join(); return r; }",
        "",
    ),
}


def runtimes_here() -> bool:
    """Whether the compiler has its sanitizers installed: then it knows where, else it echoes the name."""
    if COMPILER is None or "clang" in COMPILER.version:
        return False
    names = ("libasan.so", "libubsan.so", "libtsan.so")
    found = [
        subprocess.run([*COMPILER.command, f"-print-file-name={n}"], capture_output=True, text=True).stdout
        for n in names
    ]
    return all("/" in path for path in found)


@pytest.mark.skipif(not runtimes_here(), reason="the compiler has no sanitizers here")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sanitizers, body, report = FAULTS[fault]
    source = tmp_path / "planted.cpp"
    source.write_text(HEAD + body)
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPSMITH_SANITIZE", sanitizers)
    planted = build.Library("planted", [source], flags=["-pthread"], tier="portable")
    (library,) = build.build_libraries([planted])
    call = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).run(1000))"
    command = [str(SANITIZE), sanitizers, sys.executable, "-c", call, str(library)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, "OPSMITH_NATIVE": "0"}
    )
    assert (done.returncode == 0) == (not report), done.stderr
    assert report in done.stderr


def test_a_sanitizer_gives_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "one.cpp"
    source.write_text(HEAD + "run(int n) { return n; }")
    library = build.Library("one", [source], tier="portable")
    before = build.content(library)
    monkeypatch.setenv("OPSMITH_SANITIZE", "undefined")
    assert build.content(library) != before


def test_an_unknown_sanitizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPSMITH_SANITIZE", "adress,undefined")
    with pytest.raises(ValueError, match=r"OPSMITH_SANITIZE='adress,undefined': adress is no sanitizer"):
        compiler.sanitizer_flags()
