"""What a small call costs: every operator on one row or token, its public function against eager PyTorch.

    python benchmarks/overhead.py [--only silu_mul,gelu] [--dtype bfloat16] [--seconds 0.5]

"kernel" is the time of the calls of kernels that the public function makes, made alone with the same arguments and into
results that are there; "above" is what the public function costs beyond that: checks, views, the memory for the result.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from mla_rungs import thirteen_in_pytorch
from torch.utils._python_dispatch import TorchDispatchMode

from opsmith import measure
from opsmith.call.arguments import short
from opsmith.call.fast import direct
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Operator, Sample, registry
from opsmith.ops import MLACache, MLAWeights, mla_preprocess
from opsmith.ops.rope.table import rope_table

MOST = 200_000  # elements of the largest input of a card: beyond this the kernel's own time hides the rest


class Recorder(TorchDispatchMode):
    """Keeps the calls that compute something: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and "empty" not in str(func) and "detach" not in str(func):
            # A direct call knows its arguments by interned names, as those in a source are, and these are not.
            named = {sys.intern(name): value for name, value in kwargs.items()}
            self.calls.append(partial(direct.of(func), *args, **named))
        return result


def tokens(make: Make) -> dict[str, list[Sample]]:
    """One token as a model of usual size decodes it, by operator; and the smallest call of those with heads."""
    cos, sin = rope_table(128, 1, dtype=make.dtype)
    tiny = rope_table(2, 1, dtype=make.dtype)
    q, k = make(1, 32, 1, 128), make(1, 8, 1, 128)
    at = {"positions": torch.zeros(1, dtype=torch.long)}
    x_q = torch.randint(-127, 128, (1, 32, 1, 128), dtype=torch.int8)
    starts = torch.tensor([0, 1]), torch.tensor([0, 512])
    hidden = make(1, 1, 1024)
    table = make.ids(32000, 1024, high=255).to(torch.int8)
    return {
        "softmax": [Sample("1x1x4096", (make(1, 1, 4096),))],
        "linear": [
            Sample("1x384x1536", (make(1, 384), make(1536, 384), make(1536))),
            Sample("1x1x384x1536", (make(1, 1, 384), make(1536, 384), make(1536))),
            Sample("1x384x1536 gelu", (make(1, 384), make(1536, 384), make(1536)), {"activation": "gelu"}),
        ],
        "layer_norm": [
            Sample("1x1x768", (make(1, 1, 768), make(768), make(768))),
            Sample(
                "1x1x768 residual", (make(1, 1, 768), make(768), make(768)), {"residual": make(1, 1, 768)}
            ),
        ],
        "rms_norm": [
            Sample("1x1x4096", (make(1, 1, 4096), make(4096))),
            Sample("1x1x4096 residual", (make(1, 1, 4096), make(4096)), {"residual": make(1, 1, 4096)}),
        ],
        "silu_mul": [Sample("1x1x11008 packed", (make(1, 1, 22016),))],
        "gelu_mul": [Sample("1x1x11008 tanh", (make(1, 1, 11008), make(1, 1, 11008)), {"tanh": True})],
        "embedding": [Sample("[1, 1] of 32000x1024", (make.ids(1, 1, high=32000), make(32000, 1024)))],
        "quantized_embedding": [
            Sample(
                "[1, 1] of 32000x1024",
                (make.ids(1, 1, high=32000), table, torch.rand(32000)),
                {"dtype": make.dtype},
            )
        ],
        "rope": [
            Sample("1x1x1x2", (make(1, 1, 1, 2), *tiny)),
            Sample("1x32x1x128", (q, cos, sin)),
            Sample("1x32x1x128 at a position", (q, cos, sin), at),
        ],
        "rope_qk": [
            Sample("1x1x1x2", (make(1, 1, 1, 2), make(1, 1, 1, 2), *tiny)),
            Sample("32 and 8 heads x1x128", (q, k, cos, sin)),
            Sample("32 and 8 heads x1x128 at a position", (q, k, cos, sin), at),
        ],
        "rope_int8": [Sample("1x32x1x128", (x_q, torch.rand(1, 32, 1), cos, sin))],
        "attention": [
            Sample("1x12x1x512x64", (make(1, 12, 1, 64), make(1, 12, 512, 64), make(1, 12, 512, 64))),
            Sample(
                "1x12x1x512x64 causal",
                (make(1, 12, 1, 64), make(1, 12, 512, 64), make(1, 12, 512, 64)),
                {"causal": True},
            ),
        ],
        "attention_varlen": [
            Sample("1 of 512x12x64", (make(1, 12, 64), make(512, 12, 64), make(512, 12, 64), *starts))
        ],
        "cross_entropy": [Sample("1x32000", (make(1, 32000), make.ids(1, high=32000)))],
        "linear_cross_entropy": [
            Sample("1x256x1000", (make(1, 256), make(1000, 256, scale=0.06), make.ids(1, high=1000)))
        ],
        "linear_rope": [
            Sample(
                "1x1x1024, 8 and 2 heads",
                (hidden, make(12 * 128, 1024, scale=0.03), None, cos, sin),
                {"heads": 8, "kv_heads": 2, "head_dim": 128},
            )
        ],
    }


def one_row(card: Operator, dtype: torch.dtype) -> Iterator[Sample]:
    """The card's samples and workloads that are one row, smallest first, then the tokens of usual models."""
    found = {}
    for sample in (*card.samples(Make(dtype)), *(card.workloads(Make(dtype)) if card.workloads else ())):
        first = next(iter(tensors_of(sample.args)))
        rows = first.numel() // first.shape[-1] if first.dim() and first.shape[-1] else 0
        if rows == 1 and first.is_contiguous():
            found[tuple(first.shape), str(sample.kwargs)] = sample
    largest = partial(max, default=0)
    sizes = {key: largest(t.numel() for t in tensors_of(s.args)) for key, s in found.items()}
    yield from (found[key] for key in sorted(found, key=sizes.__getitem__) if sizes[key] <= MOST)
    yield from tokens(Make(dtype)).get(card.name, ())


def mla_preprocess_calls(sample: Sample) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and eager's as a model calls them: the card's function makes weights and a cache of its own at each call."""
    x, wdqkv, wuq, wuk, gamma0, gamma1, gamma2, cos, sin, slots = sample.args
    heads, nope, kv_lora = wuk.shape
    rope = wuq.shape[0] // heads - nope
    ranks = {"heads": heads, "nope": nope, "rope": rope, "kv_lora": kv_lora, "q_lora": wuq.shape[1]}
    w = MLAWeights(wdqkv, wuq, wuk, gamma0=gamma0, gamma1=gamma1, gamma2=gamma2, **ranks)
    layout = (sample.kwargs[name] for name in ("mode", "blocks", "block_size"))
    cache = MLACache.allocate(*layout, kv_lora=kv_lora, rope=rope, dtype=x.dtype)
    given = x, w, cos, sin, slots, cache
    return partial(mla_preprocess, *given), partial(thirteen_in_pytorch, *given)


def times(card: Operator, sample: Sample, seconds: float) -> dict[str, float]:
    """Microseconds of a call: ours, eager's, and that of the kernels alone."""
    if card.name == "mla_preprocess":
        ours, eager = mla_preprocess_calls(sample)
    else:
        ours, eager = (partial(f, *sample.args, **sample.kwargs) for f in (card.function, card.eager))
    with Recorder() as seen:
        ours()

    def kernels() -> None:
        for call in seen.calls:
            call()

    contestants = {"ours": ours, "eager": eager, "kernel": kernels}
    taken = measure.compare(contestants, budget_s=seconds, rounds=60, warmup=50)
    return {name: taken.median(name) * 1e6 for name in contestants}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of operators, separated by commas")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    only = set(options.only.split(",")) - {""}
    print(
        f"{'':32}{'ours':>8}{'eager':>8}{'ratio':>8}{'kernel':>8}{'above':>8}   {short(dtype)}, microseconds"
    )
    with torch.no_grad():
        for card in registry().values():
            if only and card.name not in only:
                continue
            for sample in one_row(card, dtype):
                t = times(card, sample, options.seconds)
                name = f"{card.name} {sample.name}"
                print(
                    f"{name:32}{t['ours']:8.2f}{t['eager']:8.2f}{t['eager'] / t['ours']:8.2f}"
                    f"{t['kernel']:8.2f}{t['ours'] - t['kernel']:8.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
