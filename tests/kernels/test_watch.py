"""What tells whether Python objects have changed."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from opsmith.kernels import calls


class Thing:
    kind = 1

    def __init__(self) -> None:
        self.x = 1


class Special(Thing):
    pass


def function(x: int = 1, *, k: int = 2) -> int:
    return x + k


@pytest.fixture(autouse=True)
def _watched() -> None:
    if calls.library() is None or calls.watch(({},), False) is None:
        pytest.skip("this Python cannot be watched")


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, 2))


CHANGES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: {"a": 1}, lambda d: d.update(a=2)),
    (lambda: {"a": 1}, lambda d: d.pop("a")),
    (lambda: vars(Thing()), lambda d: d.update(y=1)),
    (lambda: [1, 2], lambda a: a.append(3)),
    (lambda: [1, 2], lambda a: a.pop()),
    (lambda: [1, 2], lambda a: a.__setitem__(0, 5)),
    (lambda: types.CellType(1), lambda c: setattr(c, "cell_contents", 2)),
    (lambda: types.FunctionType(function.__code__, {}), lambda f: setattr(f, "__defaults__", (2,))),
    (lambda: types.FunctionType(function.__code__, {}), lambda f: setattr(f, "__kwdefaults__", {"k": 3})),
    (
        lambda: types.FunctionType(function.__code__, {}),
        lambda f: setattr(f, "__code__", (lambda: 0).__code__),
    ),
    (Thing, lambda t: setattr(t, "__dict__", {"x": 2})),
    (Thing, lambda t: setattr(t, "__class__", Special)),
    (lambda: type("Of", (Thing,), {}), lambda t: setattr(t, "kind", 2)),
    (parameter, lambda p: setattr(p, "data", p.data.double())),
    (parameter, lambda p: setattr(p, "data", p.data[:2])),
    (parameter, lambda p: setattr(p, "data", p.data.t().contiguous().t())),
    (parameter, lambda p: p.requires_grad_(False)),
    (parameter, lambda p: torch.utils.swap_tensors(p, parameter())),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_a_change_is_seen(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    one = make()
    watch = calls.watch((one, {}), False)
    assert watch is not None
    assert watch()
    gc.collect()
    assert watch()
    change(one)
    assert not watch()


def test_a_base_that_changes_changes_its_types() -> None:
    base = type("Base", (), {})
    watch = calls.watch((type("Of", (base,), {}),), False)
    assert watch is not None
    assert watch()
    base.kind = 1  # type: ignore[attr-defined]
    assert not watch()


def test_an_address_is_not_given_to_another() -> None:
    items, cell = [object()], types.CellType(object())
    watch = calls.watch((items, cell), False)
    assert watch is not None
    for _ in range(100):
        items[0] = None  # type: ignore[call-overload]
        cell.cell_contents = None
        items[0], cell.cell_contents = object(), object()
        assert not watch()


def test_contents_are_looked_at_where_they_matter() -> None:
    weight = parameter()
    described, whole = calls.watch((weight,), False), calls.watch((weight,), True)
    assert described is not None
    assert whole is not None
    with torch.no_grad():
        weight.add_(1)
    assert described()
    assert not whole()
    whole = calls.watch((weight,), True)
    assert whole is not None
    kept, weight.data = weight.data, weight.data.clone()
    assert kept.data_ptr() != weight.data_ptr()
    assert described()
    assert not whole()


def test_tensors_are_found_in_their_order() -> None:
    a, b = parameter(), parameter()
    watch = calls.watch((a, b), True)
    assert watch is not None
    assert watch((1, a, None, b))
    for other in ((), (a,), (b, a), (a, a), (a, parameter())):
        assert not watch(other)


def test_what_is_no_plain_tensor_is_not_watched() -> None:
    assert calls.watch((torch.ones(2).to_sparse(),), False) is None
    assert calls.watch((torch.ones(2, device="meta"),), False) is None
    with pytest.raises(TypeError, match="a tuple and a bool"):
        calls.watch([], False)  # type: ignore[arg-type]


def test_a_watch_and_what_it_watches_are_let_go() -> None:
    thing = Thing()
    thing.watch = calls.watch((thing, vars(thing), [thing]), False)  # type: ignore[attr-defined]
    seen = weakref.ref(thing)
    del thing
    gc.collect()
    assert seen() is None
