"""A study is not run again where it would come out the same, and is where anything could come out otherwise."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import opsmith
from opsmith import measure
from opsmith.compiler import Config
from opsmith.compiler.choose.select import Selector
from opsmith.compiler.program import sites
from opsmith.compiler.program.study import Study
from opsmith.compiler.prove import proofs
from opsmith.operator import Implementation, registry
from tests.compiler.models import UNTIMED, WIDTH, Feed, Truth, numbers, seeded


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Study]:
    """The studies that are run, in order."""
    studies: list[Study] = []
    run = Study.run

    def counted(study: Study) -> Any:
        studies.append(study)
        return run(study)

    monkeypatch.setattr(Study, "run", counted)
    return studies


def _optimize(model: Any, *inputs: torch.Tensor, config: Config = UNTIMED, **options: Any) -> Any:
    torch._dynamo.reset()  # as a new process would begin
    return opsmith.optimize(copy.deepcopy(model), list(inputs), config=config, **options)


def _found(model: Any) -> Any:
    """All that an optimized model says of itself, but for times."""
    shapes = [(s.sizes, [asdict(step) for step in s.steps], s.source) for s in model.opsmith.plan.shapes]
    return shapes, [asdict(g) for g in model.opsmith.report.graphs]


def test_a_second_process_takes_the_study_over(ran: list[Study]) -> None:
    model, examples = seeded(Feed), (numbers(3, 4, WIDTH), numbers(2, 5, WIDTH))
    first = _optimize(model, *examples)
    assert len(ran) == 2
    again = _optimize(model, *examples)
    assert len(ran) == 2
    assert _found(again) == _found(first)
    for x in (*examples, numbers(7, 1, WIDTH)):
        with torch.no_grad():
            Truth(model).check(again(x), x)
    # Of the examples only the known one is taken over, and one behind another is not one that comes first.
    _optimize(model, examples[1])
    assert len(ran) == 3


def test_timed_choices_are_taken_over(ran: list[Study], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CONCLUDES_NOTHING", 1e9)  # however busy the machine
    model, x, config = seeded(Feed), numbers(3, 4, WIDTH), Config(inductor=False)
    first = _optimize(model, x, config=config)
    monkeypatch.setattr(Selector, "choose", None)  # choosing again would raise
    again = _optimize(model, x, config=config)
    assert len(ran) == 1
    assert _found(again) == _found(first)
    assert any(step.microseconds for step in again.opsmith.plan.shapes[0].steps)


def test_parts_are_taken_over(ran: list[Study], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "settle", lambda site, choice, *more: (bool(site.parts), choice))
    model, x = seeded(_Loss), numbers(6, WIDTH)
    first = _optimize(model, x)
    assert ran[0].apart
    monkeypatch.setattr(sites, "settle", None)
    again = _optimize(model, x)
    assert len(ran) == 1
    assert _found(again) == _found(first)


class _Loss(torch.nn.Module):
    """A layer whose result only the loss reads: one operator, or two."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, 50)
        self.register_buffer("labels", torch.arange(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x), self.labels)


def _weight(model: Any, x: torch.Tensor, options: dict[str, Any]) -> None:
    next(model.parameters()).data.view(-1)[0] += 1e-6


def _input(model: Any, x: torch.Tensor, options: dict[str, Any]) -> None:
    x.view(-1)[-1] += 1e-6


def _graph(model: Any, x: torch.Tensor, options: dict[str, Any]) -> None:
    model.norm.eps = 2e-5


def _settings(model: Any, x: torch.Tensor, options: dict[str, Any]) -> None:
    options["config"] = Config(tune=False, pin={"layer_norm": "eager"})


def _plan(model: Any, x: torch.Tensor, options: dict[str, Any]) -> None:
    plan = copy.deepcopy(options.pop("was"))
    plan.shapes[0].steps[-1].implementation = "eager"
    options["plan"] = plan


@pytest.mark.parametrize(
    "change", [_weight, _input, _graph, _settings, _plan], ids=lambda f: f.__name__.strip("_")
)
def test_what_differs_is_studied(change: Callable[..., None], ran: list[Study]) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    options: dict[str, Any] = {"was": _optimize(model, x).opsmith.plan}
    change(model, x, options)
    options.pop("was", None)
    _optimize(model, x, **options)
    assert len(ran) == 2


@pytest.mark.parametrize("attribute", ["_code", "_written"])
def test_other_code_is_studied(attribute: str, ran: list[Study], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    was = getattr(proofs, attribute)
    other = {"_code": lambda: "edited", "_written": lambda gm: [*was(gm), "another constant"]}
    monkeypatch.setattr(proofs, attribute, other[attribute])
    _optimize(model, x)
    assert len(ran) == 2


def test_another_contestant_is_studied(ran: list[Study], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    card = registry()["layer_norm"]
    own = Implementation("own", lambda **call: card.reference(**call))
    monkeypatch.setattr(card, "implementations", [*card.implementations, own])
    _optimize(model, x)
    closed = replace(own, available=lambda: "not today")
    monkeypatch.setattr(card, "implementations", [*card.implementations[:-1], closed])
    _optimize(model, x)
    assert len(ran) == 3


@pytest.mark.parametrize("sort", ["other code", "not repeatable", "raises", "rolled back"])
def test_what_may_come_out_otherwise_is_studied_each_time(
    sort: str, ran: list[Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    card = registry()["layer_norm"]
    able = next(i for i in card.implementations if i.name == "eager")
    first = {
        "other code": replace(able, name="own", fn=lambda **call: card.reference(**call)),
        "not repeatable": replace(able, name="shaky", repeatable=False),
        "raises": replace(able, name="broken", fn=_from_here(lambda **call: 1 / 0)),
        "rolled back": replace(able, fn=_from_here(lambda x, *_, **__: x * 1.5)),
    }[sort]
    rest = [i for i in card.implementations if i.name != first.name] if sort != "rolled back" else []
    monkeypatch.setattr(card, "implementations", [first, *rest])
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    for _ in range(2):
        _optimize(model, x)
    assert len(ran) == 2


def _from_here(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that passes for one of this package's."""
    fn.__module__ = "opsmith.ops.planted"
    return fn


def test_what_failed_its_proof_stays_out(ran: list[Study], monkeypatch: pytest.MonkeyPatch) -> None:
    card = registry()["layer_norm"]
    wrong = Implementation("wrong", _from_here(lambda x, *_, **__: x * 1.5))
    monkeypatch.setattr(card, "implementations", [wrong, *card.implementations])
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    first = _optimize(model, x)
    again = _optimize(model, x)
    assert len(ran) == 1
    assert _found(again) == _found(first)
    (why,) = [s.why for s in again.opsmith.report.graphs[0].kept if s.operator == "layer_norm"]
    assert why.startswith("wrong: error ")
    with torch.no_grad():
        Truth(model).check(again(x), x)
        Truth(model).check(again(x[:1]), x[:1])


def test_a_guess_is_studied_again(ran: list[Study], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "CONCLUDES_NOTHING", -1.0)  # other work disturbs every measurement
    model, x, config = seeded(Feed), numbers(3, 4, WIDTH), Config(inductor=False)
    for studies in (1, 2, 2):  # the second measurement is kept
        _optimize(model, x, config=config)
        assert len(ran) == studies


def test_what_inductor_had_no_time_for_is_studied_again(
    ran: list[Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "CONCLUDES_NOTHING", 1e9)
    model, x, config = seeded(Feed), numbers(3, 4, WIDTH), Config(inductor=True, inductor_seconds=0.0)
    for _ in range(2):
        _optimize(model, x, config=config)
    assert len(ran) == 2


def test_what_inductor_compiles_is_not_ours() -> None:
    reference = registry()["layer_norm"].reference
    assert proofs._ours(reference)
    assert not proofs._ours(torch.compile(reference, dynamic=True))


def test_without_proofs_nothing_is_taken_over(ran: list[Study], tuning_cache: Path) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    (file,) = tuning_cache.glob("proofs-*.json")
    file.unlink()
    _optimize(model, x)
    assert len(ran) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"form": "', '"form": "un', 1),
        lambda text: text.replace('"choice"', '"choices"', 1),
        lambda text: json.dumps({**json.loads(text), "scope": "elsewhere"}),
    ],
    ids=["empty", "half", "form", "field", "scope"],
)
def test_a_damaged_file_is_no_study(
    damage: Callable[[str], str], ran: list[Study], tuning_cache: Path
) -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    (file,) = tuning_cache.glob("studies-*.json")
    file.write_text(damage(file.read_text()))
    _optimize(model, x)
    assert len(ran) == 2
