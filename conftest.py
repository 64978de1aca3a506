"""What every test relies on: kernels built once, a seed and tuning results of its own, the same threads."""

import os

# Two workers of two threads share two cores: threads that spin while they wait would starve the others.
# libgomp reads this when torch loads it, so it is set before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Inductor compiles C++ for seconds; the tests that are about it ask for it.
os.environ.setdefault("OPSMITH_INDUCTOR", "0")
# Dynamo collects garbage after each graph, in a process that holds half a million objects.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")
# PyTorch's profiler says on stderr that it starts and stops, unless its own log is told so before it is loaded.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import gc
import random
import zlib
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# A slow or busy machine is no fault of what is tested.
hypothesis.settings.register_profile(
    "opsmith",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("opsmith")

THREADS = 2

# Dynamo times the guards of each graph, with every cache emptied for it: 20 ms of each compilation, and for a log.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.interpreter import hasten

    hasten()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Builds the kernels once, in the process that starts the workers, so that none of those builds."""
    if hasattr(session.config, "workerinput") or session.config.option.collectonly:
        return
    import opsmith.ops  # noqa: F401  which declares what the kernels' bindings are generated from
    from opsmith.kernels import libraries

    if not libraries.load() and libraries.status().compiler and os.environ.get("OPSMITH_NATIVE") != "0":
        pytest.exit(f"the kernels do not build, so nothing would test them: {libraries.status().reason}", 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Half a million objects are imported to stay: looking for garbage among them took a third of collecting.

    Tests make few cycles, and many objects that live for long: they are looked through less often, and without those.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


def pytest_sessionfinish() -> None:
    """Libraries that count what they have not got back at the end do get it back."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def session_tuning_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tuning results of fixtures that outlive a test stay out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPSMITH_TUNING", str(tmp_path_factory.mktemp("tuning")))
        yield


@pytest.fixture(scope="module", autouse=True)
def what_stays() -> Iterator[None]:
    """What a module leaves alive, libraries above all, is not looked through in the collections of those behind it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def registered_cards() -> Iterator[None]:
    """Operators that a module's tests register are unknown to the next module's, which may write the same patterns."""
    import opsmith.ops  # noqa: F401  registers ours
    from opsmith import operator

    before = operator.registry()
    yield
    operator._REGISTRY.clear()
    operator._REGISTRY.update(before)


@pytest.fixture(autouse=True)
def tuning_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tuning cache for each test: no test depends on what another one measured."""
    path = tmp_path / "tuning"
    monkeypatch.setenv("OPSMITH_TUNING", str(path))
    return path


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds from the test's name and its file's, wherever that lies, and a fixed number of threads on any worker."""
    seed = zlib.crc32(f"{request.path.name}::{request.node.name}".encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)
