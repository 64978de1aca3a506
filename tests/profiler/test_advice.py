"""Planted problems are named as first or second line, and a clean model gets no advice."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import opsmith
from opsmith.profiler import advise
from opsmith.profiler.data import MATMUL, Phase, Row
from opsmith.profiler.result import Profile
from opsmith.profiler.roofline import Roofs, judge
from tests.compiler.models import seeded
from tests.profiler.conftest import RATES

WIDTH = 256


def advised(profile: Profile, **rates: float) -> list[str]:
    """The rules that speak, what gains most first, without the noise of a machine under test.

    What judges is the same in every run, what is judged is measured; no dtype is faster, unless a test says so.
    """
    roofs = Roofs()
    roofs.rates = {**RATES, **rates}
    profile.machine["cores"] = 2
    phase = profile.phases[0]
    phase.noise = 0.0
    judge(phase.rows, roofs)
    return [a.rule for a in advise.advise(profile, phase, roofs)]


def profiled(model: Any, inputs: Any, **options: Any) -> Profile:
    result: Profile = opsmith.profile(model, inputs, budget_s=0.05, **options)
    return result


class Norms(nn.Module):
    """RMSNorm as six PyTorch calls, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        y: torch.Tensor = self.linear(x)
        return y


class Scores(nn.Module):
    """Attention whose scores go through memory."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ q.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ q


class Copies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x.t().contiguous()
        return x


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(4096, 64), nn.Linear(64, 4096)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.words(input_ids))
        return y


class Heads(nn.Module):
    """Head by head, in a loop."""

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        heads = [F.scaled_dot_product_attention(q[:, h], q[:, h], q[:, h]) for h in range(q.shape[1])]
        return torch.stack(heads, 1)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.linear = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.words(input_ids)) * attention_mask[..., None]
        return y


def test_an_unfused_norm() -> None:
    assert "unfused norm" in advised(profiled(seeded(Norms), torch.randn(512, WIDTH)))[:2]


def test_materialized_scores() -> None:
    profile = profiled(Scores(), torch.randn(1, 4, 512, 32))
    assert "materialized attention scores" in advised(profile)[:2]


def test_float32_where_bfloat16_is_faster() -> None:
    profile = profiled(seeded(lambda: nn.Linear(WIDTH, WIDTH)), torch.randn(512, WIDTH))
    assert "float32" not in advised(profile)
    assert advised(profile, **{"matmul float32": 1e11, "matmul bfloat16": 3e11})[0] == "float32"


def test_copies_in_a_loop() -> None:
    assert "copies in a loop" in advised(profiled(Copies(), torch.randn(512, 512)))[:2]


def test_logits_for_all_positions() -> None:
    ids = torch.randint(0, 4096, (2, 64))
    assert (
        "logits for all positions"
        in advised(profiled(seeded(Logits), {"input_ids": ids}, phase="prefill"))[:2]
    )
    last = {"input_ids": ids[:, -1:]}
    assert "logits for all positions" not in advised(profiled(seeded(Logits), last, phase="prefill"))


def test_one_thread() -> None:
    model = seeded(lambda: nn.Linear(WIDTH, 4 * WIDTH))
    torch.set_num_threads(1)  # the next test has its own again
    assert "one thread" in advised(profiled(model, torch.randn(512, WIDTH)))[:2]


def test_a_loop_over_heads() -> None:
    assert "loop over heads" in advised(profiled(Heads(), torch.randn(1, 8, 256, 32)))[:2]


def test_padding() -> None:
    ids, mask = torch.randint(0, 100, (8, 100)), torch.zeros(8, 100, dtype=torch.long)
    mask[:, :20] = 1
    profile = profiled(seeded(Padded), {"input_ids": ids, "attention_mask": mask})
    assert "padding" in advised(profile)[:2]
    assert profile.phases[0].facts["padding"] == pytest.approx(0.8)


def test_a_clean_model_gets_no_advice() -> None:
    class Clean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.norm(x).unflatten(-1, (8, 32)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2)
            y: torch.Tensor = x + self.down(F.gelu(self.up(x)))
            return y

    assert advised(profiled(seeded(Clean), torch.randn(2, 64, WIDTH))) == []


def test_no_gain_is_promised_below_the_noise_or_above_what_was_lost() -> None:
    row = Row(
        MATMUL, "linear", "x 8×8, weight 8×8", dtype="float32", seconds=1e-2, calls=1, flops=1e9, bytes=1e3
    )
    phase = Phase("forward", 1e-2, rows=[row], noise=0.0, facts={"threads": 1.0})
    profile = Profile("model", [phase], {"cores": 4})
    roofs = Roofs()
    roofs.rates = {**RATES, "matmul bfloat16": 4e11}
    judge(phase.rows, roofs)
    found = advise.advise(profile, phase, roofs)
    assert found
    for one in found:
        assert one.gain <= row.seconds - 1e9 / 4e11
        assert one.speedup == pytest.approx(phase.wall / (phase.wall - one.gain))
    phase.noise = 1.0
    assert advise.advise(profile, phase, roofs) == []
