"""A library for each family of kernels: what is in which, and that a first call waits for its own alone."""

import ctypes
import os
import re
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tests.kernels.conftest import AVX2, EXPORT, Project, no_compiler, reported

import opsmith.ops
from opsmith import operator
from opsmith.call.run import Call
from opsmith.kernels import build, cache, compiler, isa, libraries, triton
from opsmith.kernels.build import BuildError

native = pytest.mark.skipif(not libraries.load() or triton.INTERPRETED, reason="needs the C++ kernels")


def run(code: str, **environment: str) -> str:
    """What a program prints that begins with nothing loaded."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What is where


@native
def test_a_library_offers_what_its_bindings_say_and_no_other_does() -> None:
    for library, path in libraries.status().libraries.items():
        opened = ctypes.CDLL(str(path))
        opened.opsmith_kernel.restype = ctypes.c_void_p
        offered = {name for name in libraries.kernels() if opened.opsmith_kernel(name.encode())}
        assert offered == {name for name, its in libraries.kernels().items() if its == library}


def test_every_operator_that_python_asks_for_has_a_library() -> None:
    package = Path(opsmith.ops.__file__).parents[1]
    text = "".join(path.read_text() for path in package.glob("ops/**/*.py"))
    asked = set(re.findall(r'\bnative\([\w.]+, "(\w+)"', text)) | set(
        re.findall(r"direct\.new_(\w+)\(", text)
    )
    modules = [module for name, module in sys.modules.items() if name.startswith("opsmith.ops.")]
    calls = {
        one.signature.name for module in modules for one in vars(module).values() if isinstance(one, Call)
    }
    assert min(len(asked), len(calls)) > 10
    assert asked - {"operator"} <= libraries.kernels().keys()  # direct.new_operator: in a docstring
    schemas = {schema.partition("(")[0] for card in operator.registry().values() for schema in card.schemas}
    for name in (schemas | calls) - libraries.kernels().keys():  # Python's, which call several kernels
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"opsmith::{name}", "CPU"), name


def test_what_nobody_has_declared_yet_is_said_and_not_built(tmp_path: Path) -> None:
    """In a process that has not imported the operators, whose signatures have a part of the bindings."""
    code = """
    from opsmith.kernels import libraries
    for asked in (libraries.load, libraries.build, libraries.status, lambda: libraries.load("gelu")):
        try:
            print(asked())
        except ValueError as error:
            print(str(error).rpartition("; ")[2])
    import opsmith.ops
    libraries._loaded = dict.fromkeys(libraries._names())  # all of them, as far as they are asked
    print(libraries.load())
    """
    said = run(code, OPSMITH_CACHE=str(tmp_path), OPSMITH_NATIVE="").splitlines()
    assert said == ["import opsmith.ops first"] * 3 + ["import opsmith.ops, which declares them", "True"]


@native
def test_a_process_that_is_killed_leaves_no_sources_behind(tmp_path: Path) -> None:
    """Those that are generated from signatures are no files but while they are compiled."""
    code = """
    import os
    import opsmith.ops
    from opsmith.kernels import libraries
    print([s.name for s in libraries._library("gelu", "portable").sources], libraries.content(), flush=True)
    os.kill(os.getpid(), 9)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert done.returncode == -9
    assert "binding_gelu.cpp" in done.stdout
    assert not list(tmp_path.glob("opsmith*"))


@native
def test_each_source_includes_what_it_uses(tmp_path: Path) -> None:
    """A build's precompiled header has what a source may have forgotten, and a build of few sources has none.

    In the lowest tier, whose code takes from the standard library what others have instructions for.
    """
    found, tier = compiler.find_compiler(), isa.TIERS[0]
    wanted = [libraries._library(name, tier) for name in set(libraries.kernels().values())]
    units = {
        source: compiler.Unit(source, tuple(one.include_dirs), isa.FLAGS[tier])
        for one in wanted
        for source in one.sources
        if not source.name.startswith("binding")  # torch's headers take seconds, and have most of the others
    }
    if found is None or "clang" in found.version:
        pytest.skip("g++ is not there")
    # Half of the time would go into this one, which simd.h alone includes.
    vectors = tmp_path / "vectors.h"
    vectors.write_text(compiler._VECTORS)

    def compiled(unit: compiler.Unit, *how: str) -> str:
        command = [*compiler._command(found, unit), "-Wno-psabi", *how]
        return subprocess.run(command, capture_output=True, text=True, check=False).stderr

    assert (
        compiled(next(iter(units.values())), "-x", "c++-header", str(vectors), "-o", f"{vectors}.gch") == ""
    )
    with ThreadPoolExecutor(2) as pool:
        how = ("-fsyntax-only", "-include", str(vectors))
        said = pool.map(lambda unit: compiled(unit, *how, str(unit.source)), units.values())
    assert len(units) > 30
    assert [text for text in said if text] == []


# First calls


BUILT_QUICKLY = """
    import torch
    from opsmith import ops
    from opsmith.call.fast import direct
    from opsmith.kernels import build, cache, compiler, libraries
    compiler.COMPILE_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in compiler.COMPILE_FLAGS)
    build._BINDING_LEVEL = "-O0"
    direct.not_built_yet, direct.library = list, lambda: None
"""


@native
def test_a_first_call_builds_its_own_library_alone(tmp_path: Path) -> None:
    code = (
        BUILT_QUICKLY
        + """
    x = torch.randn(300, 64)
    torch.testing.assert_close(ops.layer_norm(x), torch.nn.functional.layer_norm(x, (64,)))
    for kind in ("libraries", "objects"):
        for path in sorted(cache.configured().folder(kind).glob("*.*o")):
            print(kind, cache.configured().manifest(path)["name"])
    """
    )
    assert sorted(run(code, OPSMITH_CACHE=str(tmp_path), OPSMITH_NATIVE="1").splitlines()) == [
        "libraries layer_norm",
        "objects binding.cpp",
        "objects binding_layer_norm.cpp",
        "objects layer_norm.cpp",
    ]


@native
def test_each_operator_may_be_the_first_that_is_called() -> None:
    """A process for each card, forked from one that has imported everything and called nothing."""
    code = """
    import os, sys, traceback, torch
    from opsmith import operator, ops
    from opsmith.kernels import libraries
    from opsmith.call.dispatch import always_native
    from opsmith.proof.passes import tensors_of

    def first(card):
        assert not libraries._loaded
        samples = card.samples(operator.Make(torch.float32))
        sample = max(samples, key=lambda sample: sum(t.numel() for t in tensors_of(sample.args)))
        if card.differentiable:
            for t in tensors_of(sample.args):
                t.requires_grad_(t.is_floating_point())
        with always_native():
            got = tensors_of(card.function(*sample.args, **sample.kwargs))
        wide = sample.cast(torch.float64)
        for y, exact in zip(got, tensors_of(card.reference(*wide.args, **wide.kwargs)), strict=True):
            eager = next(iter(tensors_of(card.eager(*sample.args, **sample.kwargs))))
            torch.testing.assert_close(y.double(), exact.double(), rtol=1e-3, atol=1e-3)
        if any(y.requires_grad for y in got):
            sum(y.double().sum() for y in got if y.requires_grad).backward()
        print(card.name, *sorted(libraries._loaded), flush=True)

    torch.testing.assert_close(torch.ones(1), torch.ones(1))  # imports for half a second: once, in no child
    for card in operator.registry().values():
        child = os.fork()
        if child == 0:
            try:
                first(card)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, card.name
    """
    said = {line.split()[0]: set(line.split()[1:]) for line in run(code).splitlines()}
    assert said.keys() == operator.registry().keys()
    assert said["layer_norm"] == {"layer_norm", "layer_norm_backward"}
    assert said["bias_gelu"] == {"gelu", "gelu_backward"}
    assert said["mla_preprocess"] == {"mla"}
    assert all(said.values()), [name for name, loaded in said.items() if not loaded]


@native
def test_first_calls_from_threads_and_in_a_backward() -> None:
    code = """
    import threading, torch
    from opsmith import ops
    from opsmith.kernels import libraries

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return torch.nn.functional.gelu(x)

        @staticmethod
        def backward(ctx, dy):  # which has never been asked for
            (x,) = ctx.saved_tensors
            dx = torch.empty_like(x)
            torch.ops.opsmith.gelu_backward.default(dy.contiguous(), x, None, False, dx=dx)
            return dx

    x = torch.randn(64, 512, requires_grad=True)
    assert not libraries._loaded
    Square.apply(x).sum().backward()
    expected = torch.autograd.grad(torch.nn.functional.gelu(x).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert list(libraries._loaded) == ["gelu_backward"]

    x = torch.randn(512, 1024)
    ways = {
        lambda: ops.softmax(x): torch.softmax(x, -1),
        lambda: ops.layer_norm(x): torch.nn.functional.layer_norm(x, (1024,)),
        lambda: ops.rms_norm(x): torch.nn.functional.rms_norm(x, (1024,), eps=1e-6),
        lambda: ops.silu_mul(x): torch.nn.functional.silu(x[:, :512]) * x[:, 512:],
    }
    wrong, start = [], threading.Barrier(8)

    def work(way, expected):
        try:
            start.wait()
            for _ in range(5):
                torch.testing.assert_close(way(), expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in [*ways.items()] * 2]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert not wrong, wrong
    print(*sorted(libraries._loaded))
    """
    assert run(code).split() == ["gated", "gelu_backward", "layer_norm", "rms_norm", "softmax"]


def test_a_kernel_without_its_library_says_so() -> None:
    code = """
    import torch, opsmith.ops
    x = torch.randn(4, 8)
    try:
        torch.ops.opsmith.gelu.default(x, None, False, y=x)
    except NotImplementedError as error:
        print(error)
    """
    assert "opsmith::gelu has no kernel here (see `opsmith doctor`)" in run(code, OPSMITH_NATIVE="0")
    x = torch.empty(4, 8, device="meta")
    assert torch.ops.opsmith.gelu.default(x, None, False, y=x) is None  # which needs none


@native
def test_a_kernel_that_its_library_does_not_have_is_named() -> None:
    code = """
    import torch, opsmith.ops
    from opsmith.kernels import libraries
    libraries._offered["gelu"] = "softmax"
    x = torch.randn(4, 8)
    try:
        torch.ops.opsmith.gelu.default(x, None, False, y=x)
    except NotImplementedError as error:
        print(error)
    """
    assert "opsmith::gelu is not in the library softmax, which was to have it; bind it in" in run(code)


# Several at once


@pytest.fixture
def several(fresh: Project) -> Project:
    """Two libraries that share a unit, and offer a kernel each."""
    fresh.flag("common.h", "#pragma once\nint common();\n")
    fresh.flag("common.cpp", '#include "common.h"\nint common() { return 7; }\n')
    for name in ("one", "two"):
        (fresh.home / "src/cpu" / f"{name}.cpp").unlink()
        folder = fresh.home / name / "cpu"
        folder.mkdir(parents=True)
        libraries.offer(name, f"{name}_kernel")
        (folder / f"binding_{name}.cpp").write_text(
            f'#include "common.h"\n{EXPORT}int {name}() {{ return common(); }}\n'
        )
    return fresh


def test_a_kernel_waits_for_its_library(several: Project) -> None:
    assert libraries.load("two_kernel")
    assert libraries.status().loaded == ("two",)
    assert several.compiled() == ["binding_two.cpp", "common.cpp", "link"]
    assert libraries.load("one_kernel", "two_kernel")
    assert several.compiled() == ["binding_one.cpp", "link"]  # what they share is compiled once


def test_two_kernels_of_one_library_have_their_bindings_written(several: Project) -> None:
    for kernel in ("two_forward", "two_backward"):
        libraries.offer("two", kernel, binding=f"{EXPORT}int {kernel}() {{ return 1; }}\n")
    assert libraries.load("two_forward", "two_backward")
    written = ["binding_two_backward.cpp", "binding_two_forward.cpp"]
    assert several.compiled() == sorted(["binding_two.cpp", *written, "common.cpp", "link"])
    opened = ctypes.CDLL(str(libraries.status().libraries["two"]))
    assert opened.two_forward() == opened.two_backward() == 1


def test_what_is_wanted_at_once_is_built_in_one_run(
    several: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, ninja = [], compiler._run_ninja
    monkeypatch.setattr(compiler, "_run_ninja", lambda *args: runs.append(1) or ninja(*args))
    assert libraries.load()
    assert len(runs) == 1
    assert several.compiled() == ["binding_one.cpp", "binding_two.cpp", "common.cpp", "link", "link"]


def test_one_that_does_not_build_keeps_no_other_from_loading(several: Project) -> None:
    (several.home / "one/cpu" / "binding_one.cpp").write_text("broken")
    (several.home / "three/cpu").mkdir(parents=True)
    (several.home / "three/cpu" / "binding_three.cpp").write_text("broken")
    libraries.offer("three", "three_kernel")
    with pytest.warns(RuntimeWarning, match=r"binding_\w+\.cpp:1") as caught:
        assert not libraries.load()
    assert len(caught) == 1
    assert libraries.load("two_kernel")
    several.compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not libraries.load("one_kernel")
        assert not libraries.load("two_kernel", "three_kernel")
    assert several.compiled() == []  # not tried again
    found = libraries.status()
    assert found.loaded == ("two",)
    assert "binding_" in (found.reason or "")


def test_one_that_has_to_be_built_is_an_error_where_kernels_are_required(
    several: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (several.home / "one/cpu" / "binding_one.cpp").write_text("broken")
    monkeypatch.setenv("OPSMITH_NATIVE", "1")
    assert libraries.load("two_kernel")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"binding_one\.cpp:1"):
            libraries.load("one_kernel")


def test_without_a_compiler_what_was_built_serves(several: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = build.build_libraries([libraries._library("two", isa.tier())])
    no_compiler(several, monkeypatch)
    with pytest.warns(RuntimeWarning, match="apt-get") as caught:
        assert not libraries.load()
    assert len(caught) == 1
    assert libraries.load("two_kernel")
    assert libraries.status().libraries == {"one": None, "two": path}


def test_all_are_of_one_tier(several: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    reported(monkeypatch, *AVX2)
    flags = isa.FLAGS["avx2"]
    monkeypatch.setitem(isa.FLAGS, "avx2", ("-mno-such-instructions",))
    assert libraries.load("one_kernel")
    monkeypatch.setitem(isa.FLAGS, "avx2", flags)  # one that is built later could be better
    assert libraries.load("two_kernel")
    assert libraries.status().tier == "portable"
    assert all("portable" in path.name for path in libraries._loaded.values())


def test_an_assembler_older_than_the_compiler_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler.find_compiler()
    if found is None:
        pytest.skip("there is no compiler")
    assert not compiler.accepts(found, ("-O1",), "no_such_instruction")
    assert compiler.accepts(found, ("-O1",), "nop")


def test_the_kernels_content_is_known_before_they_are_built(
    several: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = libraries.content()
    assert libraries.load("one_kernel")
    assert libraries.content() == before
    common = several.home / "common.cpp"
    common.write_text(common.read_text().replace("7", "8"))
    libraries._content.cache_clear()
    assert libraries.content() != before
    monkeypatch.setenv("OPSMITH_NATIVE", "0")
    assert libraries.content() == "none"


def test_a_truncated_library_is_built_again(several: Project) -> None:
    paths = libraries.build()
    paths[0].write_bytes(paths[0].read_bytes()[:1000])
    several.compiled()
    assert libraries.load()
    assert several.compiled() == ["link"]
    assert cache.configured().manifest(paths[0]) is not None
