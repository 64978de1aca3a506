"""A program's buffers: reused where nothing reads them any more, never where a caller or a later step could see it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler.program.program import Program
from opsmith.compiler.steps.bind import kernel_calls
from opsmith.compiler.steps.source import Writer
from opsmith.kernels import libraries
from tests.compiler.models import UNTIMED, WIDTH, Encoder, Feed, Truth, gpt2, ids, numbers, padding, seeded


def _programs(model: Any) -> list[Any]:
    return [p for graph in model.opsmith.graphs for p in graph.programs.by_key.values()]


def test_buffers_are_shared_by_steps_that_do_not_meet() -> None:
    model = seeded(lambda: Encoder(layers=3))
    truth = Truth(model)
    inputs = (ids(3, 9), padding(3, 9))
    opsmith.optimize(model, inputs, config=UNTIMED)
    (program,) = _programs(model)
    assert len(program.taken) >= 6  # the norms, the attentions
    assert len(program.slots) < len(program.taken)
    (shape,) = model.opsmith.plan.shapes
    assert shape.buffer_bytes == sum(program.slots)
    # What the recording run gave away is not needed again: poisoned buffers do not show.
    with torch.no_grad():
        model(*inputs)
        for buffers in program._free:
            for buffer in buffers.of(program):
                buffer.fill_(float("nan"))
        truth.check(model(*inputs), *inputs)


def test_a_call_in_flight_has_buffers_of_its_own() -> None:
    model = seeded(Feed)
    x = numbers(3, 4, WIDTH)
    opsmith.optimize(model, x, config=UNTIMED)
    (program,) = _programs(model)
    with torch.no_grad():
        model(x)
    assert len(program._free) == 1
    program._free.clear()  # as while another call has them
    with torch.no_grad():
        model(x)
        model(x)
    assert len(program._free) == 1


def test_programs_of_a_graph_share_what_the_largest_needs() -> None:
    model = seeded(Feed)
    truth = Truth(model)
    sizes = [numbers(batch, 8, WIDTH) for batch in (3, 9, 5, 2)]
    opsmith.optimize(model, sizes, config=UNTIMED)
    (graph,) = model.opsmith.graphs
    programs = _programs(model)
    assert len(programs) == len(sizes)
    with torch.no_grad():
        for x in (*sizes, *sizes[::-1]):
            truth.check(model(x), x)
            for buffers in graph.programs.buffers:  # what one program leaves is nothing to the next
                for program in programs:
                    for buffer in buffers.of(program):
                        buffer.fill_(float("nan"))
    (buffers,) = graph.programs.buffers
    held = {
        b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for p in programs for b in buffers.of(p)
    }
    assert sum(held.values()) == max(sum(p.slots) for p in programs)
    known = weakref.ref(programs[0])
    graph.programs.clear()
    del programs, program, buffers
    assert known() is None
    assert not graph.programs.buffers


class _Reused(nn.Module):
    """One result is needed at once, after a while, and as a view at the very end."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList([Feed() for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.feeds[0](x)
        view = first.view(-1, 2, WIDTH // 2).transpose(0, 1)
        y = first
        for feed in self.feeds:
            y = feed(y)
        total: torch.Tensor = y + first + view.sum() + torch.softmax(view, -1).sum()
        return total


def test_a_buffer_lives_as_long_as_a_view_of_it() -> None:
    model = seeded(_Reused)
    truth = Truth(model)
    x = numbers(3, 4, WIDTH)
    opsmith.optimize(model, x, config=UNTIMED)
    for seed in range(3):
        x = numbers(3, 4, WIDTH, seed=seed)
        with torch.no_grad():
            truth.check(model(x), x)


class _Positions(nn.Module):
    """Results that follow from the sizes alone, one of them as a view."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(x.shape[1])
        mask = torch.ones(x.shape[1], x.shape[1]).tril()
        return torch.softmax(x + mask.sum(), -1), positions.view(1, -1), mask[0], positions * 2


def test_what_follows_from_the_sizes_is_new_for_every_caller() -> None:
    model = _Positions()
    x = numbers(3, 4, WIDTH)
    want = model(x)
    opsmith.optimize(model, x, config=UNTIMED)
    for _ in range(3):
        with torch.no_grad():
            got = model(x)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)
        for t in got:
            t.zero_()


class _Sizes(nn.Module):
    """Arithmetic on sizes, whose names are those of Python's own functions."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        rows = x.reshape(b * n, d)[: (b + n) // 2 * 2 - 1]
        part = rows[: rows.shape[0] % 7 + 1] * (n / b) + float(y.shape[0] - b)
        return torch.softmax(part, -1) + part.new_full((), max(b, n) ** 2)


def test_arithmetic_on_sizes() -> None:
    model: Any = _Sizes()
    x, y = numbers(3, 4, WIDTH), numbers(6, 5)
    eager = copy.deepcopy(model)
    opsmith.optimize(model, (x, y), config=UNTIMED)
    for b, n in [(3, 4), (4, 5), (5, 9), (3, 4)]:
        x, y = numbers(b, n, WIDTH), numbers(b + n, 5)
        for _ in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(x, y), eager(x, y))
    assert len(model.opsmith.plan.shapes) >= 3


class _Constants(nn.Module):
    """Infinities, slices, dtypes, devices, strings, lists and None as arguments."""

    def forward(self, x: torch.Tensor) -> list[Any]:
        y = torch.nn.functional.pad(x, (1, 2), value=float("-inf"))
        z = torch.nan_to_num(y, nan=0.0, posinf=float("inf"), neginf=-1.0).to(torch.float64)
        e = torch.einsum("bld,bmd->blm", x, x)
        w = torch.nn.functional.gelu(x, approximate="tanh")
        parts = torch.split(x, [8, WIDTH - 8], dim=-1)
        flipped = torch.roll(x, shifts=(1, -1), dims=(0, 1)).clamp(min=None, max=0.5)
        return [y, z, e, w, *parts, flipped, torch.zeros(2, dtype=torch.int8, device=x.device), None, "text"]


def test_every_kind_of_argument_is_written_out_right() -> None:
    model = _Constants()
    x = numbers(3, 4, WIDTH)
    opsmith.optimize(model, x, config=UNTIMED)
    with torch.no_grad():
        for _ in range(2):
            for got, want in zip(model(x), _Constants()(x), strict=True):
                if isinstance(want, torch.Tensor):
                    torch.testing.assert_close(got, want)
                else:
                    assert got == want


def test_many_sizes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.compiler.program.programs.MAX_PROGRAMS", 5)
    model = seeded(Feed)
    truth = Truth(model)
    opsmith.optimize(model, numbers(2, 4, WIDTH), config=UNTIMED)
    for _ in range(2):
        for batch in range(2, 12):
            with torch.no_grad():
                truth.check(model(numbers(batch, 4, WIDTH)), numbers(batch, 4, WIDTH))
    assert len(_programs(model)) <= 5
    assert len(model.opsmith.plan.shapes) <= 5


def test_a_growing_cache_needs_no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    from opsmith import measure

    model = seeded(gpt2)
    opsmith.optimize(model, ids(2, 7))
    calls: list[int] = []
    quick = measure.quick

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return quick(*args, **options)

    monkeypatch.setattr(measure, "quick", counted)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(ids(2, 7), max_new_tokens=4, **options)
    first = len(calls)
    model.generate(ids(2, 7), max_new_tokens=12, **options)
    assert len(calls) == first


def _twice(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    rows = out.view(-1, out.shape[-1])
    for _ in range(2):
        torch.ops.opsmith.softmax.default(x.view(rows.shape), None, 1.0, False, 0, y=rows)
    return out


def test_a_step_comes_to_the_kernels_it_calls_and_runs_none() -> None:
    x, out = numbers(2, 3, 4), torch.full((2, 3, 4), 7.0)
    found = kernel_calls(_twice, {"x": x, "out": out}, lambda t: True)
    assert found is not None
    assert (found.inputs, found.views) == ([], [])
    calls = found.calls
    assert [str(func) for func, _, _ in calls] == ["opsmith.softmax.default"] * 2
    assert calls[0][1][0].data_ptr() == x.data_ptr()
    assert calls[0][2]["y"].shape == (6, 4)
    assert bool((out == 7).all())


def test_an_input_that_is_new_at_every_call_is_viewed_anew() -> None:
    x, out = numbers(2, 3, 4), torch.full((2, 3, 4), 7.0)
    found = kernel_calls(_twice, {"x": x, "out": out}, lambda t: t.data_ptr() == out.data_ptr())
    assert found is not None
    assert found.inputs == ["x"]
    graph = torch.fx.Graph()
    writer = Writer({"x"}, lambda value: "x" if isinstance(value, torch.fx.Node) else None)
    lines = writer.kernels("y", found, {"x": graph.placeholder("x")}, {"x": x})
    source, run = writer.compile(["    (x,) = args", *lines])
    assert source.count("aten_view_default(x, [6, 4])") == 2
    if not libraries.load():
        pytest.skip("there are no kernels here")
    other = numbers(2, 3, 4, seed=5)
    run([other], [])
    torch.testing.assert_close(out, other.softmax(-1))


def test_what_computes_more_than_kernels_keeps_its_python() -> None:
    x, out = numbers(2, 3, 4), torch.full((2, 3, 4), 7.0)
    assert kernel_calls(lambda x, out: out.copy_(x), {"x": x, "out": out}, lambda t: True) is None
    assert bool((out == 7).all())


def test_between_its_ends_a_plan_is_calls_of_kernels_on_fixed_memory() -> None:
    model = seeded(lambda: Encoder(layers=3))
    truth = Truth(model)
    inputs = (ids(3, 9), padding(3, 9))
    native = UNTIMED.model_copy(update={"pin": {"linear": "native", "layer_norm": "native"}})
    opsmith.optimize(model, inputs, config=native)
    (program,) = _programs(model)
    text = program.source
    assert text.count("opsmith_layer_norm") > text.count("layer_norm_native")
    assert text.count("opsmith_linear_unpacked") > text.count("linear_native")
    with torch.no_grad():
        truth.check(model(*inputs), *inputs)
        for p in model.parameters():
            p.mul_(1.25)
        changed = seeded(lambda: Encoder(layers=3))
        changed.load_state_dict(model.state_dict())
        Truth(changed).check(model(*inputs), *inputs)  # the weights in the calls are those of the model


def test_an_input_may_come_in_another_layout() -> None:
    model = seeded(Feed)
    truth = Truth(model)
    x = numbers(6, 4, WIDTH)
    opsmith.optimize(model, x, config=UNTIMED)
    with torch.no_grad():
        for like in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x.repeat(1, 1, 2)[..., :WIDTH]):
            assert like.shape == x.shape
            truth.check(model(like), like)


def test_slots_are_where_their_results_were() -> None:
    meta = torch.device("meta")
    layout = (0, 16, torch.float32, (2, 3), (3, 1))
    program = Program({}, "", [64], [meta], [layout], lambda args, buffers: buffers[0], [])
    assert program([]).device == meta
    assert program([]).shape == (2, 3)


class Begins(nn.Module):
    """What a model does whose cache is made in its call: keys behind nothing. And two constants, one given away."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nothing, own, given = torch.tensor([]), torch.tensor([0.5]), torch.tensor([1.5])
        return nothing, torch.cat((nothing.view(0, WIDTH), self.layer(x))) * own, given


@torch.no_grad()
def test_constants_are_made_once_but_for_what_the_caller_may_change() -> None:
    model, x = seeded(Begins), numbers(3, WIDTH)
    truth = copy.deepcopy(model)
    opsmith.optimize(model, x, config=UNTIMED)
    for _ in range(3):
        results = model(x)
        for ours, its in zip(results, truth(x), strict=True):
            torch.testing.assert_close(ours, its)
        results[2].add_(1)
    (shape,) = model.opsmith.plan.shapes  # type: ignore[union-attr]
    assert shape.source.count("lift_fresh_copy_default(") == 1
