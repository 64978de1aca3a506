"""Everything there is to learn on a machine with a GPU, in stages that resume: first what is right, then how fast.

    python benchmarks/gpu.py                       # all stages; what has left a file is not run again
    python benchmarks/gpu.py verify models         # these
    python benchmarks/gpu.py --only rms_norm       # jobs with this in their name
    python benchmarks/gpu.py --dry                 # all of this code without a GPU: Triton's interpreter, tiny sizes
    python benchmarks/gpu_page.py                  # what they found, in one file and on a page

Every job is a process of its own that leaves a JSON file and a log in build/gpu; one that fails, or takes longer
than its limit, is named, and the others go on. Jobs about right and wrong share the GPU, those that time have it alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils._pytree import tree_map_only

import opsmith
import opsmith.ops
from opsmith import measure
from opsmith.call.dispatch import always_native
from opsmith.measure.pool import tensors_of
from opsmith.operator import Make, Sample, registry

HERE = Path(__file__).resolve().parents[1]
DRY = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if DRY else "cuda"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SECONDS = 0.02 if DRY else 0.3  # of each comparison


@dataclass(frozen=True)
class Stage:
    """Jobs of one kind: what they are called, what each does, and whether they may share the GPU."""

    jobs: Callable[[], list[str]]
    run: Callable[[str], Any]
    alone: bool = False
    limit: int = 480  # seconds of one job


# ---- What this machine is


def machine(job: str) -> dict[str, Any]:
    """Versions, clocks, and the roofs."""
    found: dict[str, Any] = {"machine": measure.describe().to_json()}
    for package in ("torch", "triton", "transformers", "liger-kernel", "flashinfer-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if not DRY:
        query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.limit,temperature.gpu"
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        found["nvidia-smi"] = dict(zip(query.split(","), said.stdout.strip().split(", "), strict=False))
        found["roofs"] = measure.measure_roofs(device=DEVICE).to_json()
    return found


# ---- Right: every card, in every dtype, then in graphs


def cards() -> list[str]:
    """Operators that have a kernel for this device; dry, the one that the interpreter is soonest done with."""
    ours = ("triton", "sdpa")
    names = [name for name, card in registry().items() if any(i.name in ours for i in card.implementations)]
    return [name for name in names if name == "silu_mul"] if DRY else names


_MLA = ("mla_preprocess", "mla_preprocess_int8")


def each_dtype() -> list[str]:
    """A job for each card and dtype, the longest first."""
    long = ["attention", "packed_linear", "paged_attention", "linear_rope", *_MLA]
    found = [f"{card}-{dtype}" for card in cards() for dtype in (("float32",) if DRY else DTYPES)]
    return sorted(found, key=lambda job: job.split("-")[0] not in long)


def verify(job: str) -> dict[str, Any]:
    """What `opsmith verify` checks of a card; how it behaves, in float32."""
    from opsmith.proof.conduct import conduct
    from opsmith.proof.verify import verify as findings_of

    name, dtype = job.split("-")
    card = registry()[name]
    more = conduct(card, torch.float32, DEVICE) if dtype == "float32" and not DRY else ()
    findings = []
    for finding in chain(findings_of(card, [DTYPES[dtype]], DEVICE), more):
        findings.append(finding)
        if not finding.ok:
            print(finding, flush=True)
    red = [asdict(f) for f in findings if not f.ok]
    worst = max((f.error / f.bound for f in findings if f.ok and f.bound), default=None)
    return {"ok": not red, "checks": len(findings), "worst": worst, "failed": red}


def graphs(job: str) -> dict[str, Any]:
    """A call captured in a CUDA graph gives, replayed on other values, the bits of the call itself."""
    card, red, seen = registry()[job], [], 0
    others = card.samples(Make(torch.bfloat16, DEVICE, seed=1))
    for sample, other in zip(card.samples(Make(torch.bfloat16, DEVICE)), others, strict=True):
        sample, other = _leaves(sample), _leaves(other)
        for one in card.candidates(*sample.args, **sample.kwargs)[0]:
            if one.name != "triton":
                continue
            seen += 1
            try:
                with torch.no_grad(), always_native():
                    why = _replayed(one.fn, sample, other)
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0]
            if why:
                red.append(f"{sample.name}: {why}")
    return {"ok": not red, "checks": seen, "failed": red}


def _leaves(sample: Sample) -> Sample:
    """The same call with tensors that are nobody's results, and show no number twice, as only these can be copied."""

    def leaf(t: torch.Tensor) -> torch.Tensor:
        return t.detach().contiguous() if 0 in t.stride() else t.detach()

    return Sample(sample.name, *tree_map_only(torch.Tensor, leaf, (sample.args, dict(sample.kwargs))))


def _replayed(fn: Callable[..., Any], sample: Sample, other: Sample) -> str:
    wanted = _flat(fn(*copy.deepcopy(other.args), **copy.deepcopy(dict(other.kwargs))))
    held = copy.deepcopy((sample.args, dict(sample.kwargs)))
    if DRY:
        got = fn(*other.args, **other.kwargs)
    else:
        fn(*copy.deepcopy(held[0]), **copy.deepcopy(held[1]))  # compiled outside of the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = fn(*held[0], **held[1])
        for to, value in zip(tensors_of(held), tensors_of((other.args, dict(other.kwargs))), strict=True):
            to.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(_flat(got), wanted, strict=True))
    return "" if same else "the replay differs from the call"


def _flat(result: Any) -> list[torch.Tensor]:
    return tensors_of(((result,), {}))


# ---- Right: what is built on this machine


def built(job: str) -> dict[str, Any]:
    """Tests of CUDA sources: generated by the toolchain, compiled by nvcc, run and trained with."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", job],
        cwd=HERE,
        check=False,
    )
    return {"ok": done.returncode == 0}


# ---- Whole models


def _small(layers: int = 2, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "vocab_size": 512 if DRY else 32000, "pad_token_id": 0} | more


LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
# The sizes that are DeepSeek-V3's own, but for the number of its experts.
V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
}
TINY_V3 = V3 | TINY | {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8}
TINY_V3 |= {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "kv_lora_rank": 32, "q_lora_rank": 48}
TINY_V3 |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16)
# By job: the model's class, its configuration, and the ids' shape. Sentences of MiniLM, a prompt of the others.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int]]] = {
    "minilm": (
        "Bert",
        {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12} | _small(6),
        (32, 128),
    ),
    "llama": ("Llama", LLAMA | _small(8), (1, 512)),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 128} | _small(4), (1, 512)),
    "gemma3": ("Gemma3", LLAMA | {"head_dim": 64, "sliding_window": 128} | _small(4), (1, 512)),
    "gpt2": ("GPT2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 32000}, (1, 512)),
    "deepseek-tiny": ("DeepseekV3", TINY_V3 | _small(2), (1, 64)),
    "deepseek": ("DeepseekV3", V3 | _small(1), (1, 128)),
}
DRY_MODELS = {"llama": ("Llama", TINY | _small(1), (1, 8))}


def model_of(job: str, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """A model with seeded random weights, and ids for it."""
    import transformers

    name, config, shape = (DRY_MODELS if DRY else MODELS)[job]
    extra = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, name + extra)(**config)
    kind = {"Bert": "BertModel", "GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM")
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = getattr(transformers, kind)(config).to(dtype).eval()
    return model, torch.randint(3, config.vocab_size, shape, device=DEVICE)


@torch.no_grad()
def models(job: str) -> dict[str, Any]:
    """A model, optimized: what was found, whether it says the same, and both times; of a decoder, each token's too."""
    eager, ids = model_of(job, torch.bfloat16)
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ours = opsmith.optimize(copy.deepcopy(eager), {"input_ids": ids})
        seconds = time.perf_counter() - start
        got, plain = (_logits(m(input_ids=ids)) for m in (ours, eager))
    wide = copy.deepcopy(eager).float()  # PyTorch multiplies no groups, as experts are, in float64
    exact = _logits(wide(input_ids=ids))
    scale = exact.abs().max()
    error, its = (float((x.float() - exact).abs().max() / scale) for x in (got, plain))
    bound = 2 * its + 2**-8
    report = ours.opsmith.report
    found: dict[str, Any] = {
        "ok": error <= bound,
        "error": error,
        "eager": its,
        "found": dict(sorted(report.found.items())),
        "plan": str(ours.opsmith.plan),
        "left": list(filter(None, [*(g.left for g in report.graphs), *report.rolled_back])),
        "warnings": sorted({str(w.message).splitlines()[0][:200] for w in warned}),
        "seconds_to_optimize": seconds,
        "report": str(report),
    }
    found["forward"] = _compared(job, eager, ours, ids)
    found["not recorded"] = sorted({g.recordings.why for g in ours.opsmith.graphs if g.recordings} - {""})
    if hasattr(eager, "generate") and not DRY:
        found["decode"] = _decoded(eager, ours, ids, wide)
        found["ok"] &= found["decode"]["worse"] <= 2 * bound
    return found


def _logits(out: Any) -> torch.Tensor:
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def _compared(job: str, eager: Any, ours: Any, ids: torch.Tensor) -> dict[str, Any]:
    contestants = {"eager": eager, "opsmith": ours}
    if not DRY:
        contestants["compile"] = torch.compile(eager)
        contestants["compile, graphs"] = torch.compile(eager, mode="reduce-overhead")
    calls = {name: (lambda model=model: model(input_ids=ids)) for name, model in contestants.items()}
    for call in calls.values():
        call()
    compared = measure.compare(calls, rounds=15, budget_s=3 * SECONDS * 10, device=DEVICE)
    return {name: compared.median(name) for name in compared.names}


def _decoded(eager: Any, ours: Any, ids: torch.Tensor, wide: Any, tokens: int = 32) -> dict[str, Any]:
    """Seconds a token; tokens that are the same until the first that is not, and how much less likely ours is there.

    Random weights leave many tokens as likely as one another, and what follows another token is another text.
    """
    given, times = {}, {}
    # transformers compiles a step on a cache of a fixed size, and replays it.
    static = {"cache_implementation": "static"}
    for name, model, more in (("eager", eager, {}), ("opsmith", ours, {}), ("static cache", eager, static)):
        taken: dict[int, list[float]] = {1: [], tokens: []}
        for new in (1, tokens) * 4:
            torch.cuda.synchronize()
            start = time.perf_counter()
            out = model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, **more)
            torch.cuda.synchronize()
            taken[new].append(time.perf_counter() - start)
        given[name], times[name] = out, (min(taken[tokens]) - min(taken[1])) / (tokens - 1)
    differs = (given["eager"] != given["opsmith"])[0].nonzero()
    if not len(differs):
        return {"seconds_a_token": times, "same": tokens, "worse": 0.0}
    at = int(differs[0])
    logits = _logits(wide(input_ids=given["eager"][:, :at]))[0, -1]
    worse = float((logits[given["eager"][0, at]] - logits[given["opsmith"][0, at]]) / logits.abs().max())
    return {"seconds_a_token": times, "same": at - ids.shape[1], "worse": worse}


# ---- Fast


class OnDevice(Make):
    """The same source of tensors, drawn where they will be: a cache of gigabytes would take the CPU minutes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype, DEVICE)
        self._here = torch.Generator(DEVICE).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        values = torch.randn(shape, generator=self._here, dtype=torch.float32, device=DEVICE)
        return (values * scale + shift).to(self.dtype)


def _rows(make: Make) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, size = (4, 32) if DRY else (16384, 4096)
    return make(n, size), make(size), make(size)


def _attention(
    make: Make, batch: int, heads: int, kv: int, queries: int, keys: int, size: int, **more: Any
) -> Sample:
    q, k, v = make(batch, heads, queries, size), make(batch, kv, keys, size), make(batch, kv, keys, size)
    causal = "causal" if more.get("causal") else ""
    return Sample(f"{batch}x{heads}/{kv}x{queries}x{keys}x{size} {causal}".strip(), (q, k, v), more)


def _paged(make: Make) -> Sample:
    sequences, keys, block = 64, 8192, 16
    blocks = sequences * keys // block
    k, v = make(blocks, block, 8, 128), make(blocks, block, 8, 128)
    tables = torch.randperm(blocks, device=DEVICE).to(torch.int32).view(sequences, -1)
    lengths = torch.full((sequences,), keys, dtype=torch.int32, device=DEVICE)
    q = make(sequences, 32, 128)
    return Sample(f"{sequences} x {keys} keys, 32/8x128", (q, k, v, tables, lengths), {})


# Sizes that fill a GPU, where those of a card are a CPU's.
SIZED: dict[str, Callable[[Make], list[Sample]]] = {
    "layer_norm": lambda m: [Sample("16384x4096", _rows(m))],
    "rms_norm": lambda m: [Sample("16384x4096", _rows(m)[:2])],
    "softmax": lambda m: [Sample("16384x4096", _rows(m)[:1])],
    "gelu": lambda m: [Sample("16384x4096", _rows(m)[:1])],
    "silu_mul": lambda m: [Sample("16384x4096", (_rows(m)[0], _rows(m)[0]))],
    "rms_norm_quant": lambda m: [Sample("16384x4096", _rows(m)[:2])],
    "rope": lambda m: [Sample("8x32x4096x128", (m(8, 32, 4096, 128), m(4096, 128), m(4096, 128)))],
    "cross_entropy": lambda m: [Sample("4096x128256", (m(4096, 128256), m.ids(4096, high=128256)))],
    "linear_cross_entropy": lambda m: [
        Sample("4096x4096x128256", (m(4096, 4096), m(128256, 4096, scale=0.02), m.ids(4096, high=128256)))
    ],
    "embedding": lambda m: [Sample("65536 of 128256x4096", (m.ids(8, 8192, high=128256), m(128256, 4096)))],
    "attention": lambda m: [
        _attention(m, 2, 32, 8, 4096, 4096, 128, causal=True),
        _attention(m, 2, 16, 16, 4096, 4096, 64),
        _attention(m, 64, 32, 8, 1, 8192, 128),
    ],
    "paged_attention": lambda m: [_paged(m)],
}
TIMED = [
    *("attention", "packed_linear", "mla_preprocess_int8", "rms_norm_quant", "paged_attention"),
    *("mla_preprocess", "mla_attention", "cross_entropy", "embedding", "rms_norm", "layer_norm"),
    *("softmax", "gelu", "silu_mul", "rope", "linear_cross_entropy", "experts"),
]


def timed(job: str) -> dict[str, Any]:
    """An operator beside eager, torch.compile and Liger, checked on the very inputs; cold, and in a graph."""
    from opsmith.proof.bench import bench, workloads

    card = registry()[job]
    make = OnDevice(torch.bfloat16)
    samples = SIZED[job](make) if job in SIZED else workloads(card, Make(torch.bfloat16, DEVICE))
    against = ["eager", "compile"]
    against += ["liger"] if importlib.util.find_spec("liger_kernel") and not DRY else []
    results, red = [], []
    for sample in samples:
        try:
            for result in bench(
                *(card, torch.bfloat16),
                against=against,
                device=DEVICE,
                seconds=SECONDS,
                sample=sample,
                verified=True,
                backward=job != "mla_preprocess" and not DRY,
            ):
                results.append(result.to_json())
                _say(result)
        except Exception as error:
            traceback.print_exc()
            red.append(f"{sample.name}: {type(error).__name__}: {error}"[:500])
        torch.cuda.empty_cache()
    return {"ok": not red, "failed": red, "results": results}


def _say(result: Any) -> None:
    for column, compared in result.columns.items():
        times = {n: f"{compared.median(n) * 1e6:.1f}" for n in compared.names if not n.startswith("roof")}
        roof = {n: f"{f:.2f}" for n, f in result.roof.get(column, {}).items()}
        print(
            f"{result.operator} {result.workload} {result.direction} {column}: us {times} roof {roof}",
            flush=True,
        )
    for note in (*result.notes, *result.faults):
        print("   ", note, flush=True)


STAGES = {
    "machine": Stage(lambda: ["machine"], machine, alone=True),
    "verify": Stage(each_dtype, verify),
    "graphs": Stage(cards, graphs),
    "built": Stage(
        lambda: (
            [] if DRY else ["tests/examples/test_cuda_layer_norm.py", "tests/authoring/test_generated.py"]
        ),
        built,
    ),
    "models": Stage(lambda: list(DRY_MODELS if DRY else MODELS), models, alone=True),
    "fast": Stage(lambda: ["silu_mul"] if DRY else list(TIMED), timed, alone=True),
}


def one(stage: str, job: str, folder: Path) -> None:
    """Run a job in this process, and leave its file."""
    start = time.perf_counter()
    try:
        found = STAGES[stage].run(job)
    except Exception as error:
        traceback.print_exc()
        found = {"ok": False, "failed": [f"{type(error).__name__}: {error}"[:2000]]}
    found = {"stage": stage, "job": job, "seconds": time.perf_counter() - start} | found
    file = folder / f"{stage}-{job.replace('/', '-')}.json"
    file.write_text(json.dumps(found, indent=1, default=str))


def start(stage: str, job: str, folder: Path, end: float) -> tuple[str, bool, str]:
    """A job in a process of its own: its name, whether all is well, and what is not."""
    name = f"{stage}-{job.replace('/', '-')}"
    file = folder / f"{name}.json"
    if not file.exists():
        told = ["--job", f"{stage}:{job}", "--folder", str(folder)]
        command = [sys.executable, "-W", "ignore", __file__, *told]
        limit = max(0.0, min(STAGES[stage].limit, end - time.monotonic()))
        with open(folder / f"{name}.log", "w") as log:
            try:
                subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                return name, False, f"took longer than {limit:.0f} s"
    if not file.exists():
        return name, False, "died: " + " | ".join((folder / f"{name}.log").read_text().splitlines()[-3:])
    found = json.loads(file.read_text())
    failed = [str(f.get("why", f) if isinstance(f, dict) else f) for f in found.get("failed", [])]
    text = f"{found['seconds']:.0f} s" + "".join(f"\n    {f[:300]}" for f in failed[:4])
    return name, found.get("ok", True), text


def run(stages: list[str], only: str, folder: Path, seconds: float, together: bool) -> list[str]:
    """All jobs of these stages; the names of those that failed."""
    began, failed = time.monotonic(), []
    folder.mkdir(parents=True, exist_ok=True)
    # What may share the GPU goes first, all at once.
    shared: list[tuple[str, str]] = []
    alone: list[tuple[str, str]] = []
    for stage in stages:
        lot = alone if STAGES[stage].alone and not together else shared
        lot += [(stage, job) for job in STAGES[stage].jobs() if only in job]
    for jobs, workers in ((shared, len(os.sched_getaffinity(0))), (alone, 1)):
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            waiting = [pool.submit(start, s, job, folder, began + seconds) for s, job in jobs]
            for done in concurrent.futures.as_completed(waiting):
                name, ok, text = done.result()
                said = "ok  " if ok else "FAIL"
                print(f"{said} {time.monotonic() - began:4.0f} s {name}: {text}", flush=True)
                failed += [] if ok else [name]
    return failed


def main(
    stages: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(STAGES)}; all by default.")
    ] = None,
    only: Annotated[str, typer.Option(help="Jobs with this in their name.")] = "",
    folder: Annotated[Path, typer.Option(help="Where files and logs go.")] = HERE / "build" / "gpu",
    seconds: Annotated[float, typer.Option(help="Stop everything after so long.")] = 86400,
    together: Annotated[
        bool, typer.Option("--together", help="All at once: right or wrong, but no times.")
    ] = False,
    dry: Annotated[
        bool, typer.Option("--dry", help="Without a GPU: Triton's interpreter, tiny sizes.")
    ] = False,
    job: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Run jobs, and say which failed."""
    if dry and not DRY:
        os.environ["TRITON_INTERPRET"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    if not DRY and not torch.cuda.is_available():
        raise typer.BadParameter("this PyTorch finds no GPU; --dry goes through the same code without one")
    if job:
        one(*job.split(":", 1), folder)
        return
    failed = run(stages or list(STAGES), only, folder, seconds, together)
    if failed:
        print(f"{len(failed)} failed: {', '.join(failed)}; logs are in {folder}")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
