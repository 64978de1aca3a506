"""Layers under activation checkpointing are optimized, computed once more for the gradients, and dropped alike."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import opsmith
from opsmith.compiler import Config
from tests.compiler.models import UNTIMED, WIDTH, Encoder, Feed, ids, llama, numbers, padding, seeded


class Checkpointed(Encoder):
    """The encoder, of whose layers the inputs are kept only."""

    def __init__(self, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(dropout=dropout)
        self.options = options

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False, **self.options)
        return x


def _step(model: Any, *inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The result and the gradients of one step, with random numbers that are the same every time."""
    model.zero_grad()
    torch.manual_seed(3)
    y = model(*inputs)
    (y * torch.sin(torch.arange(y.numel())).view_as(y)).sum().backward()
    return y.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _kept(model: Any, *inputs: Any) -> int:
    """Bytes that a forward pass keeps for the gradients, weights aside, and what is inside of a checkpointed layer."""
    weights = {p.data_ptr() for p in model.parameters()}
    bytes_of: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.data_ptr() not in weights:
            bytes_of[t.data_ptr()] = t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*inputs)
    return sum(bytes_of.values())


def _operators(model: Any) -> list[str]:
    return sorted(site.operator for graph in model.opsmith.graphs for site in graph.report.kept)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_layers_are_optimized(dropout: float) -> None:
    model = seeded(lambda: Checkpointed(dropout=dropout)).train()
    eager = copy.deepcopy(model)
    opsmith.optimize(model, config=UNTIMED)
    for batch, length in ((3, 9), (2, 6), (3, 9)):
        inputs = (ids(batch, length), padding(batch, length))
        torch.testing.assert_close(_step(model, *inputs), _step(eager, *inputs), rtol=1e-4, atol=1e-4)
    whole = seeded(lambda: Encoder(dropout=dropout)).train()
    opsmith.optimize(whole, config=UNTIMED)
    _step(whole, *inputs)
    assert _operators(model) == _operators(whole)
    assert not model.opsmith.unread
    assert _kept(model, *inputs) <= _kept(eager, *inputs) < _kept(whole, *inputs) / 2


def test_checkpointing_of_hugging_face() -> None:
    model = seeded(llama).train()
    del model.model.layers[1]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    eager = copy.deepcopy(model)
    # Gradients are timed too, in the forward pass of a layer that counts what is saved.
    opsmith.optimize(model, config=Config(inductor=False))
    given = ids(2, 9)
    for m in (model, eager):
        m(given, labels=given).loss.backward()
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    found = _operators(model)
    assert [found.count(name) for name in ("attention", "rms_norm", "rope_qk", "silu_mul")] == [1, 3, 1, 1]
    model.eval()  # which computes nothing twice
    with torch.no_grad():
        torch.testing.assert_close(model(given).logits, eager.eval()(given).logits, rtol=1e-4, atol=1e-5)


def test_nested_checkpoints_and_layers_of_several_results() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = Feed(), Feed()

        def _outer(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = checkpoint(self.inner, x, use_reentrant=False)
            return self.outer(y), y * 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = checkpoint(self._outer, x, use_reentrant=False)
            return torch.softmax(first, -1) + second

    model = seeded(Nested).train()
    eager = copy.deepcopy(model)
    opsmith.optimize(model, config=UNTIMED)
    x = numbers(3, 4, WIDTH)
    for _ in range(2):
        torch.testing.assert_close(_step(model, x), _step(eager, x), rtol=1e-4, atol=1e-5)
    assert _operators(model).count("layer_norm") == 2
    assert "softmax" in _operators(model)


def test_a_choice_of_what_is_kept_is_the_callers() -> None:
    asked: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(op)
        kept = op is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    choose = partial(create_selective_checkpoint_contexts, policy)
    model = seeded(lambda: Checkpointed(dropout=0.3, context_fn=choose)).train()
    eager = copy.deepcopy(model)
    opsmith.optimize(model, config=UNTIMED)
    inputs = (ids(3, 9), padding(3, 9))
    torch.testing.assert_close(_step(model, *inputs), _step(eager, *inputs), rtol=1e-4, atol=1e-4)
    assert torch.ops.aten.addmm.default in asked
    assert "layer_norm" in _operators(model)  # of what stands around the layers


def test_what_a_hook_collects_breaks_no_checkpointed_layer() -> None:
    """As transformers collects the logits of routers: a layer was left to eager, which no report said."""
    model = Checkpointed()
    collected: list[torch.Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: collected.append(output))
    wanted = _step(model, ids(2, 6))
    first = [t.detach() for t in collected[: len(model.blocks)]]
    opsmith.optimize(model, config=UNTIMED)
    collected.clear()
    y, gradients = _step(model, ids(2, 6))
    torch.testing.assert_close(y, wanted[0])
    torch.testing.assert_close(gradients, wanted[1])
    torch.testing.assert_close([t.detach() for t in collected], first)
    whole = opsmith.optimize(Encoder(), config=UNTIMED)
    _step(whole, ids(2, 6))
    assert _operators(model) == _operators(whole)
