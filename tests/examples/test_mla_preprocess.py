"""The published call as an example: it runs, its rungs agree, its stages overlap in the order they wait for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from opsmith.call.dispatch import native_library

FILE = Path(__file__).parents[2] / "examples" / "mla_preprocess.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mla_preprocess_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the annotations
    spec.loader.exec_module(module)
    return module


def test_inputs_outputs_times_and_a_picture(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "timeline.svg"
    example.main(heads=4, loops=1, hidden=256, picture=picture)
    text = capsys.readouterr().out
    assert "[4, 4, 512]" in text
    for rung in example.RUNGS:
        assert rung in text
    if native_library():
        drawn = picture.read_text()
        assert all(stage in drawn for stage in example.STAGES)


@pytest.mark.parametrize("quant", [None, "per_token"])
def test_the_rungs_agree(example: ModuleType, quant: str | None) -> None:
    s = example.Sizes(heads=3, hidden=128)
    calls = example.rungs(s, example.make_inputs(s, torch.float32, quant), loops=2)
    first, *others = [call() for call in calls.values()]
    assert len(others) == (3 if quant is None else 2)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-2 if quant else 1e-4)


@pytest.mark.skipif(not native_library(), reason="the kernel is what is traced")
def test_a_trace_has_every_task_once(example: ModuleType) -> None:
    s = example.Sizes(heads=5, hidden=256)
    inputs = example.make_inputs(s, torch.bfloat16, None)
    cache = example.new_cache(s, torch.bfloat16)
    with example.mla_trace() as tasks:
        example.mla_preprocess(**inputs, cache=cache)
    found = [task.stage for task in tasks]
    assert found.count("norm of x") == found.count("keys") == found.count("norm of latent queries") == 4
    assert found.count("heads") == 5
    assert all(0 <= task.begin <= task.end for task in tasks)
    # A head waits for all latent queries.
    latents = max(t.end for t in tasks if t.stage == "norm of latent queries")
    assert all(t.end >= latents for t in tasks if t.stage == "heads")
    with example.mla_trace() as few:
        pass
    assert few == []
    assert 0.0 <= example.beside(tasks) <= 1.0


def test_work_beside_other_work_is_counted(example: ModuleType) -> None:
    task = example.Task
    tasks = [task(0, "heads", 0.0, 4.0), task(1, "keys", 1.0, 3.0), task(1, "norm of x", 3.0, 7.0)]
    assert example.beside(tasks) == pytest.approx(3 / 6)
