"""A plan is read by people and by machines, saved, compared, and taken over without measuring again."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith.compiler import Config, Plan
from opsmith.compiler.choose.select import Selector
from tests.compiler.models import UNTIMED, WIDTH, Encoder, Feed, Truth, ids, numbers, padding, seeded


@pytest.fixture(scope="module")
def plan() -> Plan:
    model = seeded(lambda: Encoder(layers=1))
    opsmith.optimize(model, (ids(3, 9), padding(3, 9)), config=UNTIMED)
    found: Plan = model.opsmith.plan
    opsmith.restore(model)
    return found


def test_the_table_shows_every_operator_with_its_choice_and_reason(plan: Plan) -> None:
    table = plan.table()
    assert str(plan) == table
    for step in plan.shapes[0].steps:
        assert any(
            step.operator in line and step.implementation in line and step.reason in line
            for line in table.splitlines()
        )
    assert {s.operator for s in plan.shapes[0].steps} == {"attention", "layer_norm", "linear", "embedding"}
    assert "3×9  (" in table.splitlines()[0]


def test_the_source_is_python_with_one_call_for_each_step(plan: Plan) -> None:
    tree = ast.parse(plan.source)
    (run,) = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    assert [a.arg for a in run.args.args] == ["args", "buffers"]
    called = [n.func.id for n in ast.walk(run) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    for step in plan.shapes[0].steps:
        # The implementation, or the kernels that it comes to.
        either = (f"{step.operator}_{step.implementation}", f"opsmith_{step.operator}")
        assert any(name.startswith(either) for name in called)
    compile(plan.source, "plan", "exec")


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    path = plan.save(tmp_path / "plan.json")
    again = Plan.load(path)
    assert again == plan
    assert again.diff(plan) == []
    assert again.table() == plan.table()
    data = json.loads(path.read_text())
    assert data["schema"] == 1
    assert data["versions"]["torch"] == torch.__version__
    assert data["machine"]


def test_a_difference_is_one_line_for_each_call(plan: Plan, tmp_path: Path) -> None:
    other = Plan.load(plan.save(tmp_path / "plan.json"))
    changed = next(s for s in other.shapes[0].steps if s.operator == "attention")
    changed.implementation = "eager"
    assert plan.diff(other) == [f"{changed.signature}: native -> eager"]
    other.shapes[0].steps = [changed]
    lines = plan.diff(other)
    assert len(lines) == len(plan.choices())
    assert sum(line.endswith("-> (absent)") for line in lines) == len(lines) - 1
    assert all("(absent) -> " in line for line in other.diff(plan)[1:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("[" * 50_000, "is not JSON"),
        ('{"schema": 1, "shapes": [', "is not JSON"),
        ("[]", "has schema 'list', this version reads 1; make the plan again"),
        ('{"shapes": []}', "has schema None"),
        ('{"schema": 2, "shapes": []}', "has schema 2"),
        (json.dumps({"schema": ["schema"] * 9999}), r"has schema \['schema', .{,60}, this version reads 1"),
        ('{"schema": 1, "shapes": 3}', "is damaged: shapes: .*; make the plan again"),
        ('{"schema": 1, "shapes": [{"sizes": "3×9"}]}', r"is damaged: shapes\.0\.steps"),
        (
            '{"schema": 1, "shapes": [{"sizes": "", "buffer_bytes": 0, "used": true, "note": "",'
            ' "steps": [{"site": "a", "operator": "b", "signature": "c", "implementation": 7, "reason": ""}]}]}',
            r"is damaged: shapes\.0\.steps\.0\.implementation",
        ),
        ('{"schema": 1, "shapes": [], "versions": "new"}', "is damaged: versions"),
    ],
)
def test_what_is_no_plan_is_one_clear_error(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        Plan.load(path)
    assert str(caught.value).startswith(f"plan: {path} ")
    assert "\n" not in str(caught.value)
    model = seeded(Feed)
    with pytest.raises(ValueError, match=message):
        opsmith.optimize(model, numbers(3, 4, WIDTH), plan=path)
    assert not hasattr(model, "opsmith")


def test_a_plan_that_cannot_be_written_or_read(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan: can't write .*: No such file"):
        plan.save(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(ValueError, match=r"plan: can't read .*: No such file"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize("from_file", [False, True])
def test_a_saved_plan_is_taken_over_without_measuring(
    from_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured")

    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=Config(tune=False, pin={"layer_norm": "eager", "linear": "native"}))
    saved = model.opsmith.plan
    saved.save(tmp_path / "plan.json")
    opsmith.restore(model)
    monkeypatch.setattr(Selector, "_measure", forbidden)
    with pytest.warns(UserWarning, match="could not be studied: raised AssertionError: measured"):
        opsmith.optimize(model, x)
    opsmith.optimize(model, x, plan=tmp_path / "plan.json" if from_file else saved)
    steps = model.opsmith.plan.shapes[0].steps
    assert {s.operator: s.implementation for s in steps} == {"layer_norm": "eager", "linear": "native"}
    assert {s.reason for s in steps} == {"from the saved plan"}
    assert saved.diff(model.opsmith.plan) == []
    with torch.no_grad():
        truth.check(model(x), x)


def test_a_plan_edited_to_what_there_is_not_is_measured_anew(tmp_path: Path) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    opsmith.optimize(model, x, config=UNTIMED)
    edited = Plan.load(model.opsmith.plan.save(tmp_path / "plan.json"))
    for step in edited.shapes[0].steps:
        step.implementation = "imaginary"
    opsmith.optimize(model, x, config=UNTIMED, plan=edited)
    assert "imaginary" not in str(model.opsmith.plan)


def test_the_plan_grows_with_the_sizes_seen() -> None:
    model = seeded(Feed)
    opsmith.optimize(model, numbers(3, 4, WIDTH), config=UNTIMED)
    with torch.no_grad():
        model(numbers(5, 6, WIDTH))
    assert len(model.opsmith.plan.shapes) == 2
    assert len({s.sizes for s in model.opsmith.plan.shapes}) == 2
    assert "2 shape(s)" in repr(model.opsmith)
