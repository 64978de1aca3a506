"""What was proved stands for the same graph, inputs, weights and code, and for nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith import measure
from opsmith.compiler import Config
from opsmith.compiler.choose import worth
from opsmith.compiler.kept import Kept, TuningCache
from opsmith.compiler.program import study
from opsmith.compiler.prove import proofs
from opsmith.operator import Implementation, Tolerance, Verdict, registry
from tests.compiler.models import UNTIMED, WIDTH, Feed, Truth, numbers, seeded


def _counted(monkeypatch: pytest.MonkeyPatch, function: str) -> list[str]:
    """The operators of the sites that a function of the study is called with, in order."""
    names: list[str] = []
    original = getattr(study, function)

    def counted(site: Any, *rest: Any) -> Any:
        names.append(site.card.name)
        return original(site, *rest)

    monkeypatch.setattr(study, function, counted)
    return names


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the sites that are proved."""
    return _counted(monkeypatch, "prove")


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators of the sites that are computed in float64."""
    return _counted(monkeypatch, "run_wide")


def _optimize(model: Any, *inputs: torch.Tensor, config: Config = UNTIMED) -> Any:
    torch._dynamo.reset()  # as a new process would begin
    return opsmith.optimize(copy.deepcopy(model), list(inputs), config=config)


def test_a_second_process_takes_the_verdicts_over(proved: list[str]) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    first = _optimize(model, x).opsmith.report.graphs[0].kept
    assert len(proved) == len(first) > 2
    proved.clear()
    again = _optimize(model, x)
    assert proved == []
    assert [(s.name, s.error, s.bound) for s in again.opsmith.report.graphs[0].kept] == [
        (s.name, s.error, s.bound) for s in first
    ]
    with torch.no_grad():
        Truth(model).check(again(x), x)


def test_a_site_is_computed_in_float64_once(
    proved: list[str], exact: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = registry()["layer_norm"]
    wrong = Implementation("wrong", lambda x, *_, **__: x * 1.5)
    monkeypatch.setattr(card, "implementations", [wrong, *card.implementations])
    report = _optimize(seeded(Feed), numbers(3, 4, WIDTH)).opsmith.report.graphs[0]
    assert exact == [s.operator for s in report.kept]
    assert proved.count("layer_norm") == 2 * exact.count("layer_norm") == 2


def _weight(model: Any, x: torch.Tensor) -> None:
    next(model.parameters()).data.view(-1)[0] += 1e-6


def _input(model: Any, x: torch.Tensor) -> None:
    x.view(-1)[-1] += 1e-6


@pytest.mark.parametrize("change", [_weight, _input], ids=lambda f: f.__name__.strip("_"))
def test_one_other_number_is_another_proof(change: Callable[..., None], proved: list[str]) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    first = list(proved)
    change(model, x)
    _optimize(model, x)
    assert proved == first * 2


def test_other_sizes_strides_and_dtypes_are_other_proofs() -> None:
    x = torch.zeros(4, 4)
    others = [x.view(2, 8), x.t(), x.bfloat16(), torch.zeros(4, 4, dtype=torch.int32), x[:0], 0, "0", None]
    digests = [proofs._digest([value]) for value in (x, *others)]
    # A transposed square has the strides of another tensor; nothing else here has the same bytes and form.
    assert len(set(digests)) == len(digests)
    assert proofs._digest([x.clone()]) == digests[0]


@pytest.mark.parametrize(
    "given",
    [
        torch.eye(3).to_sparse(),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(3)),
        torch.randn(2, 2).to_mkldnn(),
    ],
    ids=["sparse", "conjugate", "negative", "opaque"],
)
def test_what_cannot_be_read_is_proved_each_time(given: torch.Tensor) -> None:
    gm = torch.fx.symbolic_trace(torch.nn.Identity())
    assert proofs.Proofs().of(gm, [given]) is None


@pytest.mark.parametrize("attribute", ["code", "_written"])
def test_other_code_is_another_proof(
    attribute: str, proved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    first = list(proved)
    was = getattr(proofs, attribute)
    other = {"code": lambda: "edited", "_written": lambda gm: [*was(gm), "another constant"]}
    monkeypatch.setattr(proofs, attribute, other[attribute])
    _optimize(model, x)
    assert proved == first * 2


def test_what_is_not_ours_is_proved_each_time(proved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    card = registry()["layer_norm"]
    own = Implementation("own", lambda **call: card.reference(**call))
    monkeypatch.setattr(card, "implementations", [own, *card.implementations])
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    for _ in range(2):
        _optimize(model, x)
    norms = proved.count("layer_norm")
    assert norms >= 2
    assert norms % 2 == 0
    assert proved[-norms // 2 :] == ["layer_norm"] * (norms // 2)


def test_what_may_come_out_otherwise_is_proved_each_time(
    proved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = registry()["layer_norm"]
    able = next(i for i in card.implementations if i.name == "eager")
    shaky = Implementation("shaky", able.fn, repeatable=False)
    monkeypatch.setattr(card, "implementations", [shaky, *card.implementations])
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    before = proved.count("layer_norm")
    _optimize(model, x)
    assert proved.count("layer_norm") == 2 * before > 0
    assert proved.count("linear") == len(proved) - 2 * before > 0  # once


def test_a_failure_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    card = registry()["layer_norm"]
    wrong = [replace(i, fn=lambda x, *_, **__: x * 1.5) for i in card.implementations]
    monkeypatch.setattr(card, "implementations", wrong)
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    for _ in range(2):
        (line,) = _optimize(model, x).opsmith.report.rolled_back
        assert line.startswith("layer_norm_0")


def test_what_inductor_compiles_is_not_ours() -> None:
    reference = registry()["layer_norm"].reference
    assert proofs.ours(reference)
    assert not proofs.ours(torch.compile(reference, dynamic=True))


def test_what_failed_its_proof_stays_out(monkeypatch: pytest.MonkeyPatch) -> None:
    card = registry()["layer_norm"]
    wrong = Implementation("wrong", lambda x, *_, **__: x * 1.5)
    monkeypatch.setattr(card, "implementations", [wrong, *card.implementations])
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    for _ in range(2):
        fast = _optimize(model, x)
        (why,) = [s.why for s in fast.opsmith.report.graphs[0].kept if s.operator == "layer_norm"]
        assert why.startswith("wrong: error ")
        with torch.no_grad():
            Truth(model).check(fast(x), x)
            Truth(model).check(fast(x[:1]), x[:1])


def test_nothing_is_kept_where_nothing_is_proved(tuning_cache: Path) -> None:
    _optimize(seeded(Feed), numbers(3, 4, WIDTH), config=Config(tune=False, verify=False))
    assert not list(tuning_cache.glob("proofs-*.json"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("[", "[NaN, ", 1),
        lambda text: text.replace('": [', '": ["', 1),
        lambda text: json.dumps({**json.loads(text), "scope": "elsewhere"}),
    ],
    ids=["empty", "half", "nan", "text", "scope"],
)
def test_a_damaged_file_is_no_proof(
    damage: Callable[[str], str], proved: list[str], tuning_cache: Path
) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    first = list(proved)
    (file,) = tuning_cache.glob("proofs-*.json")
    file.write_text(damage(file.read_text()))
    _optimize(model, x)
    assert proved == first * 2


def test_the_oldest_entries_go(tmp_path: Path) -> None:
    def kept() -> Kept[int]:
        return Kept(tmp_path / "kept.json", 1, "here", int, 3)

    for i in range(5):
        one = kept()
        one.put(str(i), i)
        one.save()
    assert list(kept().items()) == [("2", 2), ("3", 3), ("4", 4)]


def test_an_example_is_one_file_write(monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[TuningCache] = []
    monkeypatch.setattr(TuningCache, "save", lambda cache: saves.append(cache))
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x, x[:2])
    assert len(saves) == 2
    torch._dynamo.reset()
    train = opsmith.optimize(seeded(Feed))
    train(x.requires_grad_())
    assert len(saves) == 3  # nothing is recorded with gradients


def test_a_program_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    monkeypatch.setattr(measure, "CONCLUDES_NOTHING", 1e9)  # however busy the machine
    monkeypatch.setattr(measure.Comparison, "disturbed", False)
    notes = [_optimize(model, x, config=Config(inductor=False)).opsmith.plan.shapes[0].note]
    monkeypatch.setattr(worth, "_measure", None)  # timing again would raise, and eager run
    again = _optimize(model, x, config=Config(inductor=False)).opsmith.plan.shapes[0]
    assert again.note == notes[0]
    assert "ms" in again.note


def test_a_model_whose_operators_alone_take_longer_is_not_timed_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worth, "_measure", None)  # timing would raise, and eager run
    monkeypatch.setattr(worth, "_FAR", 0.0)
    monkeypatch.setattr(worth, "_FAR_S", 0.0)
    (shape,) = _optimize(
        seeded(Feed), numbers(3, 4, WIDTH), config=Config(inductor=False)
    ).opsmith.plan.shapes
    assert shape.used
    assert "ms by its operators alone" in shape.note


def test_a_saved_plan_says_whether_its_program_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    plan = _optimize(model, x, config=Config(inductor=False)).opsmith.plan
    monkeypatch.setenv("OPSMITH_TUNING", str(tmp_path / "elsewhere"))
    plan.shapes[0].note, plan.shapes[0].used = "as it was found", False
    torch._dynamo.reset()
    there = opsmith.optimize(copy.deepcopy(model), [x], plan=plan).opsmith.plan.shapes[0]
    assert (there.note, there.used) == ("as it was found", False)
    # Another machine's times say nothing here.
    plan.machine = "elsewhere"
    torch._dynamo.reset()
    there = opsmith.optimize(copy.deepcopy(model), [x], plan=plan).opsmith.plan.shapes[0]
    assert there.note.startswith("opsmith ")


@pytest.mark.parametrize("ok", [False, True])
def test_a_verdict_counts_and_not_what_it_says(monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    """A tolerance of one's own may fail a result without a reason, and remark on one that passes."""
    verdict = Verdict(ok, 2.0, 1.0, "a remark" * ok)
    monkeypatch.setattr(Tolerance, "check_parts", lambda self, parts: verdict)
    monkeypatch.setattr(Tolerance, "near", lambda self, *of: verdict)
    report = _optimize(
        seeded(Feed), numbers(3, 4, WIDTH), config=Config(tune=False, inductor=False)
    ).opsmith.report
    assert bool(report.rolled_back) is not ok
    assert all("error 2 above the bound 1" in line for line in report.rolled_back)
