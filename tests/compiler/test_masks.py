"""Attention is found with masks as people write them, and a square's lower triangle becomes `causal`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import opsmith
from opsmith.compiler.config import Config
from tests.compiler.test_recognize import recognized

Scores = Callable[[Tensor, Tensor], Tensor]  # of the scores, and of a mask of ones [B, S]


def _ones(n: int) -> Tensor:
    return torch.ones(n, n)


def _bool(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool)


TRIANGLES: dict[str, Scores] = {
    "bool": lambda s, m: s.masked_fill(_bool(s.shape[-1]).triu(1), -1e9),
    "axes": lambda s, m: s.masked_fill(_bool(s.shape[-1]).triu(1)[None, None], -1e9),
    "cast": lambda s, m: s.masked_fill(torch.triu(_ones(s.shape[-1]), diagonal=1).bool(), -math.inf),
    "equals zero": lambda s, m: s.masked_fill(torch.tril(_ones(s.shape[-1])) == 0, -1e4),
    "equals one": lambda s, m: s.masked_fill(torch.triu(_ones(s.shape[-1]), 1) == 1, -1e9),
    "above zero": lambda s, m: s.masked_fill(~(torch.tril(_ones(s.shape[-1])) > 0), -1e9),
    "where": lambda s, m: torch.where(_bool(s.shape[-1]).tril(), s, torch.finfo(s.dtype).min),
    "added": lambda s, m: s + torch.triu(torch.full(s.shape[-2:], -1e9), 1),
    "filled and added": lambda s, m: (
        s + torch.zeros(s.shape[-2:]).masked_fill(torch.tril(_ones(s.shape[-1])) == 0, -1e9)
    ),
    "times": lambda s, m: s + torch.triu(_ones(s.shape[-1]), 1) * -1e9,
    "one less": lambda s, m: s + (1.0 - torch.tril(_ones(s.shape[-1]))) * -1e4,
    "subtracted": lambda s, m: s - 1e10 * (1 - torch.tril(_ones(s.shape[-1]))),
    "soft cap": lambda s, m: (9 * torch.tanh(s / 9)).masked_fill(_bool(s.shape[-1]).triu(1), -1e9),
}
MASKS: dict[str, Scores] = {
    "one less": lambda s, m: s + (1.0 - m[:, None, None].float()) * -10000.0,
    "lowest": lambda s, m: s + (1.0 - m[:, None, None].to(s.dtype)) * torch.finfo(s.dtype).min,
    "subtracted": lambda s, m: s - 1e9 * (1.0 - m[:, None, None].to(s.dtype)),
    "times, then less": lambda s, m: s + (m[:, None, None].to(s.dtype) * 1e9 - 1e9),
    "less one": lambda s, m: s + 1e9 * (m[:, None, None].to(s.dtype) - 1),
    "equals zero": lambda s, m: s.masked_fill(m[:, None, None] == 0, -1e9),
    "two fills": lambda s, m: s.masked_fill(_bool(s.shape[-1]).triu(1), -1e9).masked_fill(
        m[:, None, None] == 0, -1e9
    ),
    "two infinite": lambda s, m: s.masked_fill(torch.triu(_ones(s.shape[-1]), 1) == 1, -math.inf).masked_fill(
        m[:, None, None] == 0, -math.inf
    ),
    "either": lambda s, m: s.masked_fill(_bool(s.shape[-1]).triu(1) | (m[:, None, None] == 0), -1e9),
    "product": lambda s, m: s + (1 - torch.tril(_ones(s.shape[-1])) * m[:, None, None].float()) * -1e4,
    "scaled with the scores": lambda s, m: (4 * s + m[:, None, None].float().cumsum(-1)) * 0.25,
    "turned and scaled": lambda s, m: (
        (4 * s + m[:, None, :, None].float().cumsum(-2).transpose(-1, -2)) * 0.25
    ),
    "scaled and hidden": lambda s, m: ((s + m[:, None, None].float().cumsum(-1)) / 3).masked_fill(
        m[:, None, None] == 0, -1e9
    ),
    # Triangles that hide nothing, or what `causal` keeps.
    "one more": lambda s, m: s + torch.tril(_ones(s.shape[-1])),
    "two more above": lambda s, m: s + 2 * torch.triu(_ones(s.shape[-1]), 1),
    "the other half": lambda s, m: s.masked_fill(_bool(s.shape[-1]).tril(), -1e9),
    "the other half, times": lambda s, m: s + torch.tril(_ones(s.shape[-1])) * -1e9,
    "the other half, up": lambda s, m: s + torch.triu(_ones(s.shape[-1]), 1) * 1e9,
}


def _zeroed(fill: float) -> Scores:
    """Weights of hidden keys are zeros, and so are those of a query that all are hidden from."""

    def weights(s: Tensor, m: Tensor) -> Tensor:
        hidden = m[:, None, None].eq(0)
        return s.masked_fill(hidden, fill).softmax(-1).masked_fill(hidden, 0.0)

    return weights


def _chosen(s: Tensor, m: Tensor) -> Tensor:
    seen = (m[:, None, None] != 0) & _bool(s.shape[-1]).tril()
    return torch.where(seen, torch.where(seen, s, -1e9).softmax(-1), 0.0)


ZEROS = {
    "-inf": _zeroed(-math.inf),
    "lowest": _zeroed(torch.finfo(torch.float32).min),
    "-1e4": _zeroed(-1e4),
    "where": _chosen,
}


class _All(nn.Module):
    """An attention by each of these, of the same input."""

    def __init__(self, forms: Mapping[str, Scores], weights: bool = False) -> None:
        super().__init__()
        self.forms, self.weights = forms, weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> list[Tensor]:
        scores = q @ k.transpose(-1, -2) * 0.25
        made = [form(scores, m) for form in self.forms.values()]
        return [(one if self.weights else one.softmax(-1)) @ v for one in made]


def _inputs(length: int) -> tuple[Tensor, ...]:
    m = torch.ones(2, length, dtype=torch.long)
    m[1, length // 2 :] = 0
    return (*(torch.randn(2, 3, length, 16) for _ in range(3)), m)


def _hold(forms: Mapping[str, Scores], mask: bool, weights: bool = False) -> None:
    model = _All(forms, weights).eval()
    found = recognized(model, [*_inputs(6)], True).sites
    assert [s.card.name for s in found] == ["attention"] * len(forms)
    wrong = [
        name
        for name, site in zip(forms, found, strict=True)
        if (site.arguments.get("mask") is not None, bool(site.arguments.get("causal"))) != (mask, not mask)
    ]
    assert not wrong
    fast: Any = opsmith.optimize(_All(forms, weights).eval(), _inputs(6), config=Config(tune=False))
    assert fast.opsmith.report.found == {"attention": len(forms)}  # none is rolled back
    for length in (6, 9, *[7] * weights):
        given = _inputs(length)
        given[-1][0] *= length != 7
        for name, a, b in zip(forms, fast(*given), model(*given), strict=True):
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


def test_triangles_become_causal() -> None:
    _hold(TRIANGLES, mask=False)


def test_other_masks_stay_masks() -> None:
    _hold(MASKS, mask=True)


def test_weights_that_are_zeros_where_a_mask_hides() -> None:
    _hold(ZEROS, mask=True, weights=True)


def test_rows_that_two_fills_hide_teach_nothing() -> None:
    """Before the first token of a sequence that is padded at its left: all numbers of such a row are one number."""
    model = _All({"two fills": MASKS["two fills"]})
    q, k, v, m = _inputs(6)
    fast: Any = opsmith.optimize(_All(model.forms), (q, k, v, m.flip(1)), config=Config(tune=False))
    found = []
    for attend in (model, fast):
        given = [t.clone().requires_grad_() for t in (q, k, v)]
        attend(*given, m.flip(1))[0].square().sum().backward()
        found.append([t.grad for t in given])
    torch.testing.assert_close(found[1], found[0])
