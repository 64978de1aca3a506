"""Where a GPT's time goes, before and after `opsmith.optimize`, beside the breakdown that is published for one.

Published, of 200 ms: MatMul 40%, attention 35% (70 ms, then 28), LayerNorm 15% (30 ms, then 16), other 10%. The model
here is written out in plain PyTorch, as that one was: the norm, the scores, the mask and GELU, call by call.

Example: python examples/profile_gpt.py --html gpt.html
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

import opsmith
from opsmith import Profile
from opsmith.profiler.data import ATTENTION, MATMUL, NORM

VOCABULARY = 8000
PUBLISHED = {MATMUL: (80.0, None), ATTENTION: (70.0, 28.0), NORM: (30.0, 16.0), "other": (20.0, None)}


class Norm(nn.Module):
    """LayerNorm in eight PyTorch calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Block(nn.Module):
    """A transformer layer whose attention holds its scores in memory."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = (
            t.view(b, n, self.heads, width // self.heads).transpose(1, 2)
            for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        context = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ v
        x = x + self.out(context.transpose(1, 2).reshape(b, n, width))
        h = self.up(self.second(x))
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        y: torch.Tensor = x + self.down(h)
        return y


class GPT(nn.Module):
    """Embeddings, layers, a norm, and the output layer."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = Norm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.head(self.norm(x))
        return y


def breakdown(profile: Profile) -> dict[str, float]:
    """Milliseconds of MatMul, attention, norms and everything else."""
    times = dict.fromkeys(PUBLISHED, 0.0)
    for row in profile.phases[0].rows:
        times[row.kind if row.kind in times else "other"] += row.seconds * 1e3
    return times


def measured(layers: int, width: int, heads: int, length: int, budget_s: float) -> tuple[Profile, Profile]:
    """The profile of the model as it is written, and of the same model optimized; its results stay what they were."""
    torch.manual_seed(0)
    model = GPT(layers, width, heads, length).eval()
    ids = torch.randint(0, VOCABULARY, (1, length))
    before = opsmith.profile(model, ids, budget_s=budget_s, name="GPT, written out")
    with torch.no_grad():
        wanted = model(ids)
        opsmith.optimize(model, ids)
        torch.testing.assert_close(model(ids), wanted, rtol=1e-3, atol=1e-4)
    after = opsmith.profile(model, ids, budget_s=budget_s, name="GPT, optimized")
    return before, after


def main(
    layers: Annotated[int, typer.Option()] = 6,
    width: Annotated[int, typer.Option()] = 512,
    heads: Annotated[int, typer.Option()] = 8,
    length: Annotated[int, typer.Option()] = 512,
    budget: Annotated[float, typer.Option(help="Seconds for each profile.")] = 4.0,
    html: Annotated[Path | None, typer.Option(help="Write the report of the written-out model.")] = None,
) -> None:
    """Profile, optimize, profile again."""
    before, after = measured(layers, width, heads, length, budget)
    first, second = breakdown(before), breakdown(after)
    whole = sum(first.values())
    print(f"{'':<10} {'published ms':>20} {'here, before ms':>20} {'after ms':>10}")
    for name, (was, then) in PUBLISHED.items():
        published = f"{was:.0f} ({was / 200:.0%})" + (f" → {then:.0f}" if then else "")
        print(
            f"{name:<10} {published:>20} {f'{first[name]:.1f} ({first[name] / whole:.0%})':>20} {second[name]:>10.1f}"
        )
    print(f"{'sum':<10} {'200':>20} {whole:>20.1f} {sum(second.values()):>10.1f}")
    print(f"\n{before.table()}\n{after.diff(before)}")
    if html is not None:
        before.to_html(html)


if __name__ == "__main__":
    typer.run(main)
