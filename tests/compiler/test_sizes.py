"""One program for many sizes: what varies from call to call, a cache above all, is no reason to record anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.fx.experimental.symbolic_shapes import free_symbols

import opsmith
from opsmith.compiler.plan import ShapePlan
from opsmith.compiler.program.program import Open, varying
from opsmith.compiler.program.programs import Programs, differing
from opsmith.compiler.steps.slots import last_uses
from opsmith.operator import Implementation, registry
from tests.compiler.models import UNTIMED, WIDTH, Encoder, Feed, Truth, ids, llama, numbers, padding, seeded

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
GROWING = UNTIMED.model_copy(update={"cache": "off"})  # the library's caches, whose sizes are in the graph


def _programs(model: Any) -> dict[Any, Any]:
    found = {k: p for graph in model.opsmith.graphs for k, p in graph.programs.by_key.items()}
    assert None not in found.values()
    return found


def _spans(model: Any) -> dict[Any, Any]:
    return {k: p for k, p in _programs(model).items() if any(isinstance(s, range) for s in k)}


def test_a_growing_cache_is_served_by_few_programs() -> None:
    model = seeded(llama)
    want = model.generate(ids(2, 7), max_new_tokens=50, **GREEDY)
    opsmith.optimize(model, config=GROWING)
    assert torch.equal(model.generate(ids(2, 7), max_new_tokens=50, **GREEDY), want)
    # The prompt, its first token, and one program for each power of two that the cache grows into.
    assert len(_programs(model)) <= 7
    spans = _spans(model)
    assert len(spans) >= 3
    assert not any(program.fresh for program in spans.values())
    # What does not depend on the length of the cache is a kernel's call on fixed memory, as in any program.
    assert all("opsmith_rms_norm_default(buffers[" in program.source for program in spans.values())
    assert torch.equal(model.generate(ids(2, 7), max_new_tokens=50, **GREEDY), want)
    assert len(_programs(model)) <= 7


def test_a_bias_that_grows_with_the_cache_is_no_reason_for_a_program_of_its_own() -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 90}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model = seeded(lambda: transformers.T5ForConditionalGeneration(config).eval())
    opsmith.optimize(model, config=GROWING)
    for _ in range(3):
        model.generate(ids(1, 7), max_new_tokens=20, **GREEDY)
    assert len(_spans(model)) >= 3  # the relative positions are looked up anew, all else stands in buffers
    assert len(_programs(model)) <= 8


def test_a_cache_captured_anew_keeps_its_constants() -> None:
    model = seeded(llama)
    opsmith.optimize(model, config=GROWING)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for _ in range(3):  # the same arguments from outside, and first an empty cache, then a filled one
            model(ids(1, 9), past_key_values=cache, use_cache=True)
    assert len(model.opsmith.graphs) == 2
    for graph in model.opsmith.graphs:
        assert [site.operator for site in graph.report.kept].count("rms_norm") == 5


def test_sizes_that_are_equal_once_are_captured_once() -> None:
    model = seeded(lambda: llama(layers=1))
    opsmith.optimize(model, config=GROWING)
    model.generate(ids(2, 2), max_new_tokens=6, **GREEDY)
    assert len(model.opsmith.graphs) == 2  # the prompt's and the tokens'


@pytest.mark.parametrize("shuffled", [False, True])
def test_sizes_nobody_has_seen_give_the_same_numbers(shuffled: bool) -> None:
    model = seeded(Encoder)
    truth = Truth(model)
    opsmith.optimize(model, (ids(3, 9), padding(3, 9)), config=UNTIMED)
    sizes = [(b, n) for b in (2, 3, 5) for n in (5, 9, 11, 12, 17, 31)]
    if shuffled:
        random.Random(0).shuffle(sizes)
    for b, n in sizes * 2:
        inputs = (ids(b, n, seed=b * n), padding(b, n))
        with torch.no_grad():
            truth.check(model(*inputs), *inputs)
        for program in _programs(model).values():
            for buffers in program._free:
                for buffer in buffers.of(program):
                    buffer.fill_(float("nan") if buffer.is_floating_point() else 1)
    assert _spans(model)


def test_sizes_that_come_often_get_a_program_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.compiler.program.programs.OFTEN", 2)
    model = seeded(Feed)
    truth = Truth(model)
    opsmith.optimize(model, numbers(2, 4, WIDTH), config=UNTIMED)
    for batch in (9, 10, 11, 10, 11, 10):
        x = numbers(batch, 4, WIDTH)
        with torch.no_grad():
            truth.check(model(x), x)
    (graph,) = model.opsmith.graphs
    keys = list(graph.programs.by_key)
    assert [isinstance(k[0], range) for k in keys] == [False, True, False]
    assert keys[2][0] == 10
    sizes = [shape.sizes.partition("×")[0] for shape in model.opsmith.plan.shapes]
    assert sizes == ["2", "8 to 15", "10"]


class _Views(nn.Module):
    """A result of fixed size that is seen through a view of a size that varies, and needed after the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.feeds = nn.ModuleList([Feed() for _ in range(3)])

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        first = self.feeds[0](x)
        view = first[: other.shape[0]].reshape(-1, 2, WIDTH // 2).transpose(0, 1)
        wide = first[:1].expand(other.shape[0], -1, -1)
        y = first
        for feed in self.feeds:
            y = feed(y)
        return torch.cat([t.flatten() for t in (y, wide, view, torch.softmax(other, -1))])


def test_a_view_whose_size_varies_keeps_a_buffer_alive() -> None:
    model = seeded(_Views)
    truth = Truth(model)
    opsmith.optimize(model, (numbers(6, 4, WIDTH), numbers(3, WIDTH)), config=UNTIMED)
    for rows in (2, 3, 4, 5, 6, 5, 4, 3, 2):
        inputs = (numbers(6, 4, WIDTH, seed=rows), numbers(rows, WIDTH, seed=rows + 9))
        with torch.no_grad():
            truth.check(model(*inputs), *inputs)
    assert _spans(model)


def test_changed_weights_are_seen_by_a_program_for_many_sizes() -> None:
    model = seeded(Feed)
    opsmith.optimize(model, numbers(2, 4, WIDTH), config=UNTIMED)
    with torch.no_grad():
        model(numbers(9, 4, WIDTH))
        assert _spans(model)
        for p in model.parameters():
            p.mul_(1.5)
        changed = seeded(Feed)
        changed.load_state_dict(model.state_dict())
        for batch in (9, 12, 12):
            x = numbers(batch, 4, WIDTH)
            Truth(changed).check(model(x), x)


def test_an_implementation_that_is_not_able_gives_way() -> None:
    card = registry()["softmax"]
    refused: list[Any] = []

    def never(*args: Any, **kwargs: Any) -> str:
        refused.append(kwargs["x"].shape)
        return "never"

    def fail(**call: Any) -> None:
        raise AssertionError(call)

    site = Open(card, Implementation("never", fail, supports=never), {})
    x = numbers(3, 5)
    want = torch.softmax(x, -1)
    torch.testing.assert_close(site(x=x), want)
    out = torch.empty(3, 5)
    site(x=x, out=out)
    torch.testing.assert_close(out, want)
    assert refused == [x.shape] * 2


def test_spans_end_at_powers_of_two() -> None:
    class Holder:
        def __init__(self, value: Any) -> None:
            self.meta = {"val": value}

    shapes = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    source = torch._dynamo.source.ConstantSource("n")
    symbol = shapes.create_symbol(20, source)
    size = shapes.create_symintnode(symbol, hint=20, source=source)
    held: Any = [Holder(4), Holder(size), Holder(torch.empty(size, 7, device="meta")), Holder(torch.empty(5))]
    programs, plan = Programs(held), ShapePlan("", [], 0, False, "")
    programs.keep((3, 10), None, plan)
    sizes, free = programs.span((4, 20), example=False)
    assert sizes == (4, range(16, 32))  # the first is no symbol: it is the same in every call of this graph
    assert free == {symbol}
    assert not differing((4, 31), sizes)
    assert differing((4, 32), sizes) == {1}
    assert differing((5, 32), sizes) == {0, 1}
    assert programs.named(sizes) == "16 to 31×7"  # numbers and weights of the model are no sizes
    assert Programs(held[::3]).named((4,)) == ""
    assert Programs([*held, held[2]]).named((4, 3)) == "3×7"  # two inputs of one size
    assert free_symbols([size + 1, 3]) == {symbol}
    assert varying([], free) == set()


def test_what_may_be_a_view_at_other_sizes_keeps_a_buffer() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.relu.default, (x,))
    view = graph.call_function(torch.ops.aten.reshape.default, (first, [-1]))
    second = graph.call_function(torch.ops.aten.relu.default, (x,))
    both = graph.call_function(torch.ops.aten.add.Tensor, (view, second))
    graph.output(both)
    nodes = [*graph.nodes]
    made = {n: numbers(2, 3) for n in (x, first, second, both)}
    env = {**made, view: numbers(2, 3)}  # a copy, at the recorded sizes
    candidates = {n: (made[n],) for n in (first, second)}
    assert last_uses(nodes, env, made[both], candidates, set())[first] == nodes.index(view)
    assert last_uses(nodes, env, made[both], candidates, {view})[first] == nodes.index(both)
