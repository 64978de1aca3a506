"""Losses are found on any logits, and with the output layer where nothing else needs these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import opsmith
import opsmith.ops
from opsmith.compiler.choose import settle as settling
from opsmith.compiler.choose.select import Choice
from opsmith.compiler.choose.settle import settle
from opsmith.compiler.find.operands import nodes_in
from opsmith.compiler.program import sites
from tests.compiler.graphs import found_in
from tests.compiler.models import UNTIMED, VOCABULARY, WHOLE_MODEL, WIDTH, LossOf, Truth, causal, ids, seeded

_V = 70


def _labels(*shape: int) -> torch.Tensor:
    labels = torch.randint(0, _V, shape, generator=torch.Generator().manual_seed(4))
    labels.view(-1)[::5] = -100
    return labels


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5))


def _plain(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, t)


def _smoothed(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, t, reduction="none", label_smoothing=0.1)


def _by_logarithm(x: Any, t: Any) -> Any:
    return F.nll_loss(F.log_softmax(x, dim=-1), t.masked_fill(t == -100, 7), ignore_index=7, reduction="sum")


def _written_out(x: Any, t: Any) -> Any:
    return F.nll_loss(x - x.logsumexp(-1, keepdim=True), t)


def _gathered(x: Any, t: Any) -> Any:
    return -F.log_softmax(x, dim=-1).gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def _selected(x: Any, t: Any) -> Any:
    """Logarithms of probabilities, without the sign of a loss, as preference and policy losses read them."""
    ids = t.clamp(min=0).unsqueeze(-1)
    return x.gather(-1, ids).squeeze(-1) - x.logsumexp(-1)


def _of_one_more_axis(x: Any, t: Any) -> Any:
    return F.log_softmax(x, dim=-1).gather(-1, t.clamp(min=0)[..., None]).exp()


def _soft_capped(x: Any, t: Any) -> Any:
    """As Gemma 2 limits its logits: less a constant, which no probability shows, they are no value of the graph."""
    return F.cross_entropy(torch.tanh(x / 30.0) * 30.0, t)


@pytest.mark.parametrize(
    ("fn", "options"),
    [
        (_soft_capped, {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}),
        (_plain, {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}),
        (_smoothed, {"reduction": "none", "ignore_index": -100, "label_smoothing": 0.1}),
        (_by_logarithm, {"reduction": "sum", "ignore_index": 7, "label_smoothing": 0.0}),
        (_gathered, {"reduction": "none", "ignore_index": -(2**63), "label_smoothing": 0.0}),
        (_selected, {"reduction": "none", "ignore_index": -(2**63)}),
        (_of_one_more_axis, {"reduction": "none", "ignore_index": -(2**63), "label_smoothing": 0.0}),
        (_written_out, {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}),
    ],
    ids=lambda v: v.__name__.strip("_") if callable(v) else "",
)
def test_every_spelling_is_found(fn: Callable[..., Any], options: dict[str, Any]) -> None:
    found, got, want = found_in(fn, [_numbers(9, _V), _labels(9)], True)
    (site,) = found.sites
    assert site.card.name == "cross_entropy"
    assert {k: v for k, v in site.arguments.items() if k not in ("logits", "target")} == options
    torch.testing.assert_close(got, want)


def _weighted(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, t, weight=torch.linspace(0.5, 1.5, _V))


def _of_probabilities(x: Any, t: Any) -> Any:
    return F.cross_entropy(x, F.one_hot(t.clamp(min=0), _V).to(x.dtype))


def _of_pixels(x: Any, t: Any) -> Any:
    """Classes are the second axis here, not the last."""
    return F.cross_entropy(x.view(3, _V, 3), t.view(3, 3))


def _gathered_along_rows(x: Any, t: Any) -> Any:
    return -F.log_softmax(x, dim=-1).gather(0, t.clamp(0, 8).unsqueeze(-1)).squeeze(-1)


def _several_gathered(x: Any, t: Any) -> Any:
    return -F.log_softmax(x, dim=-1).gather(-1, t.clamp(min=0).view(9, 1).expand(9, 2))


def _not_a_logarithm(x: Any, t: Any) -> Any:
    return F.nll_loss(x - x.exp().mean(-1, keepdim=True).log(), t)


def _smoothed_by_hand(x: Any, t: Any) -> Any:
    """All the logarithms are there, as their mean needs them: a loss would read the logits once more."""
    logs = F.log_softmax(x, dim=-1)
    return -logs.gather(-1, t.clamp(min=0).unsqueeze(-1)).squeeze(-1) - 0.1 * logs.mean(-1)


@pytest.mark.parametrize(
    "fn",
    [
        _smoothed_by_hand,
        _weighted,
        _of_probabilities,
        _of_pixels,
        _not_a_logarithm,
        _gathered_along_rows,
        _several_gathered,
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_other_losses_are_left_alone(fn: Callable[..., Any]) -> None:
    found, got, want = found_in(fn, [_numbers(9, _V), _labels(9)], False)
    assert not [s for s in found.sites if s.card.name.endswith("cross_entropy")]
    torch.testing.assert_close(got, want)


def _shifted_logits(x: Any, w: Any, t: Any) -> Any:
    logits = F.linear(x, w)[..., :-1, :].contiguous().float()
    return F.cross_entropy(logits.view(-1, _V), t[..., 1:].contiguous().view(-1))


def _shifted_labels(x: Any, w: Any, t: Any) -> Any:
    target = F.pad(t, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(F.linear(x, w).float().view(-1, _V), target.view(-1), reduction="sum")


def _of_policy(x: Any, w: Any, t: Any) -> Any:
    target = t[..., 1:].clamp(min=0)
    of_tokens = F.log_softmax(F.linear(x, w)[..., :-1, :].float(), dim=-1).gather(-1, target.unsqueeze(-1))
    return (of_tokens.squeeze(-1) * (t[..., 1:] != -100)).sum(-1)


def _returned_too(x: Any, w: Any, t: Any) -> Any:
    logits = F.linear(x, w)
    return F.cross_entropy(logits.float().view(-1, _V), t.view(-1)), logits


def _used_twice(x: Any, w: Any, t: Any) -> Any:
    logits = F.linear(x, w).view(-1, _V)
    return F.cross_entropy(logits, t.view(-1)) + 1e-4 * logits.logsumexp(-1).square().mean()


def _scaled(x: Any, w: Any, t: Any) -> Any:
    return F.cross_entropy((F.linear(x, w) * 0.0625).view(-1, _V), t.view(-1))


@pytest.mark.parametrize(
    ("fn", "operators", "dtype"),
    [
        (_shifted_logits, ["linear_cross_entropy"], torch.float32),
        (_shifted_logits, ["linear_cross_entropy"], torch.bfloat16),
        (_shifted_labels, ["linear_cross_entropy"], torch.bfloat16),
        (_of_policy, ["linear_cross_entropy"], torch.float32),
        (_of_policy, ["linear_cross_entropy"], torch.bfloat16),
        (_returned_too, ["linear", "cross_entropy"], torch.bfloat16),
        (_used_twice, ["linear", "cross_entropy"], torch.float32),
        (_scaled, ["linear", "cross_entropy"], torch.float32),
    ],
)
def test_the_output_layer_is_taken_in_where_nothing_else_needs_the_logits(
    fn: Callable[..., Any], operators: list[str], dtype: torch.dtype
) -> None:
    x, w = _numbers(2, 6, WIDTH).to(dtype), (_numbers(_V, WIDTH) * 0.2).to(dtype)
    found, got, want = found_in(fn, [x, w, _labels(2, 6)], True)
    names = [s.card.name for s in found.sites if s.card.name != "softmax"]
    assert names == operators
    loss = found.sites[-1].arguments
    assert loss.get("dtype") == (torch.float32 if dtype == torch.bfloat16 else None)
    torch.testing.assert_close(got, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_language_models_loss_and_gradients() -> None:
    model = seeded(lambda: LossOf(causal("llama")))
    truth = Truth(model)
    inputs = {"input_ids": ids(3, 9), "labels": ids(3, 9, seed=5)}
    inputs["labels"][0, :4] = -100
    opsmith.optimize(model, inputs, config=UNTIMED)
    report = model.opsmith.report
    assert report.rolled_back == []
    assert report.found["linear_cross_entropy"] == 1
    assert report.found["rope_qk"] == 1
    for batch, length in [(3, 9), (2, 6)]:
        more = {"input_ids": ids(batch, length), "labels": ids(batch, length, seed=6)}
        with torch.no_grad():
            truth.check(model(**more), **more)
    gradients = []
    for m in (model, truth.eager, truth.exact):
        m.zero_grad()
        m(**inputs).backward()
        gradients.append({n: p.grad.detach() for n, p in m.named_parameters()})
    got, eager, exact = gradients
    assert got.keys() == exact.keys()
    for name, gradient in exact.items():
        verdict = WHOLE_MODEL.check(got[name], eager[name], gradient)
        assert verdict.ok, f"{name}: {verdict.why}"


def test_a_model_that_returns_its_logits_keeps_them() -> None:
    model = seeded(lambda: causal("llama"))
    truth = Truth(model)
    inputs: dict[str, Any] = {"input_ids": ids(2, 8), "labels": ids(2, 8), "use_cache": False}
    opsmith.optimize(model, inputs, config=UNTIMED)
    assert model.opsmith.report.found["cross_entropy"] == 1
    assert "linear_cross_entropy" not in model.opsmith.report.found
    with torch.no_grad():
        loss, logits = model(**inputs, return_dict=False)[:2]
    truth.check(loss, **inputs, return_dict=False)
    assert logits.shape == (2, 8, VOCABULARY)


@pytest.mark.parametrize("apart", [False, True])
def test_parts_run_where_they_are_faster(apart: bool) -> None:
    found, _, _ = found_in(
        _shifted_labels, [_numbers(2, 6, WIDTH), _numbers(_V, WIDTH), _labels(2, 6)], False
    )
    (site,) = found.sites
    assert [p.card.name for p in site.parts] == ["linear", "cross_entropy"]
    together = Choice("native", "measured", {"native": 2.5, "eager": 3.0})
    seconds = 1.2 if apart else 1.3

    def choose(part: Any, call: dict[str, Any]) -> Choice:
        return Choice("native", "measured", {"native": seconds, "eager": 9.0})

    got, choice = settle(site, together, choose, lambda node: node)
    assert got is apart
    assert ("1.04x as fast as linear and cross_entropy" in choice.reason) is not apart
    pinned = Choice("native", "pinned by the configuration")
    assert settle(site, pinned, choose, lambda node: node) == (False, pinned)


@pytest.mark.parametrize("learns", [False, True])
def test_what_learns_is_settled_by_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch, learns: bool
) -> None:
    """A merged operator that is slower forward and faster with its gradients runs where the model learns."""
    monkeypatch.setattr(settling, "_steps", lambda site, value, learning: (2.0, 3.0))
    values = [_numbers(2, 6, WIDTH), _numbers(_V, WIDTH), _labels(2, 6)]
    found, _, _ = found_in(_shifted_labels, values, False)
    (site,) = found.sites
    weight = {site.arguments["weight"]} if learns else set()
    slower = Choice("native", "measured", {"native": 2.5, "eager": 3.0})
    part = Choice("native", "measured", {"native": 1.2})
    got, choice = settle(site, slower, lambda *_: part, lambda node: node, weight)
    assert got is not learns
    assert ("1.50x as fast as linear and cross_entropy forward and backward" in choice.reason) is learns


def test_the_time_of_a_step_takes_in_its_gradients() -> None:
    rows, width = 300, 96
    values = [_numbers(2, rows, width), _numbers(_V, width), _labels(2, rows)]
    found, _, _ = found_in(_shifted_labels, values, False)
    (site,) = found.sites
    target = F.pad(values[2], (0, 1), value=-100)[..., 1:].reshape(-1)
    of_shape = {tuple(v.shape): v for v in (*values, target)}
    operands = [n for v in site.arguments.values() for n in nodes_in(v)]
    env = {n: of_shape[tuple(n.meta["val"].shape)] for n in operands}
    learning = {n for n in env if env[n].is_floating_point()}
    gradients = settling._step(site, env.__getitem__, learning)()
    hidden, weight = (v.clone().requires_grad_() for v in values[:2])
    F.cross_entropy(F.linear(hidden, weight).view(-1, _V), target, reduction="sum").backward()
    for got, want in zip(gradients, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(got.view_as(want), want, rtol=1e-4, atol=1e-4)


def test_a_model_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "settle", lambda site, choice, *more: (bool(site.parts), choice))
    model = seeded(lambda: LossOf(causal("llama")))
    truth = Truth(model)
    inputs = {"input_ids": ids(2, 8), "labels": ids(2, 8)}
    opsmith.optimize(model, inputs, config=UNTIMED)
    report = model.opsmith.report
    assert report.rolled_back == []
    assert {n: c for n, c in report.found.items() if "rope" in n or "entropy" in n} == {
        "rope": 2,
        "cross_entropy": 1,
    }
    with torch.no_grad():
        truth.check(model(**inputs), **inputs)
