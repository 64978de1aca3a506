"""Bad luck: processes killed at any moment, full disks, odd environments. What must hold stands beside each test.

`OPSMITH_LUCK=50` tries each kind of moment that often; by default a handful.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.cli import CommandError
from opsmith.cli.common import Output
from opsmith.cli.llm import gemma
from opsmith.compiler import Config, Plan
from opsmith.compiler.kept import Kept
from opsmith.compiler.plan import PlanStep, ShapePlan
from opsmith.kernels import build, cache, compiler
from opsmith.measure.pages import Read
from opsmith.profiler.result import Profile
from tests.kernels import conftest
from tests.kernels.conftest import Project, call

project = conftest.project  # a fixture
TRIES = int(os.environ.get("OPSMITH_LUCK", "0"))
FEW = range(TRIES or 2)  # of what takes seconds
MANY = range(TRIES or 8)
UNTIMED = Config(tune=False)


def forked(work: Callable[[], object]) -> int:
    """A process of its own that does this, as this process is; its exit status is 0 where nothing was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of threads that the child does not have
        child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def ended(child: int, seconds: float = 120) -> int:
    """How a process ended: its exit status, or minus the signal; one that hangs is killed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed(work: Callable[[], object], after: float) -> None:
    child = forked(work)
    time.sleep(after)
    os.kill(child, signal.SIGKILL)
    ended(child)


# kill -9


@pytest.mark.parametrize("seed", FEW)
def test_a_build_killed_at_any_moment(seed: int, project: Project) -> None:
    """The next build is right, waits for nobody, and leaves nothing of the killed one behind."""
    killed(project.build, random.Random(seed).uniform(0, 1.5))
    library = project.build()
    assert (call(library, "one"), call(library, "two")) == (41, 2)
    assert not list(cache.configured().folder("building").iterdir())


def a_plan(number: int) -> Plan:
    """One of some length, so that writing it takes a while."""
    step = PlanStep("gelu_0", "gelu", f"gelu {number}", "native", "because " * 2000)
    return Plan([ShapePlan("", [step] * 40, number, True, "")])


def test_saving_killed_at_any_moment(tmp_path: Path) -> None:
    """A file is there as a whole or not at all, the next process writes it, and what was begun goes."""
    plan, times = tmp_path / "plan.json", tmp_path / "user/tuning/times.json"

    def work() -> None:
        for number in range(10**6):
            a_plan(number).save(plan)
            file: Kept[str] = Kept(times, 1, "here", str)
            file.put(str(number % 50), "fast " * 20_000)
            file.save()

    chance = random.Random(0)
    for _ in MANY:
        killed(work, chance.uniform(0.05, 0.25))
        if plan.exists():
            Plan.load(plan)
        if times.exists():
            assert json.loads(times.read_text())["scope"] == "here"
    again: Kept[str] = Kept(times, 1, "here", str)
    again.put("last", "one")
    again.save()
    assert Kept(times, 1, "here", str).get("last") == "one"
    assert {path.name for path in times.parent.iterdir()} == {"times.json", "times.json.lock"}


@pytest.mark.parametrize("seed", FEW)
def test_a_conversion_killed_at_any_moment(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one converts anew, and the half of the killed one goes."""
    monkeypatch.setenv("OPSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gemma, "missing", lambda: None)

    def convert(place: Path) -> None:
        place.mkdir()
        for i in range(20):
            (place / f"{i}.safetensors").write_bytes(b"weights" * 1000)
            time.sleep(0.005)

    monkeypatch.setattr(gemma, "_convert", convert)
    killed(gemma.folder, random.Random(seed).uniform(0.01, 0.15))
    place = gemma.folder()
    assert len(list(place.iterdir())) == 21
    assert not list(cache.configured().folder("building").iterdir())


# A disk that is full


@contextlib.contextmanager
def no_room(size: int = 64) -> Iterator[None]:
    """Files end after so many bytes: what root cannot overrule, as a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS: dict[str, tuple[type[Exception], Callable[[Path], object]]] = {
    "plan": (ValueError, lambda file: a_plan(1).save(file)),
    "profile": (ValueError, lambda file: Profile("a model" * 50).to_json(file)),
    "page": (ValueError, lambda file: Profile("a model").to_html(file)),
    "trace": (ValueError, lambda file: Profile("a model" * 50).to_chrome_trace(file)),
    "json": (CommandError, lambda file: Output(str(file)).finish(["many"] * 100)),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_disk_that_fills_while_a_result_is_written(writer: str, tmp_path: Path) -> None:
    """One clear error that names the file; what was there stays, and nothing is left beside it."""
    file = tmp_path / "result.json"
    file.write_text("the last one")
    error, write = WRITERS[writer]
    with pytest.raises(error, match=r"write .*result\.json.*File too large"), no_room():
        write(file)
    assert {p.name: p.read_text() for p in tmp_path.iterdir() if p.is_file()} == {
        "result.json": "the last one"
    }


def test_a_disk_that_fills_while_times_are_kept(tmp_path: Path) -> None:
    """It costs the memory of this run alone: they are known here, and kept once there is room."""
    file: Kept[str] = Kept(tmp_path / "tuning/times.json", 1, "here", str)
    file.put("a", "fast" * 100)
    with no_room():
        file.save()
    assert file.get("a") == "fast" * 100
    assert {p.name for p in (tmp_path / "tuning").iterdir()} == {"times.json.lock"}
    file.save()
    assert Kept(tmp_path / "tuning/times.json", 1, "here", str).get("a") == "fast" * 100


def test_a_disk_that_fills_while_a_project_is_written(tmp_path: Path) -> None:
    """All of it is there or nothing."""
    from opsmith.authoring.new import create
    from tests.authoring.prototypes import text

    file = tmp_path / "p.json"
    file.write_text(text("SiluMulCustom"))
    with pytest.raises(OSError, match="File too large"), no_room():
        create(file, tmp_path / "made")
    assert [p.name for p in tmp_path.iterdir() if p.name != "tuning"] == ["p.json"]


# The clock, the machine, the environment


def test_a_clock_that_goes_backwards(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built last is there, however old it looks beside what was built before."""
    monkeypatch.setattr(cache, "_KEEP", {"libraries": 1, "objects": 1})
    first = project.build()
    for path in first.parent.iterdir():
        os.utime(path, (2**32, 2**32))  # 2106
    second = project.build(flags=["-DX"])
    assert call(second, "one") == 41


def test_many_processes_at_once_on_an_empty_cache(project: Project, tmp_path: Path) -> None:
    """They build once, and none's times are lost."""

    def work(number: int) -> None:
        assert call(project.build(), "one") == 41
        file: Kept[int] = Kept(tmp_path / "tuning/times.json", 1, "here", int)
        file.put(str(number), number)
        file.save()

    children = [forked(lambda number=number: work(number)) for number in range(8)]  # type: ignore[misc]
    assert [ended(child) for child in children] == [0] * 8
    assert project.compiled() == ["link", "one.cpp", "two.cpp"]
    assert len(Kept(tmp_path / "tuning/times.json", 1, "here", int).items()) == 8


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def python(code: str, *words: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", textwrap.dedent(code), *words]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, timeout=300)


def test_a_locale_without_utf_8(project: Project, tmp_path: Path) -> None:
    """Files are UTF-8 and names of folders bytes: what is built and written is the same as anywhere."""
    from tests.authoring.prototypes import text

    folder = tmp_path / "größe"
    folder.mkdir()
    (folder / "one.cpp").write_text("// größer\nint one() { return 1; }\n", encoding="utf-8")
    (tmp_path / "p.json").write_text(text("SiluMulCustom"))
    code = """
        import sys; from pathlib import Path
        assert sys.getfilesystemencoding() == "ascii", sys.getfilesystemencoding()
        from opsmith.kernels import build
        from opsmith.cli import main
        folder = Path(sys.argv[1])
        build.build_libraries([build.Library("one", [folder / "one.cpp"], tier="portable")])
        assert main(["new", str(folder.parent / "p.json"), "-o", str(folder / folder.name)]) == 0
        print("12 \\u00b5s, 3 \\u00d7")
    """
    done = python(code, str(folder), **ASCII)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert b"Traceback" not in done.stderr
    assert done.stdout.endswith(b"12 ?s, 3 ?\n")
    assert "opsmith build größe" in (folder / "größe/README.md").read_text(encoding="utf-8")


def test_mapped_files_of_any_name(tmp_path: Path) -> None:
    """Which files are mapped is read from a list of their names, which need be neither UTF-8 nor of one line."""
    file = os.fsencode(tmp_path) + b"/\xff\x0b1 2: \x85"
    Path(os.fsdecode(file)).write_bytes(bytes(1 << 16))
    opened = os.open(file, os.O_RDONLY)
    with mmap.mmap(opened, 0, prot=mmap.PROT_READ):
        os.close(opened)
        pages = Read()
        pages.add(torch.ones(4))
        pages.give_back()


def test_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    """A warning, and everything works; root too writes nothing below /proc."""
    code = """
        import torch, opsmith
        model, x = torch.nn.LayerNorm(8).eval(), torch.ones(2, 8)
        opsmith.optimize(model, x)
        assert model(x).abs().max() < 1e-3
        from opsmith.compiler import kept
        assert str(kept.directory()).startswith("/proc/nowhere/"), kept.directory()
    """
    nowhere = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "", "OPSMITH_CACHE": "", "OPSMITH_TUNING": ""}
    own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "OPSMITH_NATIVE": "0"}
    done = python(code, **nowhere, **own, **ASCII)
    assert done.returncode == 0, done.stderr.decode(errors="replace")


# Processes that are made of this one


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return model.eval().requires_grad_(False), torch.randn(300, 64)


def test_a_fork_after_use() -> None:
    """A child, with one thread as PyTorch's own workers have, computes what its parent does."""
    model, x = model_and_input()
    opsmith.optimize(model, x, config=UNTIMED)
    expected = model(x)

    def work() -> None:
        torch.set_num_threads(1)
        torch.testing.assert_close(model(x), expected)
        assert torch.equal(opsmith.ops.gelu(x), opsmith.ops.gelu(x))

    assert [ended(child) for child in [forked(work) for _ in range(3)]] == [0] * 3


FORKS = """
    import os, sys, time, torch
    from opsmith import ops
    x, first = torch.randn(4, 64), os.getpid()
    ops.layer_norm(x)
    if os.fork() == 0:
        sys.exit()  # unlike os._exit, as a server's workers do
    os.wait()
    ops.silu_mul(x, x)  # of another library
    print("parent", flush=True)
    if os.fork() == 0:
        while os.getppid() == first:
            time.sleep(0.01)
        ops.gelu(x)
        print("child", flush=True)
    """


def test_of_parent_and_fork_either_may_end_first() -> None:
    """What a library is known by is written anew in each: none takes it from the other."""
    got = python(FORKS)
    assert (got.stdout, got.stderr) == (b"parent\nchild\n", b"")


# Memory


@contextlib.contextmanager
def little_memory(more: int) -> Iterator[None]:
    """As under `ulimit -v`: no more address space than is taken now, but for so many bytes."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_memory_that_ends_within_a_call() -> None:
    """An error, the model is usable afterwards, and its results are right: also in a kernel and without a model."""
    model, x = model_and_input()
    opsmith.optimize(model, x, config=UNTIMED)
    expected, large = model(x), torch.zeros(1 << 20, 64)  # 256 MB, and as much for each result
    for attempt in (model, opsmith.ops.gelu):
        with pytest.raises(RuntimeError, match=r"memory|alloc"), little_memory(100 << 20):
            attempt(large)
        with little_memory(100 << 20):
            assert torch.equal(model(x), expected)


# Ctrl-C


class Stopped:
    """Ctrl-C in the middle of something, once."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real = real

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.real(*args, **kwargs)
        raise KeyboardInterrupt


def as_it_was(model: nn.Module, before: dict[str, Any], x: torch.Tensor, expected: torch.Tensor) -> None:
    assert set(vars(model)) - {"_compiled_call_impl"} == before.keys() - {"_compiled_call_impl"}
    assert model._compiled_call_impl is None
    assert not [m for m in model.modules() if "forward" in vars(m)]
    assert torch.equal(model(x), expected)
    opsmith.optimize(model, x, config=UNTIMED)
    torch.testing.assert_close(model(x), expected)
    opsmith.restore(model)


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("opsmith.compiler.api.Entry", {}),
        ("opsmith.compiler.api._cast", {"dtype": "bfloat16"}),
        ("opsmith.compiler.session.Session.backend", {"dtype": "bfloat16"}),
        ("opsmith.compiler.modules.quantize.Packing.pack", {"quantize": "int8"}),
        ("opsmith.compiler.modules.quantize.Packing.check", {"quantize": "int8"}),
    ],
)
def test_ctrl_c_within_optimize(where: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is as it was: same forward, same weights, same results; and it can be optimized afterwards."""
    model, x = model_and_input()
    before, expected = dict(vars(model)), model(x)
    with monkeypatch.context() as patch:
        owner, _, name = where.rpartition(".")
        module: Any = sys.modules.get(owner) or getattr(
            sys.modules[owner.rpartition(".")[0]], owner.split(".")[-1]
        )
        real = getattr(module, name)
        patch.setattr(module, name, lambda *args, **kwargs: Stopped(real)(*args, **kwargs))
        with pytest.raises(KeyboardInterrupt):
            opsmith.optimize(model, x, **{"config": UNTIMED, **options})  # type: ignore[arg-type]
    as_it_was(model, before, x, expected)


# What Python calls by itself, to collect garbage, raises nothing: a Ctrl-C within it is lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", FEW)
def test_ctrl_c_at_any_moment_of_optimize(seed: int) -> None:
    """The same, wherever it comes; in the last moment, when all is done, the model is optimized."""
    model, x = model_and_input()
    before, expected = dict(vars(model)), model(x)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    options: Any = ({"dtype": "bfloat16"}, {"quantize": "int8"}, {"config": Config()}, {})[seed % 4]
    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, random.Random(seed).uniform(0.001, 1.0))
    try:
        given = x.bfloat16() if "dtype" in options else x
        opsmith.optimize(model, given, **{"config": UNTIMED, **options})  # type: ignore[arg-type]
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    if hasattr(model, "opsmith"):
        assert model.opsmith.plan.shapes
        opsmith.restore(model)
    as_it_was(model, before, x, expected)


# Compilers


def a_compiler(project: Project, script: str) -> None:
    project.flag("cxx", f"#!/bin/sh\n{script}\n").chmod(0o700)
    compiler.first_that_runs.cache_clear()


GARBAGE = r"printf '\377\376\001garbage\033[2J\n'"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"{GARBAGE}; [ $1 = --version ]", "the compiler failed:"),
        (f"{GARBAGE}", r"could not be built: .*No such file|the compiler failed"),
        ("echo version; [ $1 = --version ] || kill -SEGV $$", "the compiler failed:"),
        ("exit 1", "does not run"),
        ("kill -KILL $$", "does not run"),
    ],
    ids=["garbage", "makes nothing", "crashes", "no version", "killed"],
)
def test_a_compiler_that_is_none(script: str, message: str, project: Project) -> None:
    """One clear error; what was built before serves still, and a compiler that works is asked again."""
    a_compiler(project, script)
    with pytest.raises(build.BuildError, match=message) as raised:
        project.build()
    assert len(str(raised.value)) < 2000
    a_compiler(project, 'exec g++ "$@"')
    assert call(project.build(), "one") == 41


def test_a_compiler_that_does_not_answer(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none, after a while."""
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **o: real(*a, **{**o, "timeout": 0.2}))
    a_compiler(project, "exec sleep 60")
    with pytest.raises(build.BuildError, match="does not run"):
        project.build()


def test_ctrl_c_while_a_compiler_hangs(project: Project) -> None:
    """The build ends at once, with its compilers, and the next one is right."""
    hold = project.hold_compilers()
    running = project.start()
    while not (project.home / "started").exists():
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)  # to the process alone, as a notebook does
    _, said = running.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    hold.unlink()
    (project.home / "slow").unlink()
    assert call(project.build(), "one") == 41
    assert not list(cache.configured().folder("building").iterdir())
