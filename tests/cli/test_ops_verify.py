"""`opsmith ops` and `opsmith verify`, on a card of the test's own."""

import json
import sys
from collections.abc import Iterator

import pytest
import torch

from opsmith.cli import main
from opsmith.cli.common import Output
from opsmith.cli.verify import _print
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample
from opsmith.proof.verify import Finding


def samples(make: Make) -> Iterator[Sample]:
    yield Sample("long", (make(40),))
    yield Sample("short", (make(3),))


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Operator:
    """A card in a registry of its own, with one implementation that can run here and two that cannot."""
    card = Operator(
        name="negate",
        kind=Kind.ACTIVATION,
        function=torch.neg,
        reference=torch.neg,
        cost=lambda x: Cost(x.numel(), 2 * x.nbytes),
        samples=samples,
        implementations=[
            Implementation("right", torch.neg),
            Implementation("elsewhere", torch.neg, available=lambda: "needs a machine that is not this one"),
            Implementation("abroad", torch.neg, device="nowhere"),
        ],
        dtypes=(torch.float32, torch.bfloat16),
    )
    import opsmith.ops  # noqa: F401  (registers its cards before the registry is replaced)

    monkeypatch.setattr(sys.modules["opsmith.operator"], "_REGISTRY", {"negate": card})
    return card


def test_ops_says_why_an_implementation_is_unavailable(
    card: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", "--json"]) == 0
    rows = {row["implementation"]: row for row in json.loads(capsys.readouterr().out)["operators"]}
    assert list(rows) == ["right", "elsewhere", "abroad"]
    assert rows["right"]["dtypes"] == ["float32", "bfloat16"]
    assert rows["right"]["reason"] is None
    assert rows["elsewhere"]["reason"] == "needs a machine that is not this one"
    assert not rows["elsewhere"]["available"]
    assert rows["abroad"]["reason"] == "no nowhere device that this PyTorch can use"
    assert main(["ops"]) == 0
    assert "no: needs a machine that is not this one" in capsys.readouterr().out


def test_verify_is_green(card: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "negate"]) == 0
    out = capsys.readouterr().out
    assert "checks passed" in out
    assert "right" in out
    assert "elsewhere" not in out


def test_verify_is_red_and_names_the_smallest_case(
    card: Operator, capsys: pytest.CaptureFixture[str]
) -> None:
    card.implementations.append(Implementation("wrong", lambda x: -x + 1))
    assert main(["verify", "--all", "--dtype", "bfloat16", "--json"]) == 1
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["ok"] is False
    assert {f["implementation"] for f in result["findings"] if not f["ok"]} == {"wrong"}
    assert {f["dtype"] for f in result["findings"]} == {"bfloat16", "float64"}  # gradcheck needs the latter
    assert "start with the smallest: negate wrong, values of sample 'short', bfloat16" in err
    assert main(["verify", "negate"]) == 1
    assert "sample 'short'" in capsys.readouterr().out


def test_a_table_of_every_check_does_not_fold_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [
        *("gradients", "values", "out=", "two runs", "threads", "out=, returned", "out=, refused"),
        *("opcheck", "torch.compile", "torch.compile, gradients", "gradcheck"),
    ]
    _print(Output(None).console, [Finding("softmax", "native", "float32", "", 1, c, True) for c in checks])
    header = capsys.readouterr().out.splitlines()[0]
    assert [check for check in checks if check not in header] == []
