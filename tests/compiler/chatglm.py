"""ChatGLM 2 and 3 as their own code writes them, in plain PyTorch: no class of transformers has this arithmetic.

Tokens come before the batch. Neighbors in the first half of each head are rotated by a table of pairs; all heads of the
queries share two heads of keys; gate and up are halves of one product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, HEADS, GROUPS, DIM, FEED = 61, 64, 4, 2, 16, 128
Past = tuple[torch.Tensor, torch.Tensor]


class RMSNorm(nn.Module):
    """In float32, and rounded before the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return (self.weight * (x * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """x [S, B, H, D], table [S, B, D / 4, 2] of cosines and sines."""
    length, _, heads, _ = x.shape
    rotated = table.shape[-2] * 2
    x, rest = x[..., :rotated], x[..., rotated:]
    pairs = x.reshape(length, -1, heads, rotated // 2, 2)
    table = table.view(length, -1, 1, rotated // 2, 2)
    turned = torch.stack(
        [
            pairs[..., 0] * table[..., 0] - pairs[..., 1] * table[..., 1],
            pairs[..., 1] * table[..., 0] + pairs[..., 0] * table[..., 1],
        ],
        -1,
    )
    return torch.cat((turned.flatten(3), rest), dim=-1)


class Attention(nn.Module):
    """Queries, keys and values are parts of one product with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * DIM)
        self.dense = nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None, past: Past | None
    ) -> tuple[torch.Tensor, Past]:
        sizes = [HEADS * DIM, GROUPS * DIM, GROUPS * DIM]
        q, k, v = (t.view(*t.shape[:-1], -1, DIM) for t in self.query_key_value(x).split(sizes, dim=-1))
        q, k = rotate(q, table), rotate(k, table)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=0), torch.cat((past[1], v), dim=0)
        cache = (k, v)
        k, v = (
            t.unsqueeze(-2)
            .expand(-1, -1, -1, HEADS // GROUPS, -1)
            .contiguous()
            .view(*t.shape[:2], HEADS, DIM)
            for t in cache
        )
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        if mask is None and q.shape[2] == k.shape[2]:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, None if mask is None else ~mask)
        return self.dense(y.permute(2, 0, 1, 3).reshape(*x.shape[:2], -1)), cache


class Layer(nn.Module):
    """Attention and SwiGLU, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.second = RMSNorm(), Attention(), RMSNorm()
        self.up = nn.Linear(WIDTH, 2 * FEED, bias=False)
        self.down = nn.Linear(FEED, WIDTH, bias=False)

    def forward(
        self, x: torch.Tensor, table: torch.Tensor, mask: torch.Tensor | None, past: Past | None
    ) -> tuple[torch.Tensor, Past]:
        y, cache = self.attention(self.first(x), table, mask, past)
        x = x + y
        gate, up = torch.chunk(self.up(self.second(x)), 2, dim=-1)
        return x + self.down(F.silu(gate) * up), cache


class ChatGLM(nn.Module):
    """A tiny one: logits [B, L, V] and the caches [S, B, 2, D]; `mask` is True where nothing may be seen."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])
        self.norm, self.output = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(64.0), 1e4 ** -(torch.arange(0, DIM // 2, 2) / (DIM // 2)))
        self.table = nn.Buffer(torch.stack([angles.cos(), angles.sin()], dim=-1))

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        past: list[Past] | None = None,
    ) -> tuple[torch.Tensor, list[Past]]:
        positions = torch.arange(ids.shape[1])[None] if positions is None else positions
        table = self.table[positions].transpose(0, 1).contiguous()
        x = self.words(ids).transpose(0, 1).contiguous()
        caches = []
        for i, layer in enumerate(self.layers):
            x, cache = layer(x, table, mask, None if past is None else past[i])
            caches.append(cache)
        return self.output(self.norm(x)).transpose(0, 1).contiguous(), caches
