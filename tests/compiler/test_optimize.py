"""`optimize` gives the same model back, faster inside: the same results, state and methods, and all of it undone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.call.dispatch import native_library
from opsmith.measure import products
from tests.compiler.models import (
    UNTIMED,
    VOCABULARY,
    WIDTH,
    Encoder,
    Feed,
    Truth,
    bert,
    gemma,
    gpt2,
    ids,
    llama,
    numbers,
    optimized,
    padding,
    seeded,
    t5,
)


def test_a_written_out_encoder_is_recognized_and_right_at_every_size() -> None:
    model = seeded(Encoder)
    truth = Truth(model)
    optimized(model, ids(3, 9), padding(3, 9))
    assert model.opsmith.report.found == {"attention": 2, "layer_norm": 5, "linear": 12, "embedding": 2}
    assert model.opsmith.report.rolled_back == []
    for batch, length in [(3, 9), (2, 5), (7, 31), (4, 16), (3, 9)]:
        with torch.no_grad():
            got = model(ids(batch, length), padding(batch, length))
        truth.check(got, ids(batch, length), padding(batch, length))
    assert len(model.opsmith.graphs) == 1  # one graph for all of them


class _Squeezed(nn.Module):
    """What it computes depends on the number of axes that `squeeze` leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.feed(x)
        return y.squeeze(0) * 2 if y.squeeze(0).dim() == 2 else y + 1


class _Alone(_Squeezed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed(x) * (3 if x.shape[0] == 1 else 1)


def test_one_graph_serves_a_batch_of_one_unless_the_model_asks_for_it() -> None:
    for build, graphs in ((Feed, 1), (_Squeezed, 2), (_Alone, 2)):
        model = seeded(build)
        truth = Truth(model)
        optimized(model, numbers(3, 4, WIDTH))
        for batch, length in [(1, 4), (2, 7), (1, 9), (3, 4)]:
            with torch.no_grad():
                truth.check(model(numbers(batch, length, WIDTH)), numbers(batch, length, WIDTH))
        assert len(model.opsmith.graphs) == graphs


def test_sizes_of_zero_and_one_cost_a_graph_each_at_most() -> None:
    model = seeded(lambda: Encoder(layers=1))
    truth = Truth(model)
    optimized(model, ids(3, 9))
    for batch, length in [(1, 9), (1, 5), (3, 1), (1, 1), (5, 7)]:
        with torch.no_grad():
            truth.check(model(ids(batch, length)), ids(batch, length))
    assert len(model.opsmith.graphs) <= 4
    with torch.no_grad():
        assert model(ids(0, 5)).shape == (0, 5, WIDTH)
        assert model(ids(0, 5)).shape == (0, 5, WIDTH)


@pytest.mark.parametrize("make", [bert, gpt2, llama], ids=["bert", "gpt2", "llama"])
def test_hugging_face_models_give_the_same_results(make: Callable[[], Any]) -> None:
    model = seeded(make)
    truth = Truth(model)
    kind, keys = type(model), list(model.state_dict())
    inputs = {"input_ids": ids(2, 8), "attention_mask": padding(2, 8).long()}
    returned: Any = opsmith.optimize(model, inputs, config=UNTIMED)
    assert returned is model
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert model.opsmith.report.found["attention"] == 2
    for batch, length in [(2, 8), (3, 13)]:
        inputs = {"input_ids": ids(batch, length), "attention_mask": padding(batch, length).long()}
        with torch.no_grad():
            truth.check(model(**inputs), **inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [llama, gemma, t5], ids=["llama", "gemma", "t5"])
def test_every_rms_norm_is_found_with_the_addition_before_it(
    make: Callable[[], Any], dtype: torch.dtype
) -> None:
    model = seeded(make).to(dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # as they are initialized, Gemma's would not show whether the one was added
            torch.nn.init.uniform_(parameter, -0.5, 0.5, generator=torch.Generator().manual_seed(3))
    truth = Truth(model)
    inputs = {"input_ids": ids(2, 8), "attention_mask": padding(2, 8).long()}
    opsmith.optimize(model, inputs, config=UNTIMED)
    assert model.opsmith.report.rolled_back == []
    norms = [s for shape in model.opsmith.plan.shapes for s in shape.steps if s.operator == "rms_norm"]
    assert len(norms) == 5
    assert sum("residual" in s.signature for s in norms) == 4  # all but the first have a sum before them
    if native_library():
        assert {s.implementation for s in norms} == {"native"}
    with torch.no_grad():
        truth.check(model(**inputs), **inputs)


# That the layers of a cache are kept apart is seen with one model's.
@pytest.mark.parametrize("make", [partial(gpt2, layers=1), llama], ids=["gpt2", "llama"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_gives_the_tokens_of_eager(make: Callable[[], Any], cache: str) -> None:
    model = seeded(make)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(ids(2, 7), **options)
    options["cache_implementation"] = cache
    optimized(model, ids(2, 7))
    got = model.generate(ids(2, 7), **options)
    norms = [[s.operator.endswith("_norm") for s in g.report.sites] for g in model.opsmith.graphs]
    assert len({sum(n) for n in norms}) == 1  # in every graph, not in the example's alone
    assert got.tolist() == want.tolist()
    assert len(model.opsmith.graphs) <= 4  # the prompt and the steps, however many steps there are


def test_whatever_asks_for_a_new_graph_all_is_found_in_it() -> None:
    model = optimized(seeded(partial(llama, layers=1)), ids(2, 7))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            model(ids(2, 7))
        model.to(torch.bfloat16)
        model(ids(2, 7))
    with torch.inference_mode():
        model(ids(2, 7))
    truth = Truth(seeded(partial(llama, layers=1)).to(torch.bfloat16))
    model.requires_grad_(False).lm_head.requires_grad_(True)
    truth.check(model(ids(2, 7), return_dict=False), ids(2, 7), return_dict=False)
    first, cast, *others = (
        [s.operator for s in g.report.kept for _ in range(s.layers)] for g in model.opsmith.graphs
    )
    assert len(others) == 3
    assert cast.count("rms_norm") == first.count("rms_norm")  # products are cast at their call
    assert all(found == first for found in others)


def test_state_and_files_are_those_of_the_model(tmp_path: Path) -> None:
    model = seeded(bert)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    optimized(model, ids(2, 8))
    state = model.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], t) for name, t in before.items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.load_state_dict(state).missing_keys == []
    assert not hasattr(again, "opsmith")
    with torch.no_grad():
        want = seeded(bert)(ids(2, 8), return_dict=False)[0]
        assert torch.equal(again.eval()(ids(2, 8), return_dict=False)[0], want)


def test_tangents_of_forward_mode_are_the_models() -> None:
    model = seeded(Feed)
    x, tangent = numbers(3, 5, WIDTH), numbers(3, 5, WIDTH)

    def derivative() -> torch.Tensor:
        with torch.autograd.forward_ad.dual_level():
            return torch.autograd.forward_ad.unpack_dual(
                model(torch.autograd.forward_ad.make_dual(x, tangent))
            ).tangent

    expected = derivative()
    optimized(model, x)
    torch.testing.assert_close(derivative(), expected)


def test_restore_gives_the_model_back_exactly() -> None:
    model = seeded(Feed)
    attributes = set(vars(model))
    state = model.state_dict()
    values, memory = {n: t.clone() for n, t in state.items()}, {n: t.data_ptr() for n, t in state.items()}
    x = numbers(4, 6, WIDTH)
    with torch.no_grad():
        want = model(x)
    optimized(model, x.bfloat16(), dtype="bfloat16")
    assert model.up.weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(x.bfloat16()).dtype == torch.bfloat16
    assert opsmith.restore(model) is model
    for name, t in model.state_dict().items():
        assert t.dtype == values[name].dtype
        assert torch.equal(t, values[name])
        assert t.data_ptr() == memory[name]
    assert set(vars(model)) - {"_compiled_call_impl"} == attributes - {"_compiled_call_impl"}
    with torch.no_grad():
        assert torch.equal(model(x), want)
    assert opsmith.restore(model) is model  # nothing left to undo


def test_bfloat16_is_as_accurate_as_eager_bfloat16() -> None:
    model = seeded(Encoder)
    truth = Truth(model)
    truth.eager.bfloat16()
    optimized(model, ids(3, 9), dtype=torch.bfloat16)
    with torch.no_grad():
        truth.check(model(ids(2, 12)), ids(2, 12))


def test_optimizing_twice_starts_from_the_original() -> None:
    model = seeded(Feed)
    truth = Truth(model)
    x = numbers(4, 6, WIDTH)
    optimized(model, x.bfloat16(), dtype="bfloat16")
    first = model.opsmith
    optimized(model, x)
    assert model.opsmith is not first
    assert model.up.weight.dtype == torch.float32
    with torch.no_grad():
        truth.check(model(x), x)


def test_a_copy_and_a_pickled_model_run_on_their_own_weights() -> None:
    model = seeded(Feed)
    x = numbers(4, 6, WIDTH)
    optimized(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            other.norm.bias.fill_(7.0)
            other.norm.weight.zero_()
            assert torch.equal(other(x), torch.full_like(x, 7.0))
            assert not torch.equal(model(x), other(x))
        assert other.opsmith is not model.opsmith
        optimized(other, x)
        with torch.no_grad():
            assert torch.equal(other(x), torch.full_like(x, 7.0))


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_deep_copy_is_optimized_alike_and_can_be_restored(quantize: str | None) -> None:
    model, x = seeded(Feed), numbers(4, 6, WIDTH)
    eager = copy.deepcopy(model)
    optimized(model, x, quantize=quantize)
    twin = copy.deepcopy({"a": model, "b": model})["a"]
    with torch.no_grad():
        assert torch.equal(twin(x), model(x))
    assert twin.opsmith.plan.choices() == model.opsmith.plan.choices()
    assert len(twin.opsmith.report.quantized) == len(model.opsmith.report.quantized)
    opsmith.restore(model)
    opsmith.restore(twin)
    assert not any("forward" in vars(m) for other in (model, twin) for m in other.modules())
    with torch.no_grad():
        assert torch.equal(twin(x), eager(x))
        twin.up.weight.zero_()
        assert torch.equal(model(x), eager(x))


def test_a_restored_model_is_not_kept_alive() -> None:
    model = seeded(Feed)
    optimized(model, numbers(4, 6, WIDTH))
    alive = weakref.ref(model.up.weight)
    opsmith.restore(model)
    del model
    gc.collect()
    assert alive() is None


class _Broken(nn.Module):
    """A graph break, and control flow on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Feed(), Feed()

    def forward(self, x: torch.Tensor) -> Any:
        y = self.a(x)
        if float(y.detach().sum()) > 1e9:
            y = y * 0
        y = self.b(y)
        torch._dynamo.graph_break()
        return y * 2


def test_graph_breaks_are_bridged() -> None:
    model = seeded(_Broken)
    truth = Truth(model)
    x = numbers(3, 4, WIDTH)
    optimized(model, x)
    assert len(model.opsmith.graphs) >= 2
    assert sum(s.operator == "layer_norm" for s in model.opsmith.report.sites) == 2
    with torch.no_grad():
        truth.check(model(x), x)
        truth.check(model(numbers(5, 6, WIDTH)), numbers(5, 6, WIDTH))


class _Layer(Feed):
    """A layer in which the graph breaks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        z: torch.Tensor = self.norm(self.down(nn.functional.gelu(y)) + x)
        return z


@torch.no_grad()
def test_layers_that_run_one_graph_in_turn_keep_a_program_each() -> None:
    """Whose code is captured once, with weights as inputs: to begin anew with each layer's took longer than eager."""
    model, x = seeded(lambda: nn.Sequential(*[_Layer() for _ in range(3)])), numbers(3, 4, WIDTH)
    optimized(model, x)
    graphs = model.opsmith.graphs
    before = [dict(graph.programs.by_key) for graph in graphs]
    assert len(graphs) == 6  # two of each layer
    for _ in range(2):
        torch.testing.assert_close(model(x), model._call_impl(x))
    assert [graph.programs.by_key for graph in graphs] == before
    for layer in model:  # the graph of weights that are gone serves those that came in their place
        layer.up.weight = nn.Parameter(layer.up.weight + 1)
        torch.testing.assert_close(model(x), model._call_impl(x))
    assert len(graphs) == 6


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return dy * 3 * x**2


@torch.library.custom_op("opsmith_tests::halve", mutates_args=())
def _halve(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@_halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _Unknown(nn.Module):
    def __init__(self, unknown: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.b = Feed(), Feed()
        self.unknown = unknown

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.b(self.unknown(self.a(x)))
        return y


@pytest.mark.parametrize("unknown", [_Cube.apply, _halve], ids=["autograd.Function", "custom_op"])
def test_unknown_operators_run_as_before(unknown: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = seeded(lambda: _Unknown(unknown))
    x = numbers(3, 4, WIDTH)
    with torch.no_grad():
        want = model(x)
    optimized(model, x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), want)
    assert model.opsmith.report.found["layer_norm"] == 2


class _Structured(nn.Module):
    """Takes a dictionary and a tuple, gives a dictionary with a tuple, None and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.feed = Feed()

    def forward(
        self, batch: dict[str, torch.Tensor], pair: tuple[torch.Tensor, float], flag: bool = True
    ) -> dict[str, Any]:
        y = self.feed(batch["x"])
        z = self.feed(pair[0]) * pair[1] if flag else pair[0]
        return {"y": y, "both": (y + z, z), "none": None, "rows": batch["x"].shape[0]}


def test_structured_inputs_and_outputs() -> None:
    model = seeded(_Structured)
    eager = copy.deepcopy(model)
    x, z = numbers(3, 4, WIDTH), numbers(3, 4, WIDTH, seed=5)
    opsmith.optimize(model, ({"x": x}, (z, 2.0)), config=UNTIMED)
    for flag in (True, False):
        with torch.no_grad():
            got, want = model({"x": x}, (z, 2.0), flag=flag), eager({"x": x}, (z, 2.0), flag=flag)
        assert got.keys() == want.keys()
        assert got["none"] is None
        assert got["rows"] == 3
        torch.testing.assert_close(got, want)


class _Tied(nn.Module):
    """The embedding's table is the weight of the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.feed = Feed()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.feed(self.table(token_ids)))
        return y


def test_shared_weights_stay_shared() -> None:
    model = seeded(_Tied)
    memory = model.table.weight.data_ptr()
    truth = Truth(model)
    truth.eager.bfloat16()
    optimized(model, ids(3, 5), dtype="bfloat16")
    assert model.head.weight is model.table.weight
    with torch.no_grad():
        truth.check(model(ids(2, 7)), ids(2, 7))
    opsmith.restore(model)
    assert model.head.weight is model.table.weight
    assert model.table.weight.data_ptr() == memory


def test_strided_inputs() -> None:
    model = seeded(Feed)
    truth = Truth(model)
    optimized(model, numbers(3, 4, WIDTH))
    wide = numbers(6, 8, 2 * WIDTH)
    for x in (
        wide[::2, ::3, :WIDTH],
        wide[..., ::2],
        wide.transpose(0, 1)[..., 5 : 5 + WIDTH],
        wide[:1, :, WIDTH:].expand(4, 8, WIDTH),
    ):
        with torch.no_grad():
            truth.check(model(x), x)
            truth.check(model(x), x)


def test_an_einsum_that_turns_its_result_may_be_viewed() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(numbers(7, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("nk,lk->ln", x, self.weight).view(-1)

    truth, x = Truth(Turned()), numbers(5, WIDTH)
    model: Any = opsmith.optimize(Turned(), x, config=UNTIMED)
    assert model.opsmith.report.found == {"linear": 1}
    with torch.no_grad():
        truth.check(model(x), x)
    truth.check(model(x), x)


def test_heads_that_are_joined_with_nothing_may_be_viewed() -> None:
    """Of a rotation of all features there is no rest; a join lies in one piece all the same (GPT-NeoX Japanese)."""

    class Joined(Feed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (super().forward(x) + 1).view(*x.shape[:2], 4, -1).transpose(1, 2) * 2
            return torch.cat((heads, heads[..., :0]), -1).view(-1, *heads.shape[2:])

    model = seeded(Joined)
    truth, x = Truth(model), numbers(3, 4, WIDTH)
    optimized(model, x)
    assert model.opsmith.report.found["layer_norm"] == 1
    with torch.no_grad():
        truth.check(model(x), x)


def test_without_examples_the_first_call_is_the_example() -> None:
    model = seeded(Feed)
    truth = Truth(model)
    opsmith.optimize(model, config=UNTIMED)
    assert model.opsmith.graphs == []
    x = numbers(3, 4, WIDTH)
    with torch.no_grad():
        truth.check(model(x), x)
    assert model.opsmith.report.found["layer_norm"] == 1


def test_hooks_still_run() -> None:
    model = seeded(Feed)
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    x = numbers(3, 4, WIDTH)
    optimized(model, x)
    seen.clear()
    with torch.no_grad():
        model(x)
    assert seen == [1]


def test_a_dtype_without_a_unit_is_named_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "slowness", lambda dtype: 34.0 if dtype == torch.bfloat16 else 1.0)
    model = opsmith.optimize(seeded(Feed), [numbers(3, 4, WIDTH).bfloat16()], dtype="bfloat16")
    said = "no unit for products in bfloat16: PyTorch takes 34 times as long as in float32"
    assert said in str(model.opsmith.report)
    assert said not in str(opsmith.optimize(seeded(Feed), [numbers(3, 4, WIDTH)]).opsmith.report)
