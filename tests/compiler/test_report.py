"""A report as it prints: short for any model, what is alike together, what to do next; all of it when asked."""

from __future__ import annotations

import json

import torch
from torch import nn

import opsmith
from opsmith.compiler.find.recognize import Miss
from opsmith.compiler.modules.stand_in import QuantizedLayer
from opsmith.compiler.program.sites import GraphReport, SiteReport
from opsmith.compiler.report import LINES, Report
from tests.compiler.models import UNTIMED, numbers


def _site(i: int, **more: str) -> SiteReport:
    operator = ("linear", "attention", "rms_norm", "rope", "gelu")[i % 5]
    return SiteReport(f"{operator}_{i}", operator, operator, f"(model.py:{i % 7})", False, **more)  # type: ignore[arg-type]


def _large() -> Report:
    """All that can be said, hundreds of times."""
    sites = [_site(i) for i in range(300)]
    sites += [_site(i, status="rolled back", why=f"native: error {i} above the bound 1") for i in range(300)]
    sites += [_site(i, why=f"native: error {i} above the bound 1") for i in range(300)]
    misses = [Miss("rms_norm", f"mul_{i}", "x", "y", f"add_{i}", f"(model.py:{i})") for i in range(300)]
    graphs = [GraphReport(sites, misses, 900), *(GraphReport(left=f"reason {i}") for i in range(50))]
    layers = [QuantizedLayer(f"layer.{i}", "int8", "left", why=f"reason {i % 40}") for i in range(300)]
    packed = [QuantizedLayer(f"packed.{i}", "int8", "packed", 0.01) for i in range(300)]
    slower = [f"eager runs at {i}×9: as it was timed" for i in range(50)]
    breaks = [f"model.py:{i}: Data-dependent branching" for i in range(50)]
    return Report(graphs, [*layers, *packed], slower=slower, advice=["one thing", "another"], breaks=breaks)


def test_thirty_lines_say_the_most_of_any_model() -> None:
    report = _large()
    lines = str(report).splitlines()
    assert len(lines) <= LINES == 30
    assert all(len(line) <= 330 for line in lines)
    starts = (
        "found",
        "quantized",
        "not quantized",
        "rolled back",
        "not the fastest",
        "left",
        "eager runs",
        "near",
    )
    for start in starts:
        assert any(line.startswith(start) for line in lines), start
    assert "(and 59 more)" in str(report)
    assert lines[-1].startswith("next: ")
    assert "report.details()" in str(report)


def test_what_was_proved_is_said_where_no_two_sites_are_alike() -> None:
    site = _site(0)
    site.error, site.bound = 1.0, 4.0
    proved = "proved: 1 sites in float64, 0 as near to eager as one of these; the most is 0.25 of the bound"
    assert proved in str(Report([GraphReport([site], [], 9)]))


def test_details_and_json_are_complete() -> None:
    report = _large()
    text = report.details()
    for site in report.sites:
        assert f"{site.name} {site.where}: {site.status}" in text
        assert site.why in text
    unpacked = [f"not quantized: {layer}" for layer in report.quantized if not layer.of_few_bits]
    assert len(unpacked) == 300
    for line in (*report.misses, *report.quantized_lines, *unpacked, *report.slower, *report.breaks):
        assert line in text
    data = json.loads(json.dumps(report.to_dict()))
    assert sum(len(graph["sites"]) for graph in data["graphs"]) == 900
    assert len(data["rolled_back"]) == len(data["overruled"]) == 300
    assert len(data["quantized"]) == 600


def test_one_of_a_kind_is_told_in_full() -> None:
    report = Report([GraphReport([_site(3, status="rolled back", why="eager: error 2 above the bound 1")])])
    assert f"rolled back: {report.rolled_back[0]}" in str(report).splitlines()
    assert "and" not in str(report).splitlines()[1]


class Deep(nn.Module):
    """Eighteen layers of one kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(18)])
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(18)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def test_a_deep_model_prints_as_a_shallow_one() -> None:
    model = opsmith.optimize(Deep(), numbers(2, 3, 16), config=UNTIMED)
    with torch.no_grad():
        for n in range(4, 12):
            model(numbers(2, n, 16))
    session = model.opsmith
    assert len(str(session.report).splitlines()) <= 6
    assert session.report.details().count("linear_") >= 18
    plan = session.plan
    assert len(plan.shapes) > 2
    assert len(str(plan).splitlines()) <= 30
    assert sum(len(shape.steps) for shape in plan.shapes) >= 18 * 2 * len(
        plan.shapes
    )  # none left out of the file


def test_what_to_do_next() -> None:
    wide = nn.Linear(4096, 4200, bias=False)
    model = opsmith.optimize(wide, numbers(1, 4096), config=UNTIMED, verify=False)
    (weights, unproved) = (
        line for line in str(model.opsmith.report).splitlines() if line.startswith("next: ")
    )
    assert 'quantize="int8"' in weights
    assert "0.069 GB" in weights
    assert "verify=False" in unproved
    opsmith.restore(model)
    model = opsmith.optimize(wide, config=UNTIMED)
    model(numbers(1, 4096)).sum().backward()  # packed weights do not learn
    assert "next: " not in str(model.opsmith.report)
    opsmith.restore(model)
    model = opsmith.optimize(wide, numbers(1, 4096), config=UNTIMED, quantize="int8")
    assert "next: " not in str(model.opsmith.report)


def test_a_site_in_layers_of_pytorchs_alone_is_named_by_its_layer() -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)).eval()
    opsmith.optimize(model, numbers(2, 5, 64), config=UNTIMED)
    where = {site.operator: site.where for site in model.opsmith.report.sites}
    assert where == {"layer_norm": "(1.norm2)", "linear": "(1.linear2)", "attention": "(1.self_attn)"}


class Breaking(nn.Module):
    """A layer in which the model's graph breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.product = nn.RMSNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.product(y if y.sum() < 1e9 else 2 * y)


def test_layers_whose_graphs_are_apart_are_all_counted() -> None:
    model = nn.Sequential(*(Breaking() for _ in range(3))).eval()
    opsmith.optimize(model, torch.randn(2, 8, 64), config=UNTIMED)
    with torch.no_grad():
        model(torch.randn(2, 5, 64))  # the same parts, at other sizes
    assert len(model.opsmith.report.graphs) >= 6
    assert model.opsmith.report.found == {"rms_norm": 3, "linear": 3}
    code = Breaking.forward.__code__
    [said] = model.opsmith.report.breaks
    assert said == f"test_report.py:{code.co_firstlineno + 2}: branching on the value of a tensor"
    for text in (str(model.opsmith.report), model.opsmith.report.details()):
        assert f"the graph breaks at {said}" in text.splitlines()
        assert "next: nothing is found across a break" in text


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


class Looping(nn.Module):
    """A model that is left as a whole: Dynamo begins nowhere in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Product() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[x.mean(-1).isfinite().nonzero(as_tuple=True)].view_as(x)
        return x


def test_a_break_in_a_loop_is_told_though_no_graph_ends_there() -> None:
    model = Looping().eval()
    opsmith.optimize(model, torch.rand(2, 8, 64) + 1, config=UNTIMED)
    assert model.opsmith.report.found["linear"] == 2
    [said] = model.opsmith.report.breaks
    assert said.startswith("Looping: ")
    assert "aten.nonzero" in said
    assert "  " not in said


class LoopingLater(Looping):
    """Whose loop is none that Dynamo leaves, until a call is longer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.shape[1] > 8:
                print(end="")
        return x


def test_a_break_that_a_later_call_meets_is_told_with_what_breaks_there() -> None:
    model = LoopingLater().eval()
    opsmith.optimize(model, torch.rand(2, 8, 64), config=UNTIMED)
    assert model.opsmith.report.breaks == []
    with torch.no_grad():
        model(torch.rand(2, 9, 64))
        model(torch.rand(2, 11, 64))
    [said] = model.opsmith.report.breaks
    assert said.startswith("LoopingLater: ")
    assert "`print`" in said


class Late(Breaking):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.tanh() if x.tanh().sum() < 1e9 else x)


def test_no_line_says_that_a_graph_without_operators_learns_in_eager() -> None:
    model = Late()
    opsmith.optimize(model, torch.randn(2, 8, 64), config=UNTIMED)
    model(torch.randn(2, 8, 64, requires_grad=True)).sum().backward()
    learning = [shape for shape in model.opsmith.plan.shapes if shape.training]
    assert {shape.used for shape in learning} == {True, False}  # the graph before the first break, and others
    assert "eager runs" not in str(model.opsmith.report)
