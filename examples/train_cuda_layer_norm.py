"""Trains a small network whose norms are this operator: forward and backward through its kernels, where there is a GPU.

python examples/train_cuda_layer_norm.py [STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from opsmith.authoring import load

OPERATOR = load(Path(__file__).parent / "cuda_layer_norm")


class LayerNorm(nn.Module):
    """The operator with its weights."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = OPERATOR.cuda_layer_norm(x, self.weight, self.bias)
        return y


def train(steps: int, device: str) -> list[float]:
    """Losses of a network that learns the sign of a product."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(16, 128), LayerNorm(128), nn.GELU(), nn.Linear(128, 128), LayerNorm(128)
    )
    network = network.append(nn.GELU()).append(nn.Linear(128, 1)).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    x = torch.randn(512, 16, device=device)
    target = (x[:, :1] * x[:, 1:2] > 0).float()
    losses = []
    for _ in range(steps):
        loss = nn.functional.binary_cross_entropy_with_logits(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # This waits for the device: what went wrong in a kernel is raised here at the latest.
        losses.append(loss.detach().item())
    return losses


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ready = OPERATOR.KERNELS.ready(torch.device(device))
    print(f"on {device}, by {'the CUDA kernels' if ready is True else f'the reference ({ready})'}")
    losses = train(int(sys.argv[1]) if len(sys.argv) > 1 else 60, device)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
