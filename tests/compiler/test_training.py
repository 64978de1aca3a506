"""An optimized model trains as before, and so does `torch.compile(model, backend="opsmith")`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler import Config
from opsmith.compiler.choose import worth
from tests.compiler.models import (
    HEADS,
    UNTIMED,
    WHOLE_MODEL,
    WIDTH,
    Encoder,
    Feed,
    Truth,
    ids,
    numbers,
    padding,
    seeded,
    widened,
)


def _gradients(model: Any, run: Callable[..., torch.Tensor], *inputs: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    y = run(*inputs)
    weight = torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view_as(y)
    (y * weight.to(y.dtype)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _check_gradients(truth: Truth, got: dict[str, torch.Tensor], *inputs: Any) -> None:
    eager = _gradients(truth.eager, truth.eager, *inputs)
    exact = _gradients(truth.exact, truth.exact, *[widened(i) for i in inputs])
    assert got.keys() == eager.keys() == exact.keys()
    scale = max(float(t.abs().max()) for t in exact.values())
    for name, gradient in got.items():
        # A gradient that is zero but for rounding (a key's bias) is measured by what it is rounded from.
        floor = torch.full((1,), scale * 1e-2, dtype=torch.float64)
        padded = [
            torch.cat([t.detach().flatten().double(), floor]) for t in (gradient, eager[name], exact[name])
        ]
        verdict = WHOLE_MODEL.check(padded[0].to(gradient.dtype), padded[1].to(gradient.dtype), padded[2])
        assert verdict.ok, f"{name}: {verdict.why}"


def _optimize(model: Any, *inputs: Any) -> Any:
    return opsmith.optimize(model, inputs, config=UNTIMED)


def _compile(model: Any, *inputs: Any) -> Any:
    return torch.compile(model, backend="opsmith", options={"tune": False})


@pytest.mark.parametrize("how", [_optimize, _compile], ids=["optimize", "torch.compile"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gradients_are_those_of_eager(how: Callable[..., Any], training: bool) -> None:
    model = seeded(lambda: Encoder(layers=1)).train(training)
    truth = Truth(model)
    inputs = (ids(3, 9), padding(3, 9))
    fast = how(model, *inputs)
    for batch, length in [(3, 9), (2, 6)]:
        inputs = (ids(batch, length), padding(batch, length))
        _check_gradients(truth, _gradients(model, fast, *inputs), *inputs)
    with torch.no_grad():
        truth.check(fast(*inputs), *inputs)


def test_gradients_of_inputs_and_of_frozen_parts() -> None:
    model = seeded(Feed)
    model.up.requires_grad_(False)
    truth = Truth(model)
    x = numbers(3, 4, WIDTH)
    _optimize(model, x)
    got = _gradients(model, model, x)
    assert set(got) == {"down.weight", "down.bias", "norm.weight", "norm.bias"}
    _check_gradients(truth, got, x)
    leaves = [x.clone().requires_grad_() for _ in range(2)] + [x.double().requires_grad_()]
    for leaf, m in zip(leaves, (model, truth.eager, truth.exact), strict=True):
        m(leaf).square().sum().backward()
    gradients: list[Any] = [leaf.grad for leaf in leaves]
    verdict = WHOLE_MODEL.check(*gradients)
    assert verdict.ok, verdict.why


@pytest.mark.parametrize("fill", [-1e4, torch.finfo(torch.float32).min])
def test_rows_of_scores_that_are_filled_in_wholly_teach_nothing(fill: float) -> None:
    class Filled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all, self.bias = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(numbers(6, 6))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            q, k, v = self.all(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.transpose(-1, -2) * 0.5 + self.bias).masked_fill(~keep, fill)
            y: torch.Tensor = torch.softmax(scores, -1) @ v
            return y

    model, x, keep = seeded(Filled), numbers(2, 6, WIDTH), torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    truth = Truth(model)
    _optimize(model, x, keep)
    assert model.opsmith.report.found["attention"] == 1
    keep[0, 0, 4:] = False
    with torch.no_grad():
        truth.check(model(x, keep), x, keep)
    for learned in (True, False):  # a bias that learns has another way to its gradient
        for m in (model, truth.eager, truth.exact):
            m.bias.requires_grad_(learned)
        _check_gradients(truth, _gradients(model, model, x, keep), x, keep)


def test_training_steps_follow_eager_and_the_trained_model_infers() -> None:
    model = seeded(Feed).train()
    eager = copy.deepcopy(model)
    x, target = numbers(8, 4, WIDTH), numbers(8, 4, WIDTH, seed=7)
    _optimize(model, x)
    losses: list[list[float]] = []
    for m in (model, eager):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        seen = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(m(x), target)
            loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]
    model.eval()
    with torch.no_grad():
        Truth(model).check(model(x), x)  # on the trained weights, not on those that were packed


def test_inference_between_training_steps_sees_every_step() -> None:
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    _optimize(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            Truth(model).check(model(x), x)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_dropout_draws_what_eager_draws() -> None:
    model = seeded(lambda: Encoder(layers=1, dropout=0.4)).train()
    eager = copy.deepcopy(model)
    inputs = (ids(3, 9), padding(3, 9))
    torch.manual_seed(5)
    _optimize(model, *inputs)
    for grad in (False, True, False):
        results = []
        for m in (model, eager):
            torch.manual_seed(11)
            with torch.set_grad_enabled(grad):
                results.append([m(*inputs).detach() for _ in range(2)])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert not torch.equal(results[0][0], results[0][1])
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(*inputs), model(*inputs))
        torch.testing.assert_close(model(*inputs), eager.eval()(*inputs), rtol=1e-4, atol=1e-5)


def test_batch_statistics_are_updated_once_a_step() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))

    model = seeded(make).train()
    eager = copy.deepcopy(model)
    x = numbers(6, WIDTH)
    _optimize(model, x)
    with torch.no_grad():
        eager(x)
    for _ in range(2):
        for m in (model, eager):
            m(x).square().mean().backward()
        torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
        assert int(model[1].num_batches_tracked) == int(eager[1].num_batches_tracked)


def test_the_backend_is_registered_and_takes_options() -> None:
    assert "opsmith" in torch._dynamo.list_backends(exclude_tags=())
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    truth = Truth(model)
    options: Any = {"tune": False, "pin": {"layer_norm": "eager"}}
    fast = torch.compile(model, backend="opsmith", options=options)
    with torch.no_grad():
        truth.check(fast(x), x)
        truth.check(fast(numbers(5, 6, WIDTH)), numbers(5, 6, WIDTH))
    assert not hasattr(model, "opsmith")
    plain = torch.compile(lambda t: torch.softmax(t, -1) * 2, backend="opsmith", dynamic=True)
    torch.testing.assert_close(plain(x), torch.softmax(x, -1) * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tun": False}, "torch.compile options: tun: .*; the fields are dtype"),
        ({"pin": {"layer_norm": "best"}}, "layer_norm has no implementation 'best'"),
        ({"dtype": "bfloat16"}, "only opsmith.optimize changes a model's dtype"),
    ],
)
def test_wrong_options_are_errors(options: Any, message: str) -> None:
    fast = torch.compile(seeded(Feed), backend="opsmith", options=options)
    with torch.no_grad(), pytest.raises(Exception, match=message):
        fast(numbers(3, 4, WIDTH))


def test_configuration_for_training_and_for_inference_is_one() -> None:
    """A pin is kept in both, and the plan shows what inference runs."""
    model, x = seeded(Feed), numbers(3, 4, WIDTH)
    opsmith.optimize(model, x, config=Config(tune=False, pin={"layer_norm": "eager"}))
    model(x).sum().backward()
    assert {
        s.implementation for p in model.opsmith.plan.shapes for s in p.steps if s.operator == "layer_norm"
    } == {"eager"}


@pytest.mark.parametrize("faster", [False, True])
def test_a_step_is_timed_as_a_whole_and_the_slower_way_does_not_run(
    faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []

    def measured(
        ours: Callable[[], Any], eager: Callable[[], Any], device: torch.device
    ) -> tuple[dict[str, float], bool]:
        assert device.type == "cpu"
        mine, theirs = ours(), eager()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        timed.append(len(mine))
        return {"opsmith": 1.0 if faster else 3.0, "eager": 2.0}, True

    monkeypatch.setattr(worth, "_measure", measured)
    model = seeded(Feed).train()
    truth = Truth(model)
    opsmith.optimize(model, config=Config(inductor=False))
    for batch in (3, 5):
        got = _gradients(model, model, numbers(batch, 4, WIDTH))
        _check_gradients(truth, got, numbers(batch, 4, WIDTH))
        if not faster:
            eager = _gradients(truth.eager, truth.eager, numbers(batch, 4, WIDTH))
            assert all(torch.equal(got[name], gradient) for name, gradient in eager.items())
    assert timed == [len(list(model.parameters()))]  # once, and for all of them
    (shape,) = model.opsmith.plan.shapes
    assert (shape.used, shape.training) == (faster, True)
    assert "forward and backward: opsmith" in str(model.opsmith.plan)
    assert ("eager is faster and runs" in str(model.opsmith.report)) == (not faster)


def test_a_step_that_cannot_be_timed_by_itself_runs_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(worth, "_measure", fail)
    model = seeded(Feed).train()
    truth = Truth(model)
    opsmith.optimize(model, config=Config(inductor=False))
    _check_gradients(truth, _gradients(model, model, numbers(3, 4, WIDTH)), numbers(3, 4, WIDTH))
    assert "forward and backward were not timed: raised RuntimeError: no such luck" in str(model.opsmith.plan)


class Looked(nn.Module):
    """Rows of a table whose gradient has a rule of its own, and something that is rewritten behind them."""

    def __init__(self, **rule: Any):
        super().__init__()
        self.table, self.feed = nn.Embedding(61, WIDTH, **rule), Feed()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.feed(self.table(tokens))


@pytest.mark.parametrize("rule", [{"padding_idx": 0}, {"padding_idx": 7}, {"scale_grad_by_freq": True}])
def test_rules_of_an_embedding_s_gradient_stay(rule: dict[str, Any]) -> None:
    model = seeded(lambda: Looked(**rule)).train()
    truth, tokens = Truth(model), ids(3, 12)
    tokens[0, :4] = rule.get("padding_idx", 5)
    run = _optimize(model, tokens)
    _check_gradients(truth, _gradients(model, run, tokens), tokens)
    found = {name for graph in model.opsmith.graphs for name in graph.sites}
    assert len(found) > 1
    assert any(name.startswith("embedding") for name in found) == ("padding_idx" in rule)


class Doubled(torch.autograd.Function):
    """A function whose gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return 2 * dy


class OfItsOwn(nn.Module):
    """Calls of ours, and a function of somebody else, beside what is recognized."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, nn.Linear(16, 16)
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x = Doubled.apply(x) if self.kind == "theirs" else opsmith.ops.rms_norm(x, self.weight)
        return nn.functional.layer_norm(x, (16,)) + nn.functional.softmax(x, -1)


@pytest.mark.parametrize("kind", ["theirs", "ours"])
def test_gradients_that_a_model_brings_along_are_kept(kind: str) -> None:
    """Retraced, an autograd.Function is its forward: such a graph learns as it was."""
    torch.manual_seed(0)
    model, x = OfItsOwn(kind), torch.randn(5, 16)
    wanted = _gradients(model, model, x)
    assert ("weight" in wanted) is (kind == "ours")
    with torch.no_grad():
        right = model(x)
    opsmith.optimize(model, x, config=UNTIMED)
    got = _gradients(model, model, x)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5)
    assert "it calls an autograd.Function, whose gradients only eager has" in str(model.opsmith.report)
    with torch.no_grad():  # what does not learn is optimized
        torch.testing.assert_close(model(x), right)
    assert "layer_norm" in str(model.opsmith.report)
