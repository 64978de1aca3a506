"""Plain layers of one input as one product: found by structure, proved, and held in memory once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import opsmith
from opsmith.compiler.find import products
from opsmith.compiler.modules.adjacent import Adjacent
from tests.compiler.test_joined import Gated, attention, call, layer_by_layer

QUIET = opsmith.Config(tune=False, inductor=False)


def with_biases() -> Any:
    """An attention layer whose queries, keys and values all have a bias, as Qwen 2's do."""
    model: Any = attention()
    model.k.bias = nn.Parameter(torch.randn(64))
    return model


def gated() -> Any:
    """Of type Any, as an optimized model has an attribute that its class has not."""
    return Gated().eval()


def optimized(model: nn.Module, x: torch.Tensor, **options: object) -> nn.Module:
    config = QUIET.model_copy(update=options)
    return opsmith.optimize(model, x, config=config)


def memories(*layers: nn.Linear) -> set[int]:
    return {layer.weight.untyped_storage().data_ptr() for layer in layers}


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    step = 1e-2 if a.dtype == torch.bfloat16 else 1e-5
    return float((a - b).detach().float().norm()) <= step * float(b.detach().float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 5, 128), (1, 1, 128)])
def test_queries_keys_and_values_are_one_product_and_one_memory(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model, x = with_biases().to(dtype), torch.randn(shape, dtype=dtype)
    optimized(model, x)
    report = model.opsmith.report
    assert report.together == {"3 layers of one input": 1}
    assert "as one product: 1 times 3 layers of one input" in str(report)
    assert report.found["linear"] == 4
    assert not report.rolled_back
    assert near(call(model, x), layer_by_layer(model, x))
    assert len(memories(model.q, model.k, model.v)) == 1
    assert model.q.weight.untyped_storage().nbytes() == sum(
        p.weight.nbytes for p in (model.q, model.k, model.v)
    )


def test_a_gate_and_what_it_multiplies_are_one_product() -> None:
    model, x = gated(), torch.randn(3, 4, 128)
    optimized(model, x)
    assert model.opsmith.report.found == {"linear": 3, "silu_mul": 1}
    assert model.opsmith.report.together == {"2 layers of one input": 1}
    assert near(call(model, x), layer_by_layer(model, x))


@pytest.mark.parametrize("slow", [False, True])
def test_the_faster_way_runs_and_the_plan_says_so(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = gated(), torch.randn(3, 4, 128)

    def measured(self: Any, call: dict[str, Any], able: dict[str, Any], *rest: Any) -> Any:
        both = "weight" in call and call["weight"].shape[0] > 192
        return dict.fromkeys(able, 3e-3 if both and slow else 1e-3), True

    monkeypatch.setattr("opsmith.compiler.choose.select.Selector._measure", measured)
    opsmith.optimize(model, x, config=opsmith.Config(inductor=False))
    assert model.opsmith.report.together == ({} if slow else {"2 layers of one input": 1})
    assert ("2.00x as fast as linear and linear" in str(model.opsmith.plan)) is not slow
    assert near(call(model, x), layer_by_layer(model, x))


def test_what_is_learned_is_seen() -> None:
    model, x = with_biases(), torch.randn(2, 5, 128)
    optimized(model, x)
    call(model, x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin = copy.deepcopy(with_biases())
    twin.load_state_dict(model.state_dict())
    for mine, step in ((model, optimizer), (twin, torch.optim.SGD(twin.parameters(), lr=0.1))):
        mine(x).square().sum().backward()
        step.step()
        step.zero_grad()
    assert near(call(model, x), call(twin, x))
    assert all(near(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert len(memories(model.q, model.k, model.v)) == 1
    training = model.opsmith.report.graphs[-1]
    assert training.kept
    assert not any(s.pattern.endswith("of one input") for s in training.sites)


def test_a_graph_without_gradients_may_be_given_some() -> None:
    """Parameters that ask for gradients after the capture: of a frozen model, whose guards do not ask about that."""
    model, x = with_biases().requires_grad_(False), torch.randn(2, 5, 128)
    optimized(model, x, frozen=True)
    model.requires_grad_()
    with torch.enable_grad():
        mine = torch.autograd.grad(model(x).square().sum(), model.k.weight)
        other = torch.autograd.grad(model.forward(x).square().sum(), model.k.weight)
    assert near(mine[0], other[0])


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_is_seen_and_lies_side_by_side(assign: bool) -> None:
    model, x = with_biases(), torch.randn(2, 5, 128)
    optimized(model, x)
    call(model, x)
    state = {name: t.clone() * 2 for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert near(call(model, x), layer_by_layer(model, x))
    assert len(memories(model.q, model.k, model.v)) == 1
    model.q.weight.data = torch.zeros_like(model.q.weight)  # other memory, which no version counts
    assert near(call(model, x), layer_by_layer(model, x))
    assert len(memories(model.q, model.k, model.v)) == 1
    model.to(torch.bfloat16)
    assert near(call(model, x.bfloat16()), layer_by_layer(model, x.bfloat16()))
    assert len(memories(model.q, model.k, model.v)) == 1


def test_state_is_what_it_was(tmp_path: Path) -> None:
    model, x = with_biases(), torch.randn(2, 5, 128)
    before, state = call(model, x), copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    optimized(model, x)
    assert all(model.state_dict()[name].equal(t) for name, t in state.items())
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert all(t.equal(state[name]) for name, t in load_file(tmp_path / "model.safetensors").items())
    torch.save(model.state_dict(), tmp_path / "model.pt")
    assert all(t.equal(state[name]) for name, t in torch.load(tmp_path / "model.pt").items())
    twin = copy.deepcopy(model)
    assert near(call(twin, x), before)
    assert len(memories(twin.q, twin.k, twin.v)) == 1
    assert not memories(twin.q) & memories(model.q)
    opsmith.restore(model)
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert len(memories(model.q, model.k, model.v)) == 3
    assert call(model, x).equal(before)
    assert near(call(twin, x), before)


def test_tied_weights_are_left_alone() -> None:
    """A weight whose memory another tensor of the model has, too, stays where it is."""
    model, x = gated(), torch.randn(3, 4, 128)
    model.register_buffer("same", model.up.weight.detach())
    before = memories(model.gate, model.up)
    optimized(model, x)
    assert model.opsmith.report.together == {}
    assert memories(model.gate, model.up) == before
    assert near(call(model, x), layer_by_layer(model, x))


def test_a_part_of_a_larger_memory_stays_there() -> None:
    model, x = gated(), torch.randn(3, 4, 128)
    flat = torch.randn(2 * 192 * 128 + 7)
    model.gate.weight.data = flat[7 : 7 + 192 * 128].view(192, 128)
    optimized(model, x)
    assert model.opsmith.report.together == {}
    assert memories(model.gate) == {flat.untyped_storage().data_ptr()}


def test_a_large_weight_gets_large_pages_of_its_own() -> None:
    """Unless it is a part of a larger memory; restored, it has memory of its own again, with the same numbers."""
    large, part, small = (nn.Linear(1024, n, bias=False) for n in (1024, 1024, 8))
    flat = torch.cat([part.weight.detach().flatten(), torch.zeros(7)])
    part.weight.data = flat[:-7].view(1024, 1024)
    # A quarter of all may be there twice while it is moved.
    more = (m for _ in range(3) for m in (nn.Linear(1024, 1024), nn.Tanh()))
    model, x = nn.Sequential(large, nn.Tanh(), part, nn.Tanh(), *more, small), torch.randn(3, 1024)
    before, numbers = [memories(layer) for layer in (large, part, small)], large.weight.clone()
    expected = call(model, x)
    optimized(model, x)
    now = [memories(layer) for layer in (large, part, small)]
    assert now[0] != before[0]
    assert now[1:] == before[1:]
    assert near(call(model, x), expected)
    assert model.state_dict()["0.weight"].equal(numbers)
    call(model, x)
    assert memories(large) == now[0], "it is moved once"
    opsmith.restore(model)
    assert memories(large) not in (before[0], now[0])
    assert call(model, x).equal(expected)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_weight_of_most_of_a_model_gets_large_pages(mapped: bool, tmp_path: Path) -> None:
    """One in memory of its own keeps its place, and has them there; of a file's it moves, and is not there twice."""
    model, x = nn.Sequential(nn.Linear(1024, 8192, bias=False)), torch.randn(3, 1024)
    if mapped:
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    [place], expected = memories(model[0]), call(model, x)
    calls: list[tuple[int, int, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "advise", lambda *asked: calls.append(asked))
        optimized(model, x)
    assert calls == ([] if mapped else [(place, model[0].weight.nbytes, "MADV_COLLAPSE")])
    assert (memories(model[0]) == {place}) is not mapped
    assert near(call(model, x), expected)


def test_one_layer_twice_is_no_pair() -> None:
    model, x = gated(), torch.randn(3, 4, 128)
    model.up = model.gate
    optimized(model, x)
    assert model.opsmith.report.together == {}
    assert near(call(model, x), layer_by_layer(model, x))


def test_what_the_model_returns_is_a_tensor_of_its_own() -> None:
    model, x = with_biases(), torch.randn(2, 5, 128)
    model.used = lambda y, q, k, v: (y, v)
    optimized(model, x)
    assert model.opsmith.report.together == {}
    assert call(model, x)[1].is_contiguous()


def test_without_a_model_nothing_is_moved() -> None:
    model, x = gated(), torch.randn(3, 4, 128)
    before = memories(model.gate, model.up)
    compiled = torch.compile(model, backend="opsmith", options={"tune": False, "inductor": False})
    with torch.no_grad():
        compiled(x)
    assert memories(model.gate, model.up) == before
    assert not Adjacent().lay([model.gate.weight, model.up.weight])
    torch.compiler.reset()
