"""What a small call costs that records a gradient, forward and backward: every public function against eager.

    python benchmarks/gradients.py [--only softmax,gelu] [--dtype bfloat16] [--seconds 0.3]

Both run forward on leaves that want gradients, then `torch.autograd.grad` from the same gradient of the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

import opsmith.ops  # noqa: F401  registers the cards
from opsmith import measure
from opsmith.call.arguments import short
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Sample, registry
from opsmith.ops.rope.table import rope_table
from opsmith.proof.verify import with_leaves

ROWS = ((1, 1), (1, 64), (1, 768), (1, 4096), (1, 32000), (16, 64), (16, 768), (128, 10), (128, 512))


def small(make: Make) -> dict[str, Iterator[Sample]]:
    """Rows as a layer's or a small model's, by operator."""

    def rows(
        name: str, call: Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> Iterator[Sample]:
        for r, n in ROWS:
            args, kwargs = call(r, n)
            yield Sample(f"{r}x{n}{name}", args, kwargs)

    def heads(batch: int, tokens: int) -> tuple[torch.Tensor, ...]:
        return make(batch, 4, tokens, 64), make(batch, 4, tokens, 64), make(batch, 4, tokens, 64)

    def pairs(r: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make(r, n), make(r, n)

    def loss(r: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return make(r, n), make.ids(r, high=n)

    cos, sin = rope_table(64, 16, dtype=make.dtype)
    turned = [(f"{b}x{h}x{t}x64", b, h, t) for b, h, t in ((1, 8, 1), (1, 32, 1), (2, 8, 16))]
    projected = {"heads": 4, "kv_heads": 2, "head_dim": 64}

    def both(name: str, call: Callable[[int, int], Any]) -> Iterator[Sample]:
        yield from rows(name, call)
        yield from rows(name + " residual", lambda r, n: (call(r, n)[0], {"residual": make(r, n)}))

    def packed(lengths: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        starts = torch.tensor([0, *lengths]).cumsum(0)
        return *(make(sum(lengths), 4, 64) for _ in range(3)), starts, starts

    def leaf(*shape: int) -> torch.Tensor:  # which alone wants a gradient: a rotation's table wants none
        return make(*shape).requires_grad_()

    return {
        "softmax": rows("", lambda r, n: ((make(r, n),), {})),
        "layer_norm": both("", lambda r, n: ((make(r, n), make(n), make(n)), {})),
        "rms_norm": both("", lambda r, n: ((make(r, n), make(n)), {})),
        "gelu": (
            s
            for t in (False, True)
            for s in rows(" tanh" * t, lambda r, n, t=t: ((make(r, n),), {"tanh": t}))
        ),
        "bias_gelu": (
            s
            for t in (False, True)
            for s in rows(" tanh" * t, lambda r, n, t=t: ((make(r, n), make(n)), {"tanh": t}))
        ),
        "silu_mul": rows("", lambda r, n: (pairs(r, n), {})),
        "gelu_mul": (
            s for t in (False, True) for s in rows(" tanh" * t, lambda r, n, t=t: (pairs(r, n), {"tanh": t}))
        ),
        "linear": rows("", lambda r, n: ((make(r, min(n, 4096)), make(64, min(n, 4096)), make(64)), {})),
        "cross_entropy": rows("", lambda r, n: (loss(r, n), {})),
        "linear_cross_entropy": (
            Sample(f"{r}x64x{n}", (make(r, 64), make(n, 64), make.ids(r, high=n))) for r, n in ROWS
        ),
        "embedding": (
            Sample(f"{r} of {n}x64", (make.ids(r, high=n), make(n, 64)))
            for r, n in ((1, 10), (16, 10), (1, 1000), (16, 1000), (128, 32000))
        ),
        "rope": (Sample(name, (leaf(b, h, t, 64), cos[:t], sin[:t])) for name, b, h, t in turned),
        "rope_qk": (
            Sample(name, (leaf(b, h, t, 64), leaf(b, 2, t, 64), cos[:t], sin[:t])) for name, b, h, t in turned
        ),
        "linear_rope": (
            Sample(
                f"{t}x256, 4 and 2 heads",
                (leaf(1, t, 256), leaf(512, 256), None, cos[:t], sin[:t]),
                projected,
            )
            for t in (1, 16)
        ),
        "attention": (
            Sample(f"{b}x4x{t}x64", heads(b, t), {"causal": causal})
            for b, t, causal in ((1, 1, False), (1, 16, False), (1, 16, True), (4, 64, True))
        ),
        "attention_varlen": (
            Sample(f"{'+'.join(map(str, lengths))}x4x64", packed(lengths), {"causal": causal})
            for lengths, causal in (((1,), False), ((5, 11), False), ((5, 11), True), ((40, 64, 100), True))
        ),
    }


def there_and_back(fn: Callable[..., Any], sample: Sample) -> Callable[[], Any]:
    """A function, then its gradients."""
    args, kwargs, leaves = with_leaves(sample.args, dict(sample.kwargs))
    results = [t for t in tensors_of(fn(*args, **kwargs)) if t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    seeds = [torch.randn(t.shape, generator=generator).to(t) for t in results]

    def run() -> Any:
        found = fn(*args, **kwargs)
        results = [t for t in (found if isinstance(found, tuple) else (found,)) if t.requires_grad]
        return torch.autograd.grad(results, leaves, seeds, allow_unused=True)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of operators, separated by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each row")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    only = set(options.only.split(",")) - {""}
    print(f"{'':40}{'ours':>9}{'eager':>9}{'ratio':>8}   {short(dtype)}, microseconds, forward and backward")
    cards = {card.name: card for card in registry().values()}
    for name, samples in small(Make(dtype)).items():
        for sample in samples if not only or name in only else ():
            card = cards[name]
            contestants = {
                "ours": there_and_back(card.function, sample),
                "eager": there_and_back(card.eager, sample),
            }
            taken = measure.compare(contestants, budget_s=options.seconds, rounds=60, warmup=20)
            ours, eager = (taken.median(c) * 1e6 for c in ("ours", "eager"))
            print(f"{name + ' ' + sample.name:40}{ours:9.2f}{eager:9.2f}{eager / ours:8.2f}", flush=True)


if __name__ == "__main__":
    main()
