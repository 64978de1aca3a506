"""Under autocast a model keeps its operators, and the dtypes and gradients that eager PyTorch gives it there."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from opsmith.compiler.capture.casts import spell_out
from opsmith.compiler.choose.weights import Weights
from opsmith.compiler.program.study import Study
from tests.compiler import models
from tests.compiler.models import (
    WHOLE_MODEL,
    WIDTH,
    Encoder,
    Feed,
    first_tensor,
    ids,
    numbers,
    optimized,
    seeded,
)

# One layer has every kind of operator, and every cast between two of them.
encoder, llama = partial(Encoder, layers=1), partial(models.llama, layers=1)


def low() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def kept(model: Any) -> Counter[str]:
    return Counter(s.operator for s in model.opsmith.graphs[-1].report.kept)


def held(got: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str = "result") -> None:
    assert got.dtype == eager.dtype, what
    # What autocast left in float32 was rounded to bfloat16 on the way.
    verdict = WHOLE_MODEL.check(
        *(t.detach().flatten().bfloat16() for t in (got, eager)), exact.detach().flatten()
    )
    assert verdict.ok, f"{what}: {verdict.why}"


@pytest.mark.parametrize(
    ("make", "norm"), [(encoder, "layer_norm"), (llama, "rms_norm")], ids=["encoder", "llama"]
)
def test_inference_finds_what_it_finds_without(make: Callable[[], Any], norm: str) -> None:
    eager, plain, model = (seeded(make) for _ in range(3))
    x = ids(2, 7)
    with torch.no_grad():
        exact = first_tensor(copy.deepcopy(eager).double()(x))
        optimized(plain, x)
        with low():
            optimized(model, x)
            held(first_tensor(model(x)), first_tensor(eager(x)), exact)
            assert first_tensor(model(ids(1, 9))).shape[:2] == (1, 9)
    found, usual = kept(model), kept(plain)
    for operator in ("linear", "attention", norm):
        assert found[operator] >= usual[operator] > 0, operator


@pytest.mark.parametrize("make", [encoder, llama], ids=["encoder", "llama"])
def test_gradients_are_those_of_eager(make: Callable[[], Any]) -> None:
    eager, model = seeded(make), seeded(make)
    exact = copy.deepcopy(eager).double()
    x = ids(2, 7)
    optimized(model, x)

    def gradients(one: Any, cast: bool) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            y = first_tensor(one(x))
        weight = torch.sin(torch.arange(y.numel(), dtype=torch.float64)).view_as(y)
        (y * weight.to(y.dtype)).sum().backward()
        return {name: p.grad for name, p in one.named_parameters() if p.grad is not None}

    got, usual, truth = gradients(model, True), gradients(eager, True), gradients(exact, False)
    assert got.keys() == usual.keys() == truth.keys()
    scale = torch.stack([t.abs().max() for t in truth.values()]).max().view(1) * 1e-2
    for name, gradient in got.items():
        parts = [torch.cat([t.flatten(), scale.to(t.dtype)]) for t in (gradient, usual[name], truth[name])]
        held(*parts, name)  # type: ignore[misc]
    assert kept(model)["linear"] > 0


def test_a_weight_that_changes_is_cast_anew() -> None:
    eager, model = seeded(Feed), seeded(Feed)
    x = numbers(3, WIDTH)
    with torch.no_grad(), low():
        optimized(model, x)
        before = model(x)
        for one in (eager, model):
            one.up.weight.mul_(-2.0)
        assert not torch.equal(model(x), before)
        torch.testing.assert_close(model(x), eager(x), rtol=0.02, atol=0.02)


def test_what_a_program_holds_is_not_packed_for_the_next_weight_there() -> None:
    """Of a cast that is gone and one that came to its address, neither of which was ever changed, that is."""
    weight = nn.Parameter(torch.ones(4, 4))
    packs: Any = SimpleNamespace(name="packs", packs_alike=False, prepack=lambda w, rows: w.clone())
    weights = Weights([weight])

    def packed() -> torch.Tensor:
        weights.take([weight])
        found: torch.Tensor = weights.swapped(packs, {"x": torch.ones(1, 4), "weight": weight})["weight"]
        return found

    held = packed()
    weight.detach().numpy()[:] = 2.0  # another weight, for all that can be seen
    assert packed().eq(2.0).all()
    assert held.eq(1.0).all()


class Odd(nn.Module):
    """A part without autocast, and calls that cast what they have made themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.first(x)
        z = torch.einsum("ab,cb->ac", self.second(y), y)
        return torch.cat([z.to(torch.bfloat16), y], -1)


def test_regions_and_what_casts_inside_stay_as_they_are() -> None:
    eager, model = seeded(Odd), seeded(Odd)
    x = numbers(3, WIDTH)
    with torch.no_grad(), low():
        optimized(model, x)
        got, want = model(x), eager(x)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got[:, 3:], want[:, 3:])  # of the part without autocast
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    assert torch.is_autocast_cache_enabled()


class Inside(nn.Module):
    """A model that is under autocast by itself, as accelerate has it; a checkpointed layer is in the region too."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norms, self.layers = (
            nn.ModuleList(make(WIDTH) for _ in range(2)) for make in (nn.RMSNorm, self.linear)
        )
        self.checkpointed = checkpointed

    @staticmethod
    def linear(width: int) -> nn.Module:
        return nn.Linear(width, width)

    def layer(self, i: int, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.layers[i](self.norms[i](x))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with low():
            x = self.layer(0, x)
            if self.checkpointed:
                return checkpoint(self.layer, 1, x, use_reentrant=False)
            return self.layer(1, x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_model_that_casts_itself_learns_with_its_operators(checkpointed: bool) -> None:
    eager, model = (seeded(partial(Inside, checkpointed)) for _ in range(2))
    x = numbers(3, WIDTH)
    optimized(model, x)
    for one in (eager, model):
        one(x).square().sum().backward()
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=0.02, atol=0.02)
    found = sum((Counter(s.operator for s in g.report.kept) for g in model.opsmith.graphs), Counter())
    assert found["rms_norm"] == found["linear"] == 4


def test_what_fails_in_a_region_leaves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps what it cast of weights until the last region is left, so none may stay open."""

    def fails(*_: Any) -> bool:
        raise RuntimeError("no")

    monkeypatch.setattr(Study, "_settled", fails)
    model, eager = seeded(Inside), seeded(Inside)
    x = numbers(3, WIDTH)
    with pytest.warns(UserWarning, match="raised RuntimeError: no"):
        optimized(model, x)
    before = eager(x)
    with torch.no_grad():
        for layer in eager.layers:
            layer.weight.mul_(-2.0)
    assert not torch.allclose(eager(x), before, atol=0.1)


@pytest.mark.parametrize(("learning", "casts"), [(True, 3), (False, 2)])
def test_a_weight_is_cast_once_and_a_value_for_each_use_that_learns(learning: bool, casts: int) -> None:
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"] = w.meta["val"] = torch.ones(4, 4)
    uses = [graph.call_function(torch.ops.aten.linear.default, (x, w)) for _ in range(2)]
    for use in uses:
        use.meta["val"] = torch.ones(4, 4, dtype=torch.bfloat16)
    w.meta["val"] = torch.ones(4, 4)
    graph.output(tuple(uses))
    with low(), torch.set_grad_enabled(learning):
        spell_out(graph, [False, True])
    made = [n for n in graph.nodes if n.target is torch.ops.aten.to.dtype]
    assert len(made) == casts
    assert all(n.meta["val"].dtype == torch.bfloat16 for n in made)
    assert all(set(use.all_input_nodes) <= set(made) for use in uses)
    graph.lint()


def test_without_autocast_nothing_is_written() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(4, 4)
    graph.output(graph.call_function(torch.ops.aten.linear.default, (x, x)))
    before = str(graph)
    spell_out(graph, [False])
    assert str(graph) == before
