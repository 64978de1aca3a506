"""A small Llama-like model writes RoPE out in PyTorch; `opsmith.optimize` puts a project's operator in its place.

python examples/rope_in_llama.py FOLDER
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import nn

import opsmith
from opsmith.authoring import load

HEADS, DIM, LAYERS, INNER = 8, 64, 4, 1408


def turned(x: torch.Tensor) -> torch.Tensor:
    """(-x2, x1) for each pair of neighbors."""
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class Layer(nn.Module):
    """Attention with rotated queries and keys, and a gated feed-forward part."""

    def __init__(self, heads: int, dim: int, inner: int) -> None:
        super().__init__()
        width = heads * dim
        self.heads, self.dim = heads, dim
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, l, width = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (t.view(b, l, self.heads, self.dim).transpose(1, 2) for t in parts)
        q, k = (t * cos + turned(t) * sin for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, l, width))
        n = self.between(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    """Some layers, one table of angles."""

    def __init__(self, layers: int = LAYERS, heads: int = HEADS, dim: int = DIM, inner: int = INNER) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(heads, dim, inner) for _ in range(layers))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x


def table(length: int, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, [length, dim]."""
    angles = torch.arange(length)[:, None] * torch.logspace(0, -4, dim // 2).repeat_interleave(2)
    return angles.cos(), angles.sin()


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python examples/rope_in_llama.py FOLDER, a project such as examples/rope_custom")
    load(sys.argv[1])
    torch.manual_seed(0)
    model = Model().eval()
    example = (torch.randn(1, 256, HEADS * DIM), *table(256))
    with torch.no_grad():
        before = model(*example)
        opsmith.optimize(model, example)
        after = model(*example)
    print("found:", model.opsmith.report.found)
    print(f"largest difference to before: {float((after - before).abs().max()):.2g}")
    print(model.opsmith.plan)
