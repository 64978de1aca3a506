"""Calls that Dynamo is not asked about: they are quick while nothing changes, and every change is seen."""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler import standing
from opsmith.kernels import calls

SCALE = [2.0]
FACTOR = 3.0


class Settings:
    """What a configuration is: an object with attributes, one of them computed."""

    twice = False

    def __init__(self) -> None:
        self.shift = 1.0
        self.names = {"first": 1.0}

    @property
    def computed(self) -> bool:
        return self.shift > 0


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def offset(x: torch.Tensor, by: float = 0.5) -> torch.Tensor:
    return x + by


class Model(nn.Module):
    """One that reads what Python code reads: attributes, globals, lists, closures, defaults and its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()
        self.parts = nn.ModuleList([Part(), Part()])
        self.norm = nn.LayerNorm(16)
        self.register_buffer("bias", torch.linspace(0, 1, 16))
        self.weights = [0.5, 0.25]
        held = 4.0

        def enclosed(x: torch.Tensor) -> torch.Tensor:
            return x * held

        self.enclosed = enclosed

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None, power: int = 1) -> torch.Tensor:
        for part, weight in zip(self.parts, self.weights, strict=False):
            x = x + weight * part(x)
        if more is not None:
            x = x + more
        if self.training:
            x = x * 7
        x = self.norm(x) + self.bias + self.settings.shift + self.settings.names["first"]
        if self.settings.twice and self.settings.computed:
            x = x * 2
        return offset(self.enclosed(x)) * SCALE[0] * FACTOR * power


def optimized() -> Any:
    torch.manual_seed(0)
    return opsmith.optimize(
        Model().eval(), torch.randn(4, 16), config=opsmith.Config(tune=False, verify=False)
    )


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each call that could have gone past Dynamo, whether it did."""
    if calls.library() is None or calls.watch(({},), False) is None:
        pytest.skip("this Python cannot be watched")
    taken: list[bool] = []
    ask = standing.Standing.route

    def spy(self: standing.Standing, *args: Any) -> Any:
        found = ask(self, *args)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(standing.Standing, "route", spy)
    return taken


def settle(model: Any, *args: Any, **kwargs: Any) -> None:
    for _ in range(80):  # after each change it waits for longer
        model(*args, **kwargs)


def right(model: Any, *args: Any, **kwargs: Any) -> None:
    torch.testing.assert_close(model(*args, **kwargs), model._call_impl(*args, **kwargs))


@torch.no_grad()
def test_calls_go_past_dynamo(routes: list[bool]) -> None:
    model, x = optimized(), torch.randn(4, 16)
    for _ in range(5):
        right(model, x)
    assert routes[-3:] == [True] * 3
    y = torch.randn(6, 16)  # another size, of the same graph
    for _ in range(4):
        right(model, y)
    assert routes[-2:] == [True] * 2


def replace_class(model: Any) -> None:
    class Other(Part):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -self.linear(x)

    model.parts[1].__class__ = Other


def replace_attributes(model: Any) -> None:
    model.settings.__dict__ = {"shift": 5.0, "names": {"first": 2.0}}


def replace_closure(model: Any) -> None:
    model.enclosed.__closure__[0].cell_contents = 11.0


def add_attribute(model: Any) -> None:
    model.settings.twice = True


def replace_data(model: Any) -> None:
    model.to(torch.float64)


CHANGES: list[Callable[[Any], Any]] = [
    lambda m: setattr(m.settings, "shift", 2.0),
    lambda m: m.settings.names.update(first=4.0),
    lambda m: m.weights.insert(0, 1.0),
    lambda m: m.weights.__setitem__(0, 1.0),
    lambda m: m.weights.pop(),
    lambda m: m.train(),
    lambda m: setattr(m.parts, "1", Part()),
    lambda m: setattr(m.parts[0].linear, "bias", None),
    lambda m: setattr(m.parts[0].linear, "weight", nn.Parameter(torch.ones(16, 16))),
    lambda m: setattr(m.parts[0].linear.weight, "data", torch.ones(16, 16)),
    lambda m: m.bias.add_(1),
    lambda m: setattr(m.norm, "eps", 0.5),
    lambda m: setattr(m, "forward", types.MethodType(lambda self, x: x * 2, m)),
    replace_class,
    replace_attributes,
    replace_closure,
    add_attribute,
    replace_data,
]


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_of_the_model_are_seen(change: Callable[[Any], Any], routes: list[bool]) -> None:
    model, x = optimized(), torch.randn(4, 16)
    settle(model, x)
    before = model(x)
    assert routes[-1]
    change(model)
    x = x.to(model.bias.dtype)
    right(model, x)
    assert x.dtype != before.dtype or not torch.equal(model(x), before)


@torch.no_grad()
def test_changes_of_what_all_models_share_are_seen(
    monkeypatch: pytest.MonkeyPatch, routes: list[bool]
) -> None:
    model, x = optimized(), torch.randn(4, 16)
    here = globals()
    for owner, name, value in (
        (here, "FACTOR", 5.0),
        (here, "SCALE", [1.0]),
        (here, "offset", lambda x: x),
        (Settings, "twice", True),
        (offset, "__defaults__", (9.0,)),
        (offset, "__code__", (lambda x, by=1.0: x - by).__code__),
    ):
        settle(model, x)
        before = model(x)
        assert routes[-1], name
        with monkeypatch.context() as patch:
            patch.setitem(owner, name, value) if owner is here else patch.setattr(owner, name, value)
            got = model(x)
            assert not routes[-1], name
            torch.testing.assert_close(got, model._call_impl(x), msg=name)
            assert not torch.equal(got, before)
        right(model, x)


@torch.no_grad()
def test_other_inputs_are_others(routes: list[bool]) -> None:
    model, x, more = optimized(), torch.randn(16, 16), torch.randn(16, 16)
    for given in ((x,), (x.t(),), (x.double().float().t(),), (x, more, 2), (x, more, 3), (x, more)):
        for _ in range(4):
            right(model, *given)
    settle(model, x, more)
    assert routes[-1]
    right(model, x, x)
    assert not routes[-1]  # a graph may take them for two
    for given in ((x, more), (x, model.parts[0].linear.weight.detach()), (x, model.bias.expand(16, 16))):
        right(model, *given)


@contextmanager
def another_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def test_modes_are_noticed(routes: list[bool]) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, x = optimized(), torch.randn(4, 16)
    modes: list[Callable[[], Any]] = [
        Functions,
        Dispatch,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.compiler.set_stance("force_eager"),
        torch.autograd.forward_ad.dual_level,
        lambda: torch.device("meta"),
        another_thread,
    ]
    for mode in modes:
        settle(model, x)
        assert routes[-1]
        count = len(routes)
        with mode():
            model(x)
        assert True not in routes[count:], mode


def test_with_gradients_dynamo_is_asked(routes: list[bool]) -> None:
    model, x = optimized(), torch.randn(4, 16)
    with torch.no_grad():
        settle(model, x)
        assert routes[-1]
    count = len(routes)
    model(x).sum().backward()
    assert model.norm.weight.grad is not None
    assert len(routes) == count


@torch.no_grad()
def test_vmap_and_duals_are_right() -> None:
    model, x = optimized(), torch.randn(4, 16)
    settle(model, x)
    want = torch.stack([model._call_impl(one) for one in (x, 2 * x)])
    torch.testing.assert_close(torch.func.vmap(model)(torch.stack([x, 2 * x])), want)


@torch.no_grad()
def test_reset_lets_a_model_be_captured_anew(routes: list[bool]) -> None:
    model, x = optimized(), torch.randn(4, 16)
    settle(model, x)
    assert routes[-1]
    torch._dynamo.reset()
    right(model, x)
    assert not routes[-1]


@torch.no_grad()
def test_a_model_that_changes_at_every_call_is_looked_at_seldom(
    monkeypatch: pytest.MonkeyPatch, routes: list[bool]
) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.count = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + 1
            return self.linear(x) + self.count

    looks = 0
    look = standing._objects

    def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return look(*args)

    monkeypatch.setattr(standing, "_objects", counted)
    model = opsmith.optimize(
        Counting().eval(), torch.randn(4, 16), config=opsmith.Config(tune=False, verify=False)
    )
    other, x = Counting().eval(), torch.randn(4, 16)
    other.load_state_dict(model.state_dict())
    other.count = model.count.clone()
    for _ in range(200):
        torch.testing.assert_close(model(x), other(x))
    assert 0 < looks < 10


@torch.no_grad()
def test_a_model_is_let_go() -> None:
    model = optimized()
    settle(model, torch.randn(4, 16))
    seen = weakref.ref(model)
    part = weakref.ref(model.parts[0])
    del model
    gc.collect()
    assert seen() is None
    assert part() is None


@torch.no_grad()
def test_a_copy_and_a_restored_model_have_nothing_of_it(routes: list[bool]) -> None:
    model, x = optimized(), torch.randn(4, 16)
    settle(model, x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.bias.add_(1)
    right(other, x)
    right(model, x)
    opsmith.restore(model)
    model.settings.shift = 3.0
    torch.testing.assert_close(model(x), model._call_impl(x))


@torch.no_grad()
def test_where_guards_cannot_be_read_dynamo_is_asked(
    monkeypatch: pytest.MonkeyPatch, routes: list[bool]
) -> None:
    def unknown(*args: Any) -> Any:
        raise AttributeError("get_accessors")

    monkeypatch.setattr(standing, "_children", unknown)
    model, x = optimized(), torch.randn(4, 16)
    for _ in range(4):
        right(model, x)
    assert True not in routes


@torch.no_grad()
def test_behind_a_break_of_the_graph_dynamo_is_asked(routes: list[bool]) -> None:
    class Broken(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = self.norm(x)
            torch._dynamo.graph_break()
            return self.norm(x * 2)

    model = opsmith.optimize(
        Broken().eval(), torch.randn(4, 16), config=opsmith.Config(tune=False, verify=False)
    )
    x = torch.randn(4, 16)
    for _ in range(4):
        right(model, x)
    assert True not in routes


@torch.no_grad()
def test_state_that_cannot_be_watched_is_left_to_dynamo(routes: list[bool]) -> None:
    class Slotted:
        __slots__ = ("shift",)

        def __init__(self) -> None:
            self.shift = 1.0

    class Reading(Model):
        def __init__(self) -> None:
            super().__init__()
            self.slotted = Slotted()

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return self.norm(x) + self.slotted.shift

    model = opsmith.optimize(
        Reading().eval(), torch.randn(4, 16), config=opsmith.Config(tune=False, verify=False)
    )
    x = torch.randn(4, 16)
    for _ in range(4):
        right(model, x)
    model.slotted.shift = 2.0
    right(model, x)
    assert True not in routes


def test_what_could_change_unseen_is_known() -> None:
    class Slotted:
        __slots__ = ("value",)

    class Mixed(Slotted):  # some of it in slots, the rest in a dictionary
        pass

    class Several(list[int]):
        pass

    class Named(dict[str, int]):
        pass

    for hidden in (Slotted(), Mixed(), Several(), set(), bytearray(), iter([])):
        assert None in standing._written(hidden), type(hidden)
    for seen in (Settings(), Named(), Part(), {}, [], torch.ones(1), offset, Settings):
        assert None not in standing._written(seen)
        assert list(standing._written(seen))
