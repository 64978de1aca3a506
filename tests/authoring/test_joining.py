"""A project joins the house: `optimize` finds it in a model that writes it out, autocast and torch.compile take it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opsmith
import opsmith.operator as cards
from opsmith.authoring import load, new
from opsmith.cli import main
from opsmith.kernels import triton
from opsmith.kernels.compiler import find_compiler
from opsmith.operator import Cost, Make, Sample
from tests.profiler.conftest import fixed_roofs  # noqa: F401  the roofs take seconds to measure

EXAMPLES = Path(__file__).parents[2] / "examples"
HEADS, DIM = 2, 16

native = pytest.mark.skipif(
    not find_compiler() or triton.INTERPRETED, reason="there is no compiler, or the interpreter has the CPU"
)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_REGISTRY", dict(cards._REGISTRY))


@pytest.fixture(scope="module")
def rope(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The project that `opsmith new` writes from the worked example's prototype, loaded for these tests alone."""
    folder = tmp_path_factory.mktemp("joining")
    prototype = folder / "rope.json"
    prototype.write_text((EXAMPLES / "rope_custom.json").read_text().replace("RopeCustom", "RopeJoined"))
    new.create(prototype, folder / "rope_joined", backends=["cpu"])
    yield load(folder / "rope_joined")
    del cards._REGISTRY["rope_joined"]


class Block(nn.Module):
    """A Llama-like block with interleaved rotation, all of it written out."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, l, _ = x.shape
        q, k, v = (t.view(b, l, HEADS, DIM).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, l, -1))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def table(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.arange(length)[:, None] * torch.logspace(0, -2, DIM // 2).repeat_interleave(2)
    return angles.cos(), angles.sin()


@native
def test_optimize_puts_the_operator_into_a_llama_block(rope: Any) -> None:
    torch.manual_seed(0)
    model = Block().eval()
    example = (torch.randn(2, 12, HEADS * DIM), *table(12))
    with torch.no_grad():
        expected = model(*example)
        opsmith.optimize(model, example, config=opsmith.Config(pin={"rope_joined": "native"}))
        torch.testing.assert_close(model(*example), expected, rtol=1e-4, atol=1e-5)
    found = model.opsmith.report.found
    assert found["rope_joined"] == 2  # queries and keys; ours has precedence over the house's own rope
    assert model.opsmith.report.rolled_back == []
    steps = [
        step for shape in model.opsmith.plan.shapes for step in shape.steps if step.operator == "rope_joined"
    ]
    assert [step.implementation for step in steps] == ["native", "native"]
    opsmith.restore(model)


@native
def test_select_measures_its_implementations(rope: Any) -> None:
    model = Block().eval()
    with torch.no_grad():
        opsmith.optimize(model, (torch.randn(2, 64, HEADS * DIM), *table(64)))
    steps = {step.site: step for shape in model.opsmith.plan.shapes for step in shape.steps}
    times = steps["rope_joined_0"].microseconds
    assert set(times) == {"native", "eager"}
    assert all(t > 0 for t in times.values())
    opsmith.restore(model)


@native
def test_profile_knows_its_kernels(rope: Any, usual_recorder: None) -> None:
    """A kernel of a project's own that a program calls by itself has the class and the cost of its card."""
    x, (cos, sin) = torch.randn(2, HEADS, 256, DIM), table(256)
    report = opsmith.profile(lambda x: rope.rope_joined(x, cos, sin), (x,), budget_s=0.05)
    (row,) = [r for r in report.phases[0].rows if "rope_joined" in r.operator]
    assert (row.kind, row.implementation, row.classified, row.known) == ("RoPE", "native", True, True)
    expected = rope.CARD.cost(x, cos, sin)
    assert (row.flops, row.bytes) == (expected.flops, expected.min_bytes)


@native
def test_autocast_and_torch_compile_take_it(rope: Any) -> None:
    q = torch.randn(2, HEADS, 40, DIM, requires_grad=True)
    linear = nn.Linear(DIM, DIM)
    cos, sin = table(40)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = rope.rope_joined(
                linear(x), cos, sin
            )  # bfloat16 by float32, as a model mixes them
        return y.float()

    expected = linear(q) * cos + turned(linear(q)) * sin
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        got = fn(q)
        torch.testing.assert_close(got, expected, rtol=0.02, atol=0.05)
        (gradient,) = torch.autograd.grad(got.square().sum(), q)
        (exact,) = torch.autograd.grad(expected.square().sum(), q, retain_graph=True)
        torch.testing.assert_close(gradient, exact, rtol=0.05, atol=0.1)


def test_a_card_without_patterns_is_recognized_by_its_reference() -> None:
    def samples(make: Make) -> Iterator[Sample]:
        for rows, n in ((2, 6), (5, 8)):
            yield Sample(f"{rows}x{n}", (make(rows, n), make(n)), {"slope": 0.5})
        yield Sample("empty", (make(0, 6), make(6)), {"slope": 0.5})

    @opsmith.operator(
        kind="activation",
        cost=lambda x, w, slope=0.1: Cost(3 * x.numel(), 2 * x.nbytes + w.nbytes),
        samples=samples,
    )
    def bent(x: torch.Tensor, w: torch.Tensor, slope: float = 0.1) -> torch.Tensor:
        return torch.exp(slope * x) * torch.tanh(x) * w

    (pattern,) = bent.patterns
    assert pattern.inputs["x"] == ("s0", "s1")
    assert pattern.inputs["w"] == ("s1",)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x * 0.25) * self.w * torch.tanh(x) + 1

    model, x = Model(), torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x)
        opsmith.optimize(model, x)
        torch.testing.assert_close(model(x), expected)
    assert model.opsmith.report.found == {"bent": 1}
    opsmith.restore(model)


def test_code_runs_only_where_its_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder beside the one that runs a command is not looked into, nor is one that only sounds like an operator."""
    for name in ("gelu", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operator.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # as `python -c` and `python -m` have it
    for arguments, ran in ((["ops", "gelu"], False), (["ops"], False), (["ops", "./other"], True)):
        try:
            said = str(main(arguments))
        except SystemExit as stopped:
            said = str(stopped)
        assert ("it ran" in said + capsys.readouterr().err) is ran, arguments
