"""Implementations are chosen by measurement, remembered, pinned and forbidden; the rest are refused with reasons."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opsmith
from opsmith import measure
from opsmith.compiler import Config, kept
from opsmith.compiler.choose import inductor, select
from opsmith.compiler.choose.select import Selector, contest
from opsmith.compiler.choose.weights import Weights
from opsmith.compiler.kept import TIMES_SCHEMA, TuningCache
from opsmith.kernels import libraries
from opsmith.operator import Implementation, registry
from tests.compiler.models import WIDTH, Encoder, Feed, Truth, ids, numbers, padding, seeded


def _call(rows: int = 6) -> dict[str, Any]:
    return {"x": numbers(rows, WIDTH), "weight": numbers(WIDTH), "bias": numbers(WIDTH)}


class _Measured:
    """Counts measurements, and answers with times of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[str, float]) -> None:
        self.calls = 0
        self.times = times
        monkeypatch.setattr(Selector, "_measure", self._measure)

    def _measure(self, call: Any, able: dict[str, Any], *_: Any) -> tuple[dict[str, float], bool]:
        self.calls += 1
        return {name: self.times.get(name, 1.0) for name in able}, True


def _choose(selector: Selector, call: dict[str, Any], may_measure: bool = True) -> Any:
    return selector.choose(registry()["layer_norm"], "layer_norm_0", call, Weights(), may_measure=may_measure)


def test_the_fastest_wins_and_the_reason_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    for winner, loser in (("native", "eager"), ("eager", "native")):
        _Measured(monkeypatch, {winner: 1e-3, loser: 3e-3})
        choice = _choose(Selector(Config(), TuningCache(Path("/nonexistent/tuning.json"))), _call())
        assert choice.implementation == winner
        assert choice.reason == f"3.00x as fast as {loser}"
        assert choice.times == {winner: 1e-3, loser: 3e-3}


def test_real_measurements_name_every_contestant() -> None:
    choice = _choose(Selector(Config()), _call())
    assert choice.implementation in choice.times
    assert set(choice.times) == {i.name for i in registry()["layer_norm"].candidates(**_call())[0]}
    assert all(0 < t < 1 for t in choice.times.values())


def test_who_takes_seconds_is_called_twice_and_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    card = registry()["layer_norm"]

    def slow(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(None)
        time.sleep(0.2)
        return card.reference(*args, **kwargs)

    able = {i.name: i for i in card.candidates(**_call())[0]}
    able["eager"] = Implementation("eager", slow)
    times, _ = Selector(Config())._measure(_call(), able, {}, Weights(), True)
    assert len(calls) == 2
    assert times.keys() == able.keys()
    assert times["eager"] >= 0.2 > min(times.values())


def test_a_weight_is_as_cold_as_the_model_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other, x = (torch.nn.Parameter(numbers(512, 1024)) for _ in range(3))
    card, weights = registry()["linear"], Weights([mine, other])
    weights.take([mine, other])
    call = {"x": x.detach(), "weight": mine.detach(), "bias": None, "activation": None, "residual": None}
    read: list[int] = []
    asked: list[bool] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for a in args:
                with contextlib.suppress(AttributeError, RuntimeError):  # no tensor, or one of a rehearsal
                    read.append(a.data_ptr())
            return func(*args, **(kwargs or {}))

    def quick(contestants: Any, flush: Any = None, **options: Any) -> Any:
        asked.append(flush is not None)
        for cool in (flush or {}).values():
            with Reads():
                cool()
        return measure.compare(contestants, rounds=1)

    monkeypatch.setattr(measure, "quick", quick)
    monkeypatch.setattr(measure.Comparison, "disturbed", False)  # however busy the machine
    selector = Selector(Config(tune=True, inductor=False))
    selector.choose(card, "linear_0", call, weights, may_measure=True)
    assert asked == [True]
    # The other weight, then a copy of this one: which itself has not been read since.
    assert other.data_ptr() in read
    assert mine.data_ptr() not in read
    assert any(key.endswith(" as=new among=2^23") for key, _ in selector.cache.items())
    selector.choose(card, "linear_1", call | {"weight": numbers(512, 1024)}, weights, may_measure=True)
    assert asked == [True, False]
    most = measure.describe().last_level_cache
    huge = torch.nn.Parameter(torch.empty(most // 4 + 1, 1))
    weights.take([mine, huge])
    assert (weights.among(call), weights.among({"weight": huge})) == (most, 0)


def test_what_was_measured_is_remembered_on_disk(monkeypatch: pytest.MonkeyPatch, tuning_cache: Path) -> None:
    counter = _Measured(monkeypatch, {"native": 1e-3})
    first = Selector(Config())
    _choose(first, _call())
    first.cache.save()
    again = Selector(Config())
    assert _choose(again, _call()).implementation == "native"
    assert counter.calls == 1
    _choose(again, _call(rows=7))  # other sizes are another call
    assert counter.calls == 2
    (file,) = tuning_cache.glob("*.json")
    assert contest(registry()["layer_norm"], _call(), new=True) in json.loads(file.read_text())["entries"]


def test_sizes_that_may_not_be_measured_use_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = _Measured(monkeypatch, {"native": 2.0, "eager": 1.0})
    selector = Selector(Config())
    untouched = _choose(selector, _call(), may_measure=False)
    assert untouched.implementation == "native"
    assert "nothing measured yet" in untouched.reason
    _choose(selector, _call(rows=4))
    counter.times = {"native": 1.0, "eager": 2.0}
    _choose(selector, _call(rows=400))
    assert _choose(selector, _call(rows=6), may_measure=False).implementation == "eager"
    assert _choose(selector, _call(rows=300), may_measure=False).implementation == "native"
    across = _call(rows=300) | {"x": numbers(WIDTH, 300).T}  # in another layout
    assert _choose(selector, across, may_measure=False).reason == "fastest at the nearest shape measured"
    # Nothing is known of another dtype.
    half = {name: t.bfloat16() for name, t in _call(rows=300).items()}
    assert "nothing measured yet" in _choose(selector, half, may_measure=False).reason
    assert counter.calls == 2


@pytest.mark.parametrize(("spread", "disturbed"), [(-1.0, False), (1e9, True)], ids=["spread", "steady"])
def test_a_disturbed_measurement_serves_this_run_only(
    monkeypatch: pytest.MonkeyPatch, spread: float, disturbed: bool
) -> None:
    monkeypatch.setattr(measure, "CONCLUDES_NOTHING", spread)
    monkeypatch.setattr(measure.Comparison, "disturbed", disturbed)
    selector = Selector(Config())
    assert _choose(selector, _call()).times
    assert selector.cache.get(contest(registry()["layer_norm"], _call(), new=True)) is None
    monkeypatch.setattr(Selector, "_measure", None)  # measuring again would raise
    assert _choose(selector, _call()).times
    assert _choose(selector, _call(rows=9), may_measure=False).reason.startswith("fastest at the nearest")


def test_of_two_disturbed_measurements_the_best_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([{"native": 4.0, "eager": 2.0}, {"native": 1.0, "eager": 3.0}])
    monkeypatch.setattr(Selector, "_measure", lambda *_: (next(runs), False))
    for winner in ("eager", "native", "native"):  # a third measurement would raise
        selector = Selector(Config())
        choice = _choose(selector, _call())
        assert choice.implementation == winner
        selector.cache.save()
    assert choice.times == {"native": 1.0, "eager": 2.0}
    assert next(runs, None) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"schema": 99, "entries": {}}',
        '{"schema": SCHEMA, "scope": "SCOPE", "entries": []}',
        '{"schema": SCHEMA, "scope": "SCOPE", "entries": {"KEY": {}}}',
        '{"schema": SCHEMA, "scope": "SCOPE", "entries": {"KEY": {"native": "fast"}}}',
        '{"schema": SCHEMA, "scope": "SCOPE", "entries": {"KEY": {"native": 0.0, "eager": NaN}}}',
        '{"schema": SCHEMA, "scope": "SCOPE", "entries": {"KEY": {"native": -1.0, "eager": true}}}',
        '{"schema": SCHEMA, "scope": "elsewhere", "entries": {"KEY": {"native": 1.0, "eager": 2.0}}}',
        "\x00\x01",
        "[" * 50_000,
    ],
)
def test_a_damaged_file_counts_as_empty(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    counter = _Measured(monkeypatch, {"eager": 0.5})
    path = tmp_path / "tuning.json"
    key = json.dumps(contest(registry()["layer_norm"], _call(), new=True))[1:-1]
    path.write_text(
        text.replace("SCHEMA", str(TIMES_SCHEMA))
        .replace("SCOPE", TuningCache(path)._scope)
        .replace("KEY", key)
    )
    selector = Selector(Config(), TuningCache(path))
    assert _choose(selector, _call()).implementation == "eager"
    assert counter.calls == 1
    selector.cache.save()
    assert TuningCache(path).get(contest(registry()["layer_norm"], _call(), new=True)) is not None


def test_a_file_that_says_otherwise_is_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The counterpart of the test above: the same file, undamaged."""
    counter = _Measured(monkeypatch, {})
    path = tmp_path / "tuning.json"
    entries = {contest(registry()["layer_norm"], _call(), new=True): {"native": 2.0, "eager": 1.0}}
    path.write_text(
        json.dumps({"schema": TIMES_SCHEMA, "scope": TuningCache(path)._scope, "entries": entries})
    )
    assert _choose(Selector(Config(), TuningCache(path)), _call()).implementation == "eager"
    assert counter.calls == 0


def test_times_of_other_code_count_for_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Operators call their kernels by way of Python, which decides as much about their time."""
    path = tmp_path / "tuning.json"
    cache = TuningCache(path)
    cache.put("a call", {"native": 1.0})
    cache.save()
    assert TuningCache(path) == {"a call": {"native": 1.0}}
    monkeypatch.setattr(kept, "code", lambda *folders: f"edited {folders}")
    assert TuningCache(path) == {}


@pytest.mark.parametrize("folders", [(), ("call", "ops")], ids=str)
def test_code_is_all_that_is_written_in_a_folder(
    folders: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    package, read, read_text = Path(opsmith.__file__).parent, set(), Path.read_text

    def noted(self: Path, *args: Any, **kwargs: Any) -> str:
        read.add(self)
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", noted)
    kept.code.__wrapped__(*folders)
    every = {file for folder in folders or ("",) for file in (package / folder).rglob("*.py")}
    assert read == every
    assert package / "ops" / "linear" / "__init__.py" in every


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = TuningCache(tmp_path / "file" / "tuning.json")
    cache.put("a call", {"native": 1.0})
    cache.save()
    assert cache.get("a call") == {"native": 1.0}


def test_two_writers_keep_each_others_results(tmp_path: Path) -> None:
    one, two = TuningCache(tmp_path / "t.json"), TuningCache(tmp_path / "t.json")
    one.put("a", {"native": 1.0})
    two.put("b", {"native": 2.0})
    one.save()
    two.save()
    assert dict(TuningCache(tmp_path / "t.json").items()) == {"a": {"native": 1.0}, "b": {"native": 2.0}}


def test_pins_and_forbids_by_operator_and_by_site() -> None:
    def chosen(**options: Any) -> Any:
        return _choose(Selector(Config(tune=False, **options)), _call())

    assert chosen().implementation == "native"
    for where in ("layer_norm", "layer_norm_0"):
        pinned = chosen(pin={where: "eager"})
        assert (pinned.implementation, pinned.reason) == ("eager", "pinned by the configuration")
        forbidden = chosen(forbid={where: ["native"]})
        assert forbidden.implementation == "eager"
        assert forbidden.refused["native"] == "forbidden by the configuration"
    assert chosen(pin={"layer_norm_7": "eager"}).implementation == "native"
    # Eager runs whatever the model runs; a model can't be left without an implementation.
    assert chosen(forbid={"layer_norm": ["native", "eager"]}).implementation == "eager"
    assert chosen(pin={"layer_norm": "eager", "layer_norm_0": "native"}).implementation == "native"


def test_a_pin_that_cannot_run_says_so() -> None:
    call = {name: t.double() for name, t in _call().items()}
    choice = _choose(Selector(Config(tune=False, pin={"layer_norm": "native"})), call)
    assert choice.implementation == "eager"
    assert choice.refused["pin"].startswith("native can't run this call: the kernels take float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pin": {"layer_norm": "fastest"}},
            "pin: layer_norm has no implementation 'fastest'; it has native",
        ),
        ({"pin": {"layernorm": "native"}}, "pin: there is no operator 'layernorm'; the operators are"),
        ({"forbid": {"linear_0": ["mkl"]}}, "forbid: linear has no implementation 'mkl'; it has"),
        ({"forbid": {"linear_first": ["native"]}}, "forbid: there is no operator 'linear_first'"),
    ],
)
def test_unknown_names_are_errors_before_anything_is_done(options: Any, message: str) -> None:
    model = seeded(Feed)
    with pytest.raises(ValueError, match=message):
        opsmith.optimize(model, numbers(3, 4, WIDTH), config=Config(**options), dtype="bfloat16")
    assert not hasattr(model, "opsmith")
    assert model.up.weight.dtype == torch.float32


def test_an_optimized_model_measures_once_and_then_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = _Measured(monkeypatch, {})
    for _ in range(2):
        model = opsmith.optimize(seeded(Feed), numbers(3, 4, WIDTH), config=Config())
        assert counter.calls == 3  # linear with gelu, linear, layer_norm
        opsmith.restore(model)


def test_every_example_is_measured_and_other_sizes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = _Measured(monkeypatch, {})
    model = seeded(Feed)
    truth = Truth(model)
    opsmith.optimize(model, [numbers(3, 4, WIDTH), numbers(5, 6, WIDTH)], config=Config())
    assert counter.calls == 6
    assert len(model.opsmith.graphs) == 1
    with torch.no_grad():
        truth.check(model(numbers(7, 2, WIDTH)), numbers(7, 2, WIDTH))
    assert counter.calls == 6
    assert len(model.opsmith.plan.shapes) == 3
    assert model.opsmith.plan.shapes[2].note.startswith("not measured, as at ")


@pytest.fixture(autouse=True)
def _nothing_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine takes for calls as small as these, Inductor competes."""
    monkeypatch.setattr(inductor, "CALL", 0.0)


def test_inductor_competes_with_nothing_that_is_over_before_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inductor, "CALL", 10.0)
    monkeypatch.setattr(torch, "compile", lambda fn, **_: lambda **call: fn(**call))
    refused = _choose(Selector(Config(inductor=True)), _call()).refused["inductor"]
    assert refused.startswith("not tried: another takes less than the ")
    pinned = Config(inductor=True, pin={"layer_norm": "inductor"})
    assert _choose(Selector(pinned), _call()).implementation == "inductor"


def test_a_short_call_stays_short_in_the_next_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Near the limit it would be longer now and then, and compiled each time."""
    monkeypatch.setattr(inductor, "CALL", 10.0)
    cache = TuningCache(tmp_path / "tuning.json")
    cache.put(contest(registry()["layer_norm"], _call(), new=True), {"native": 2.0, "eager": 1.0})
    monkeypatch.setattr(select, "_short", lambda *_: False)
    refused = _choose(Selector(Config(inductor=True), cache), _call()).refused["inductor"]
    assert refused.startswith("not tried: another takes less than the ")


def test_inductor_competes() -> None:
    """With a real compilation; the operators that it has no code of its own for say so."""
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    opsmith.optimize(model, x, config=Config(inductor=True))
    steps = {s.operator: s for s in model.opsmith.plan.shapes[0].steps}
    assert "inductor" in steps["layer_norm"].microseconds
    assert "the same library" in steps["linear"].refused["inductor"]
    with torch.no_grad():
        truth.check(model(x), x)
    opsmith.restore(model)
    pinned = Config(tune=False, pin={"layer_norm": "inductor"})
    opsmith.optimize(model, x, config=pinned)
    (step,) = [s for s in model.opsmith.plan.shapes[0].steps if s.operator == "layer_norm"]
    assert step.implementation == "inductor"
    saved = model.opsmith.plan
    with torch.no_grad():
        truth.check(model(x), x)
        truth.check(model(numbers(5, 6, WIDTH)), numbers(5, 6, WIDTH))
    opsmith.optimize(model, x, config=Config(tune=False), plan=saved)
    assert saved.diff(model.opsmith.plan)[1:] == saved.diff(model.opsmith.plan)[:0]


def test_inductor_compiles_nothing_where_the_choice_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor.Inductor, "enter", lambda *_, **__: pytest.fail("Inductor was entered"))
    pinned = Config(inductor=True, pin={"layer_norm": "native"})
    choice = _choose(Selector(pinned), _call())
    assert (choice.implementation, choice.refused["inductor"]) == (
        "native",
        "not tried: the choice is made already",
    )


def test_inductor_that_fails_or_has_no_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        def run(**___: Any) -> None:
            raise RuntimeError("no compiler\nanywhere")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    _Measured(monkeypatch, {})
    monkeypatch.setattr(inductor, "CALL", 0.0)  # no call is too short to win
    selector = Selector(Config(inductor=True))
    assert _choose(selector, _call()).refused["inductor"] == (
        "failed to compile: raised RuntimeError: no compiler"
    )
    late = Selector(Config(inductor=True, inductor_seconds=0.0))
    assert "is spent" in _choose(late, _call(rows=7)).refused["inductor"]
    untimed = Selector(Config(inductor=True, tune=False))  # where nothing is timed, it could win nothing
    assert "inductor" not in _choose(untimed, _call()).refused


def test_the_budget_is_looked_at_before_every_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one definition is compiled anew for other inputs; what is pinned is compiled whatever it takes."""
    monkeypatch.setattr(torch, "compile", lambda fn, **_: lambda **call: time.sleep(0.02) or fn(**call))
    _Measured(monkeypatch, {"inductor": 0.5})
    selector = Selector(Config(inductor=True, inductor_seconds=0.01))
    assert _choose(selector, _call()).implementation == "inductor"
    assert "is spent" in _choose(selector, _call(rows=7)).refused["inductor"]
    assert _choose(selector, _call()).implementation == "inductor"  # it has run
    pinned = Config(inductor_seconds=0.0, pin={"layer_norm": "inductor"})
    assert _choose(Selector(pinned), _call(), may_measure=False).implementation == "inductor"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere Inductor asks the processor only")
def test_our_compilations_pick_what_trials_would_and_leave_those_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine seconds of trying out the C++ compiler: spared where we compile, not where somebody else does."""
    from torch._inductor import cpu_vec_isa

    tried: list[str] = []  # instruction sets that PyTorch's vector classes were compiled for

    def check(self: Any, code: str) -> bool:
        tried.extend([str(self)] * (code == self._avx_code))
        return True

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check)
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()  # type: ignore[attr-defined]
    inductor.forget_trials()
    try:
        with inductor.compiling(general=True):
            trusted = str(cpu_vec_isa.pick_vec_isa())
        assert tried == []
        assert str(cpu_vec_isa.pick_vec_isa()) == trusted in tried
        known = cpu_vec_isa.valid_vec_isa_list()
        with inductor.compiling(general=True):
            assert cpu_vec_isa.valid_vec_isa_list() is known
        assert cpu_vec_isa.valid_vec_isa_list() is known
    finally:
        cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()  # type: ignore[attr-defined]
        inductor.forget_trials()


def _slow(implementation: Implementation, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an implementation's Python take so long."""
    fn = implementation.fn

    def slow(*args: Any, **call: Any) -> Any:
        time.sleep(seconds)
        return fn(*args, **call)

    monkeypatch.setitem(implementation.__dict__, "fn", slow)


def test_contestants_are_timed_as_a_program_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program calls kernels without the Python before them, however long that takes, and eager with it."""
    if not libraries.load():
        pytest.skip("there are no kernels here")
    card = registry()["layer_norm"]
    _slow(card.implementation("native"), 0.05, monkeypatch)
    _slow(card.implementation("eager"), 0.005, monkeypatch)
    model = opsmith.optimize(seeded(Encoder), (ids(2, 5), padding(2, 5)), config=Config(inductor=False))
    steps = [s for s in model.opsmith.plan.shapes[0].steps if s.operator == "layer_norm"]
    # All but the last, whose result is the caller's and therefore new: there both take their Python.
    assert [s.implementation for s in steps] == ["native"] * (len(steps) - 1) + ["eager"]
    assert all(s.microseconds["native"] < 5e3 for s in steps[:-1])
    assert model.opsmith.plan.source.count("opsmith_layer_norm") == len(steps) - 1


def test_a_measurement_speaks_for_calls_of_its_kind_only(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = _Measured(monkeypatch, {"native": 1.0, "eager": 2.0})
    selector, card = Selector(Config()), registry()["layer_norm"]

    def choose(new: bool, may_measure: bool = True) -> Any:
        return selector.choose(card, "layer_norm_0", _call(), Weights(), may_measure=may_measure, new=new)

    assert choose(new=False).implementation == "native"
    counter.times = {"native": 2.0, "eager": 1.0}
    assert "nothing measured yet" in choose(new=True, may_measure=False).reason
    assert choose(new=True).implementation == "eager"
    assert choose(new=False).implementation == "native"
    assert counter.calls == 2
