"""Weights that change, memory that is shared, state that a call changes: what an optimized model must respect."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import opsmith
from opsmith.compiler import Config
from opsmith.compiler.choose import weights
from opsmith.compiler.modules.conventions import ModelCall
from opsmith.operator import Implementation, registry
from tests.compiler.models import WIDTH, Encoder, Feed, Truth, ids, numbers, optimized, seeded


def _load(model: Feed) -> None:
    state = {name: t * 1.5 for name, t in model.state_dict().items()}
    model.load_state_dict(state)


def _assign(model: Feed) -> None:
    model.load_state_dict({name: t * 1.5 for name, t in model.state_dict().items()}, assign=True)


def _add(model: Feed) -> None:
    with torch.no_grad():
        model.up.weight.add_(0.5)


def _swap(model: Feed) -> None:
    model.down.weight.data = model.down.weight.data * 2


def _replace(model: Feed) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach() * 3)


def _there_and_back(model: Feed) -> None:
    model.to(torch.bfloat16)
    model.to(torch.float32)


CHANGES = [_load, _assign, _add, _swap, _replace, _there_and_back]


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return numbers(5, 6, WIDTH)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_changed_weights_are_seen(change: Callable[[Feed], None], x: torch.Tensor) -> None:
    model = seeded(Feed)
    optimized(model, x)
    with torch.no_grad():
        before = model(x)
    for _ in range(2):
        change(model)
        with torch.no_grad():
            Truth(model).check(model(x), x)
            assert not torch.equal(model(x), before)


def test_swapping_weights_back_and_forth_is_seen(x: torch.Tensor) -> None:
    """Storage that was given back may come again at the same address with other numbers."""
    model = seeded(Feed)
    optimized(model, x)
    for i in range(6):
        model.up.weight.data = numbers(48, WIDTH, seed=i)
        with torch.no_grad():
            Truth(model).check(model(x), x)


def test_weights_changed_in_every_step_stay_right() -> None:
    model = seeded(Feed)
    x = numbers(3, 4, WIDTH)
    optimized(model, x)
    for step in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 + 0.1 * step)
            Truth(model).check(model(x), x)


class _Views(nn.Module):
    """Results that are views of results, of inputs, and of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.feed(x)
        z = self.feed(y)
        return y[:, 1:], z.transpose(0, 1), x[0], x, self.feed.norm.weight[:3], z.view(-1)[:7]


def test_results_are_not_overwritten_by_the_next_call() -> None:
    model = seeded(_Views)
    eager = copy.deepcopy(model)
    x, other = numbers(3, 4, WIDTH), numbers(3, 4, WIDTH, seed=9)
    optimized(model, x)
    with torch.no_grad():
        first = model(x)
        kept = [t.clone() for t in first]
        model(other)
        model(other)
        want = eager(x)
    for got, copied, right in zip(first, kept, want, strict=True):
        assert torch.equal(got, copied)
        torch.testing.assert_close(got, right)
    assert first[3] is x
    assert first[2].data_ptr() == x.data_ptr()
    assert first[4].data_ptr() == model.feed.norm.weight.data_ptr()
    first[1].zero_()  # a result may be changed in place without hurting the next call
    with torch.no_grad():
        torch.testing.assert_close(model(x)[1], want[1])


def test_threads_do_not_share_buffers() -> None:
    model = seeded(Encoder)
    inputs = [ids(3, 9, seed=s) for s in range(4)]
    optimized(model, inputs[0])
    with torch.no_grad():
        want = [model(x).clone() for x in inputs]
    wrong: list[int] = []
    start = threading.Barrier(len(inputs))

    def work(i: int) -> None:
        start.wait()
        for _ in range(25):
            with torch.no_grad():
                if not torch.equal(model(inputs[i]), want[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


class _Counting(nn.Module):
    """State that every call changes: a count of calls, and a cache that is written in place."""

    calls: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(3, 4, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        y = self.feed(x)
        self.cache.mul_(0.5).add_(y)
        return self.feed(self.cache) + self.calls


@pytest.mark.parametrize("tune", [False, True], ids=["untimed", "timed"])
def test_state_changes_once_a_call(tune: bool) -> None:
    """Studying and timing a graph must not be seen in the model's state."""
    model = seeded(_Counting)
    eager = copy.deepcopy(model)
    x = numbers(3, 4, WIDTH)
    opsmith.optimize(model, x, config=Config(tune=tune))
    with torch.no_grad():
        eager(x)
        for _ in range(3):
            torch.testing.assert_close(model(x), eager(x))
    assert float(model.calls) == float(eager.calls) == 4.0
    torch.testing.assert_close(model.cache, eager.cache)


class _Filling(nn.Module):
    """A cache with room for so many rows, and the place of the next one: the call after the last row is an error."""

    place: torch.Tensor
    cache: torch.Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.feed = Feed()
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))
        self.register_buffer("cache", torch.zeros(rows, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        self.cache.index_copy_(0, self.place, self.feed(x))
        self.place += 1
        return self.feed(self.cache)


@pytest.mark.parametrize("tune", [False, True], ids=["untimed", "timed"])
def test_a_cache_is_filled_by_calls_alone(tune: bool) -> None:
    """However often a graph is tried, each time starts from the state that the call came with."""
    model = seeded(lambda: _Filling(rows=3))
    eager = copy.deepcopy(model)
    x = numbers(3, 1, WIDTH)
    opsmith.optimize(model, x[0], config=Config(tune=tune))
    with torch.no_grad():
        eager(x[0])
        for row in x[1:]:
            torch.testing.assert_close(model(row), eager(row))
        with pytest.raises(IndexError, match="out of bounds"):
            model(x[0])
    torch.testing.assert_close(model.cache, eager.cache)


def test_inputs_are_not_changed_and_changes_in_place_are() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.feed = Feed()

        def forward(self, x: torch.Tensor, out: torch.Tensor) -> Any:
            y = self.feed(x)
            h = y * 2
            h += x  # of no one else's memory
            view = h[:, 0]
            view.zero_()  # through a view
            out.copy_(self.feed(h))
            return h

    model = seeded(InPlace)
    eager = copy.deepcopy(model)
    x = numbers(3, 4, WIDTH)
    before = x.clone()
    outs = torch.zeros(2, 3, 4, WIDTH)
    optimized(model, x, outs[0])
    for _ in range(2):
        outs.zero_()
        with torch.no_grad():
            torch.testing.assert_close(model(x, outs[0]), eager(x, outs[1]))
        torch.testing.assert_close(outs[0], outs[1])
        assert torch.equal(x, before)


class _Rewritten(nn.Module):
    """A value that is read, changed in place, and read again: what was recognized must not mix the two."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = x * 3
        before = torch.softmax(h, -1)
        h[..., 0] = 5.0
        h.add_(1.0)
        view = h[..., 1:]
        e = torch.exp(h - h.amax(-1, keepdim=True))
        e.add_(2.0)
        view.mul_(0.5)
        return before, e / e.sum(-1, keepdim=True) + torch.softmax(h, -1)


def test_changes_in_place_within_the_graph_are_respected() -> None:
    model = seeded(_Rewritten)
    x = numbers(3, 4, WIDTH)
    want = model(x)
    optimized(model, x)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(x), want)


class _Attending(nn.Module):
    """Attention written out, of a token and what a cache of fixed length holds, which takes the token in first.

    With `between`, the cache changes once more after the scores were computed.
    """

    place: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.between = between
        self.register_buffer("place", torch.tensor([2]))
        for name in ("keys", "values"):
            self.register_buffer(name, numbers(1, 2, 5, 8, seed=len(name)))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = mask.unsqueeze(1)
        keys = self.keys.index_copy_(2, self.place, k)
        values = self.values.index_copy_(2, self.place, v).view(2, 5, 8)
        scores = q @ keys.transpose(-1, -2) * 8**-0.5 + bias
        if self.between:
            self.values.mul_(2.0)
        weights = torch.softmax(scores, -1)
        return (weights.view(2, 1, 5) @ values).view(1, 2, 1, 8)


@pytest.mark.parametrize("between", [False, True])
def test_attention_to_a_cache_that_is_written_first_is_found(between: bool) -> None:
    model = seeded(partial(_Attending, between))
    eager = copy.deepcopy(model)
    tokens = [numbers(1, 2, 1, 8, seed=seed) for seed in range(3)]
    mask = numbers(1, 1, 5, seed=3)
    optimized(model, *tokens, mask)
    with torch.no_grad():
        eager(*tokens, mask)
        for shift in (0.0, 1.0):
            given = *(t + shift for t in tokens), mask
            torch.testing.assert_close(model(*given), eager(*given))
    assert model.opsmith.report.found.get("attention", 0) == (0 if between else 1)
    torch.testing.assert_close(model.values, eager.values)


def test_inference_mode_and_no_grad_mix() -> None:
    model = seeded(Feed)
    truth = Truth(model)
    x = numbers(3, 4, WIDTH)
    with torch.inference_mode():
        optimized(model, x)
        truth.check(model(x), x)
    with torch.no_grad():
        truth.check(model(x), x)
    with torch.inference_mode():
        truth.check(model(numbers(2, 4, WIDTH)), numbers(2, 4, WIDTH))
    with torch.no_grad():
        truth.check(model(numbers(2, 4, WIDTH)), numbers(2, 4, WIDTH))


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = seeded(Feed)
        x = numbers(3, 4, WIDTH)
        want = model(x)
        optimized(model, x)
        torch.testing.assert_close(model(x), want)


def _kind(kind: str) -> Any:
    """A model, optimized and called as this kind of it is."""
    config = opsmith.Config(tune=False, quantize=kind if kind == "int8" else None)
    if kind == "latent":
        pytest.importorskip("transformers")
        from tests.compiler.test_latent import deepseek, prompts

        model = opsmith.optimize(deepseek("V3"), prompts(2, 8), config=config)
        model.generate(**prompts(2, 8), do_sample=False, max_new_tokens=3)
        assert model.opsmith.latent.sites
        return model
    layers = 2 if kind == "float" else 1  # a second one is proved as the first: once is enough
    model = opsmith.optimize(Encoder(layers).eval(), ids(2, 9), config=config)
    with torch.set_grad_enabled(kind == "training"):
        y = model(ids(2, 9))
        model(ids(3, 17))
    if kind == "training":
        next(t for t in pytree.tree_leaves(y) if isinstance(t, torch.Tensor)).sum().backward()
    if kind == "profiled":
        opsmith.profile(model, ids(2, 9), budget_s=0.05)
    return model


@pytest.mark.parametrize("kind", ["float", "int8", "latent", "training", "profiled"])
def test_a_model_that_nobody_holds_takes_all_of_it_along(kind: str) -> None:
    def live() -> list[weakref.ref[Any]]:
        model = _kind(kind)
        session = model.opsmith
        programs = [p for g in session.graphs for p in g.programs.by_key.values() if p is not None]
        assert programs
        packed = [t for m in session.packing.modules for t in m.forward.__self__.buffers()]
        assert bool(packed) == (kind == "int8")
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert bool(gradients) == (kind == "training")
        held = [model, session, *session.graphs, *programs, *session.latent.sites]
        return [weakref.ref(one) for one in (*held, *model.parameters(), *packed, *gradients)]

    for _ in range(2):  # what is kept of the first model may be used by the next one, and held by it
        found = live()
        gc.collect()
        assert [type(one) for ref in found if (one := ref()) is not None] == []


def test_a_forward_that_holds_its_model_is_not_held() -> None:
    """As hooks put one into a model, which `accelerate` does."""
    model = seeded(Encoder)
    model.forward = partial(Encoder.forward, model)
    assert ModelCall(model, (ids(2, 9),), {}).names == ModelCall(seeded(Encoder), (), {}).names
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_a_compiled_model_that_nobody_holds_takes_its_weights_along(x: torch.Tensor) -> None:
    """Here no session of the model's holds the graph: Dynamo does, for as long as it likes."""

    def held() -> list[torch.Tensor]:
        gc.collect()
        return [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta]

    gc.collect()
    gc.freeze()  # else each collection below looks through all that other tests have imported
    counts = []
    for _ in range(3):
        before = {id(t) for t in held()}
        model = seeded(Feed)
        fast = torch.compile(model, backend="opsmith", options={"tune": False, "inductor": False})
        fast(x)
        fast(numbers(4, 7, WIDTH))
        made = [weakref.ref(t) for t in held() if id(t) not in before]
        assert len(made) > len(list(model.parameters()))
        del model, fast
        gc.collect()
        assert [tuple(t.shape) for ref in made if (t := ref()) is not None and t.numel()] == []
        counts.append(len(held()))
    gc.unfreeze()
    assert counts[1] == counts[2]


def test_graphs_of_one_model_share_what_they_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt with a cache is another graph than the example, on the same weights."""
    card = registry()["linear"]
    packed: list[tuple[int, ...]] = []

    def pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
        packed.append(tuple(weight.shape))
        return weight.clone()

    mine = Implementation("mine", card.implementation("eager").fn, prepack=pack)
    monkeypatch.setattr(card, "implementations", [mine, *card.implementations])

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            return y if scale is None else y * scale

    model, x = seeded(Twice), numbers(3, 4, WIDTH)
    address = model.layer.weight.data_ptr()
    optimized(model, x)
    with torch.no_grad():
        for times in (1, 2):
            for _ in range(2):
                y = F.linear(x, model.layer.weight, model.layer.bias)
                assert torch.equal(model(x), y)
                assert torch.equal(model(x, 2.0), y * 2.0)
            assert len(model.opsmith.graphs) == 2
            assert len(packed) == times
            model.layer.weight.mul_(2.0)  # both notice, and share again
    assert any(key[0] == address for key in weights._SHARED)
    opsmith.restore(model)
    assert not any(key[0] == address for key in weights._SHARED)


def test_few_and_many_rows_share_a_layout_that_is_the_same_for_both() -> None:
    weight = nn.Parameter(numbers(8, WIDTH))
    alike = registry()["linear"].implementation("packed")
    other = replace(alike, name="other", packs_alike=False)
    graphs = [weights.Weights([weight]) for _ in range(2)]
    for graph in graphs:
        graph.take([weight])
    for one, shared in ((alike, True), (other, False)):
        few, many = (
            graph.swapped(one, {"x": numbers(rows, WIDTH), "weight": weight})["weight"]
            for graph, rows in zip(graphs, (16, 1024), strict=True)
        )
        assert few.equal(many)
        assert (few is many) == shared
