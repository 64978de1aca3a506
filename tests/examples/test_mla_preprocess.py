"""The published call as an example: it runs, and its rungs agree."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from opsmith.authoring.project import imported

FILE = Path(__file__).parents[2] / "examples" / "mla_preprocess.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return imported(FILE, "mla_preprocess_example")


def test_inputs_outputs_and_times(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(heads=4, loops=1, hidden=256)
    text = capsys.readouterr().out
    assert "[4, 4, 512]" in text
    for rung in example.RUNGS:
        assert rung in text


@pytest.mark.parametrize("quant", [None, "per_token"])
def test_the_rungs_agree(example: ModuleType, quant: str | None) -> None:
    s = example.Sizes(heads=3, hidden=128)
    calls = example.rungs(s, example.make_inputs(s, torch.float32, quant), loops=2)
    first, *others = [call() for call in calls.values()]
    assert len(others) == (3 if quant is None else 2)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-2 if quant else 1e-4)
