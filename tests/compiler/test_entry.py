"""How calls reach graphs: what one model captures is no other's, and it may capture as often as it changes."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import pytest
import torch
from torch import nn

import opsmith
from opsmith.compiler import entry

LOGGER = logging.getLogger("model")
UNTIMED = opsmith.Config(tune=False, inductor=False)


class Changing(nn.Module):
    """Whose arithmetic is another one for each number of repetitions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.repetitions = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repetitions):
            x = self.norm(x) + 1
        return x


def optimized() -> Any:
    return opsmith.optimize(Changing().eval(), torch.randn(2, 8), config=UNTIMED)


@torch.no_grad()
def graphs_after(model: Any, changes: int) -> int:
    x = torch.randn(2, 8)
    for repetitions in range(1, 1 + changes):
        model.repetitions = repetitions
        for _ in range(2):  # sizes seen before
            torch.testing.assert_close(model(x), model._call_impl(x))
    return len(model.opsmith.graphs)


@torch._dynamo.config.patch(recompile_limit=3)
def test_no_model_uses_up_what_another_may_capture() -> None:
    """Dynamo keeps graphs by code, and after so many of them captures none any more."""
    others = [optimized() for _ in range(4)]
    for model in (*others, optimized()):
        assert graphs_after(model, 2) == 2


@pytest.mark.skipif(
    "recompile_limit" not in inspect.signature(torch.compile).parameters,
    reason="this PyTorch has one limit for all functions",
)
def test_a_model_that_changes_often_is_captured_as_often() -> None:
    model = optimized()
    assert graphs_after(model, 12) == 12


class Layered(nn.Module):
    """Whose layer lies behind a break of the graph, and is given a table of one sequence for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        table = torch.ones(1, x.shape[1], 8).cumsum(1)
        torch._dynamo.graph_break()
        y: torch.Tensor = self.norm(x * table)
        return y + y if twice else y


@torch.no_grad()
def test_behind_a_break_that_was_there_before_a_size_of_one_stays_one() -> None:
    """Another option is another graph behind the break, and none before it that would say so."""
    model, x = Layered().eval(), torch.randn(3, 5, 8)
    opsmith.optimize(model, x, config=UNTIMED)
    for twice in (False, True):
        torch.testing.assert_close(model(x, twice=twice), model._call_impl(x, twice=twice))
    assert not model.opsmith.unread


@torch.library.custom_op("opsmith_tests::half_known", mutates_args=())
def half_known(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@half_known.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("nobody said of what shape that is")


class Refused(nn.Module):
    """Which runs, while nothing can capture it."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.norm, self.broken = nn.LayerNorm(8), broken
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.norm(x)
        if self.broken:
            torch._dynamo.graph_break()
        y: torch.Tensor = half_known(x)
        return y


@torch.no_grad()
@pytest.mark.parametrize("broken", [False, True])
def test_what_cannot_be_captured_is_answered_by_eager_once(broken: bool) -> None:
    model, x = Refused(broken).eval(), torch.randn(3, 8)
    with pytest.warns(UserWarning, match="a part of the model runs as it was.*raised TorchRuntimeError"):
        opsmith.optimize(model, x, config=UNTIMED)
    assert model.calls == 1
    for count in (2, 3):
        torch.testing.assert_close(model(x), 2 * model.norm(x))
        assert model.calls == count
    assert "left as it was: a part of the model: raised TorchRuntimeError" in str(model.opsmith.report)


class Norm(nn.Module):
    """Whose epsilon is a number of Python, which Dynamo takes for an input unless it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 3e-4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@torch.no_grad()
def test_what_dynamo_has_forgotten_is_captured_as_before() -> None:
    model, x = nn.Sequential(nn.Linear(16, 16), Norm()).eval(), torch.randn(5, 16)
    wanted = model(x)
    opsmith.optimize(model, x, config=opsmith.Config(tune=False))
    model(x)
    torch.compiler.reset()
    for _ in range(2):
        assert torch.allclose(model(x), wanted, atol=1e-5)
    graphs = model.opsmith.graphs  # type: ignore[union-attr]
    found = [{name.rpartition("_")[0] for name in graph.sites} for graph in graphs]
    assert found == [{"linear", "rms_norm"}] * 2


class Scanning(nn.Module):
    """Which has another way where Dynamo reads it, by an operator of which nothing is recorded, as Mamba has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.eager = 0

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        x = self.norm(x)
        if x.shape[0] == 1:
            return x
        if not torch.compiler.is_compiling():
            self.eager += 1
            return x.cumsum(0)
        scan = torch._higher_order_ops.associative_scan
        return scan(torch.add, x, dim=0, combine_mode="generic")


@torch.no_grad()
@pytest.mark.filterwarnings("error:opsmith")
def test_a_graph_that_is_left_is_left_to_the_models_own_code() -> None:
    model, x = Scanning().eval(), torch.randn(6, 8)
    opsmith.optimize(model, x, config=UNTIMED)
    assert "without a record of it" in str(model.opsmith.report)  # type: ignore[union-attr]
    before = model.eager
    torch.testing.assert_close(model(x), model._call_impl(x))
    assert model.eager == before + 2


@torch.no_grad()
def test_a_prompt_that_is_left_leaves_the_tokens_compiled() -> None:
    model, prompt, token = Scanning().eval(), torch.randn(7, 8), torch.randn(1, 8)
    opsmith.optimize(model, config=UNTIMED)
    for _ in range(2):
        for x in (prompt, token, prompt[:5]):  # nothing is known of what stands in a cache
            torch.testing.assert_close(model(x, [x]), model._call_impl(x))
    assert model.eager == 7  # all but the first, which was read
    assert model.opsmith is not None
    assert [graph.report.left for graph in model.opsmith.graphs] == [""]
    assert "without a record of it" in str(model.opsmith.report)


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut, self.norm = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(self.cut(image).flatten(2).mT)


@torch.no_grad()
def test_the_sizes_of_images_vary_once_they_have_varied() -> None:
    model = Patches().eval()
    opsmith.optimize(model, torch.randn(2, 3, 8, 6), config=UNTIMED)
    assert model.opsmith is not None
    sizes = ((2, 8, 6), (3, 8, 6), (2, 10, 6), (2, 12, 6), (3, 14, 6), (2, 8, 6), (2, 10, 12), (2, 10, 14))
    for (rows, *size), graphs in zip(sizes, (1, 1, 2, 2, 2, 2, 3, 3), strict=True):
        x = torch.randn(rows, 3, *size)
        torch.testing.assert_close(model(x), model._call_impl(x))
        assert len(model.opsmith.graphs) == graphs, (rows, size)


class Wave(nn.Module):
    """The last dimension of its input is no feature vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x[..., None]).cumsum(1)


@torch.no_grad()
def test_a_last_dimension_varies_once_it_has_varied() -> None:
    model = Wave().eval()
    opsmith.optimize(model, torch.randn(2, 9), config=UNTIMED)
    assert model.opsmith is not None
    for length in range(10, 15):
        x = torch.randn(2, length)
        torch.testing.assert_close(model(x), model._call_impl(x))
    assert len(model.opsmith.graphs) == 2


class Loop(nn.Module):
    """A step after the other, which Dynamo unrolls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            state = self.norm(state + x[:, i])
        return state


@torch.no_grad()
def test_lengths_that_are_captured_one_by_one_end_in_the_models_own_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opsmith.compiler.entry._OFTEN", 3)
    model = Loop().eval()
    opsmith.optimize(model, torch.randn(2, 3, 8), config=UNTIMED)
    assert model.opsmith is not None
    for length in (*range(4, 8), 3):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(model(x), model._call_impl(x))
    assert len(model.opsmith.parts) == 3
    assert "captured at 3 sizes" in str(model.opsmith.report)


def layers_of(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """PyTorch's own layers and a call of them: with a mask they ask its numbers whether it is causal."""
    sizes: Any = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
    x, mask = torch.randn(2, 5, 16), nn.Transformer.generate_square_subsequent_mask(5)
    if kind == "both":
        return nn.Transformer(16, 2, 1, 1, **sizes).eval(), {"src": x, "tgt": x, "tgt_mask": mask}
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, **sizes), 1).eval()
    return encoder, {"src": x} | ({"mask": mask} if kind == "masked" else {})


@torch.no_grad()
@pytest.mark.parametrize(("kind", "attentions"), [("plain", 1), ("masked", 1), ("both", 3)])
def test_layers_of_pytorchs_own_are_captured_by_their_parts(kind: str, attentions: int) -> None:
    """Where nothing learns, they are one operator each to PyTorch; behind a break in them Dynamo goes on at ours."""
    model, inputs = layers_of(kind)
    wanted = model(**inputs)
    opsmith.optimize(model, inputs, config=UNTIMED)
    session: Any = model.opsmith
    found = [s.operator for s in session.report.sites if s.status == "kept"]
    assert found.count("attention") == attentions
    assert found.count("layer_norm") == {1: 2, 3: 2 + 3 + 2}[attentions]
    assert torch.backends.mha.get_fastpath_enabled()
    parts = len(session.parts)
    for _ in range(2):
        torch.testing.assert_close(model(**inputs), wanted)
    assert len(session.parts) == parts


@torch.no_grad()
def test_packed_weights_are_those_that_pytorchs_own_layers_read() -> None:
    model, inputs = layers_of("plain")
    exact = model(**inputs)
    opsmith.optimize(model, inputs, quantize="int8", config=UNTIMED)
    assert not torch.allclose(model(**inputs), exact, atol=1e-4)
    torch.testing.assert_close(model(**inputs), exact, atol=0.1, rtol=0)


def test_dynamos_advice_at_a_break_is_not_ours_to_give() -> None:
    logger = logging.getLogger("torch._dynamo.variables.tensor")
    heard: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with entry._capturing(general=False, sure=False, left=[], whole=False):
            logger.warning("while a model is captured")
        assert not heard
        logger.warning("to somebody else")
        assert len(heard) == 1
    finally:
        logger.removeHandler(handler)


class _Bounded(nn.Module):
    """A model that refuses more tokens than it has positions by an error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 16:
            raise ValueError("more than 16 positions")
        return self.linear(self.norm(x)).relu()


@pytest.mark.parametrize("example", [True, False], ids=["example", "none"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("bad", "error"),
    [((20, 32), "more than 16 positions"), ((9, 31), "normalized_shape")],
    ids=["raised", "shape"],
)
def test_a_call_without_an_answer_costs_no_other_its_graph(
    example: bool, batch: int, bad: Any, error: str
) -> None:
    torch._dynamo.reset()
    model, x = _Bounded().eval(), torch.randn(batch, 9, 32)
    opsmith.optimize(model, *[x] * example, config=UNTIMED)
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=error):
        model(torch.randn(batch, *bad))
    with torch.no_grad():
        model(x)
        assert len(model.opsmith.graphs) == 1
        model(torch.randn(3, 12, 32))
    model.train()
    model(x).sum().backward()
    # Each kind of call has one graph still, and no module is captured by itself.
    assert [len(g.report.sites) for g in model.opsmith.graphs] == [2] * len(model.opsmith.graphs)


class Telling(Changing):
    """Says something once in the middle, as models of transformers do when they train."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        LOGGER.warning_once("of no importance")  # type: ignore[attr-defined]
        return super().forward(x)


def test_what_is_said_once_breaks_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    once = functools.lru_cache(None)(lambda logger, text: logger.warning(text))
    monkeypatch.setattr(logging.Logger, "warning_once", once, raising=False)
    model = opsmith.optimize(Telling().eval(), torch.randn(2, 8), config=UNTIMED)
    assert len(model.opsmith.graphs) == 1
    assert model.opsmith.report.found == {"layer_norm": 2}
    # Nor after a change, at sizes seen before: a classifier of transformers notes in its first call what it learns.
    x = torch.randn(2, 8)
    for model.repetitions in (1, 2):
        torch.testing.assert_close(model(x), model._call_impl(x))
    assert len(model.opsmith.graphs) == 3
    assert model.opsmith.report.found == {"layer_norm": 4}
