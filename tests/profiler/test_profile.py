"""Profiles of small models: everything has a class, rows sum to wall time, composites are one operator."""

import copy
import html
import io
import json
import math
import shlex
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import opsmith
from opsmith.compiler.choose.select import signature
from opsmith.operator import registry
from opsmith.profiler import Profile
from opsmith.profiler.collect import align
from opsmith.profiler.data import ATTENTION, MATMUL, NORM, Phase, Row, bill
from opsmith.profiler.report.text import _layers_table, per_token, trust
from opsmith.proof.replay import call_of, sample_of
from tests.compiler.models import Encoder, ids, seeded

WIDTH = 64


class RMS(nn.Module):
    """RMSNorm, fused or as six PyTorch calls."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.weight = fused, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.rms_norm(x, (WIDTH,), self.weight, 1e-6)
        y: torch.Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return y


class Layer(nn.Module):
    """A norm, attention and a linear layer, each written as told."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.norm = fused, RMS(fused)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, 4, WIDTH // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH // 4), -1) @ v
        done: torch.Tensor = x + self.out(y.transpose(1, 2).reshape(b, n, WIDTH))
        return done


class Stack(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(fused) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def profiled(model: Any, *args: Any, **options: Any) -> Profile:
    result: Profile = opsmith.profile(model, args or None, **{"budget_s": 0.05, **options})
    return result


def well_formed(profile: Profile) -> None:
    """What must hold of every profile, but for the clock: see benchmarks for the roofs."""
    assert not profile.partial
    for phase in profile.phases:
        assert phase.total == pytest.approx(phase.wall, rel=0.02)
        assert phase.classified >= 0.97
        assert phase.covered(MATMUL, ATTENTION) >= 0.95
        assert not any(row.seconds < 0 for row in phase.rows)
        assert phase.events == sorted(phase.events, key=lambda e: e.start)


@pytest.fixture(scope="module")
def both() -> dict[bool, Profile]:
    x = torch.randn(2, 32, WIDTH)
    return {fused: profiled(seeded(lambda f=fused: Stack(f)), x) for fused in (True, False)}


def test_fused_and_written_out_give_one_bill(both: dict[bool, Profile]) -> None:
    counts = []
    for fused, profile in both.items():
        well_formed(profile)
        phase = profile.phases[0]
        rows = {b.name: b for b in bill(phase.rows, "operator")}
        counts.append(
            {n: (rows[n].calls, rows[n].flops, rows[n].bytes) for n in ("rms_norm", "attention", "linear")}
        )
        assert [r.composite for r in rows["rms_norm"].rows] == [not fused] * len(rows["rms_norm"].rows)
        assert not {"mul", "pow", "mean", "rsqrt", "softmax", "matmul"} & set(rows)
    assert counts[0] == counts[1]
    assert counts[0]["rms_norm"][0] == counts[0]["attention"][0] == 2


def test_layers_are_named(both: dict[bool, Profile]) -> None:
    for profile in both.values():
        layers = {r.layer for r in profile.phases[0].rows if r.kind in (NORM, ATTENTION, MATMUL)}
        assert layers == {"layers.0", "layers.1"}


@pytest.mark.parametrize("phase", ["train", "backward"])
def test_gradients_belong_to_the_operators_they_are_of(phase: str) -> None:
    profile = profiled(seeded(lambda: Stack(False)), torch.randn(2, 32, WIDTH), phase=phase)
    well_formed(profile)
    names = {r.operator: r for r in profile.phases[0].rows}
    assert {"rms_norm backward", "attention backward", "linear backward"} <= set(names)
    assert ("rms_norm" in names) is (phase == "train")
    assert names["rms_norm backward"].kind == NORM
    # Two products for each forward one, but none for the model's own input's gradient, which nobody asks for.
    forward = 2 * 64 * (WIDTH * 3 * WIDTH + WIDTH * WIDTH) * 2
    back = sum(r.flops for r in profile.phases[0].rows if r.operator == "linear backward")
    assert back == pytest.approx(2 * forward, rel=0.02)


def test_a_row_says_how_it_is_timed_by_itself(both: dict[bool, Profile]) -> None:
    """What the row names is a call that the command takes."""
    for profile in both.values():
        rows = {r.operator: r for r in profile.phases[0].rows}
        command = shlex.split(rows["rms_norm"].replay)
        assert command[:4] == ["opsmith", "bench", "rms_norm", "--shape"]
        sample, dtype = sample_of(registry()["rms_norm"], command[4])
        assert dtype == torch.float32
        assert sample.args[0].shape[-1] == WIDTH
        assert rows["rms_norm"].replay in " ".join(profile.table(400).split())
        assert html.escape(rows["rms_norm"].replay, quote=False).replace('"', "&#34;").replace(
            "'", "&#39;"
        ) in (profile.to_html())


def test_training_leaves_the_model_as_it_was() -> None:
    model = seeded(lambda: Stack(True))
    before = {n: p.clone() for n, p in model.named_parameters()}
    profiled(model, torch.randn(1, 8, WIDTH), phase="train")
    assert not model.training
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_an_optimized_model() -> None:
    from tests.compiler.models import optimized

    model = optimized(seeded(Encoder), ids(2, 16))
    try:
        profile = profiled(model, ids(2, 16))
        well_formed(profile)
        assert profile.optimized
        rows = {b.name: b for b in bill(profile.phases[0].rows, "operator")}
        steps = Counter(step.operator for step in model.opsmith.plan.shapes[0].steps)
        assert (steps["layer_norm"], steps["attention"]) == (5, 2)
        assert 8 <= steps["linear"] <= 12  # queries, keys and values may be one product
        assert {n: rows[n].calls for n in steps} == steps
        assert all(r.known and not r.composite for r in rows["layer_norm"].rows)
        assert not any(name.startswith("opsmith::") for name in rows)  # kernels are put down to their sites
    finally:
        opsmith.restore(model)
        torch._dynamo.reset()


def test_a_block_of_code() -> None:
    model, x = seeded(lambda: Stack(False)), torch.randn(2, 32, WIDTH)
    with opsmith.profile(name="a block") as recording, torch.no_grad():
        for _ in range(3):
            model(x)
    profile = recording.profile
    well_formed(profile)
    rows = {b.name: b for b in bill(profile.phases[0].rows, "operator")}
    assert rows["rms_norm"].calls == 6
    assert profile.phases[0].overhead_from == "estimated"


def test_what_raises_is_partial() -> None:
    class Broken(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            raise RuntimeError("<b>out of luck</b>")

    profile = profiled(seeded(lambda: Broken(True)), torch.randn(2, 8, WIDTH))
    assert "out of luck" in profile.partial
    assert sum(r.calls for r in profile.phases[0].rows if r.operator == "linear") == 4
    assert "PARTIAL" in profile.table()
    assert "<b>" not in profile.to_html()


def test_an_interruption_keeps_what_was_gathered() -> None:
    model, calls = seeded(lambda: Stack(True)), []

    def step(x: torch.Tensor) -> Any:
        calls.append(1)
        if len(calls) > 6:
            raise KeyboardInterrupt
        return model(x)

    profile = profiled(step, torch.randn(2, 8, WIDTH), budget_s=5.0)
    assert "interrupted" in profile.partial
    assert profile.phases[0].rows


def test_json_comes_back(both: dict[bool, Profile], tmp_path: Path) -> None:
    profile = both[False]
    file = tmp_path / "profile.json"
    profile.to_json(file)
    again = Profile.load(file)
    assert again == profile
    assert again.table() == profile.table()
    data = json.loads(file.read_text())
    data["schema"] = 99
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="schema 99, this version reads 1"):
        Profile.load(file)
    file.write_text('{"a plan": 1}')
    with pytest.raises(ValueError, match="is no profile"):
        Profile.load(file)
    file.write_text("no JSON")
    with pytest.raises(ValueError, match="is not JSON"):
        Profile.load(file)


def test_the_trace_carries_class_layer_and_cost(both: dict[bool, Profile]) -> None:
    events = [e for e in json.loads(both[False].to_chrome_trace())["traceEvents"] if e["ph"] == "X"]
    norms = [e for e in events if e["cat"] == NORM]
    assert {e["args"]["layer"] for e in norms} == {"layers.0", "layers.1"}
    assert len(norms) >= 2 * 5  # one operator, and each of its calls on the timeline
    assert all(e["args"]["MB"] > 0 and e["dur"] >= 0 for e in norms)
    assert sum(e["args"]["GFLOP"] for e in norms) == pytest.approx(
        sum(r.flops for r in both[False].phases[0].rows if r.kind == NORM) / 1e9
    )


def test_a_diff_knows_noise_from_change(both: dict[bool, Profile]) -> None:
    profile = copy.deepcopy(both[True])
    profile.phases[0].by_kind[MATMUL] = [1.0e-3, 1.1e-3, 0.9e-3]
    same = profile.diff(profile)
    assert not any(c.clear for c in same.changes)
    later = copy.deepcopy(profile)
    for times, clear in (([3.0e-3, 3.3e-3, 2.7e-3], True), ([1.05e-3, 1.1e-3, 0.9e-3], False)):
        later.phases[0].by_kind[MATMUL] = times
        assert [c.clear for c in later.diff(profile).changes if c.kind == MATMUL] == [clear]
        assert ("more" in str(later.diff(profile))) == clear
    for phase in later.phases:
        phase.name = "another"
    assert str(later.diff(profile)).startswith(
        "nothing is compared: no phase is in both\nanother is in the later"
    )


def test_refusals() -> None:
    with pytest.raises(ValueError, match="phase must be one of"):
        opsmith.profile(nn.Linear(2, 2), torch.ones(1, 2), phase="sideways")
    with pytest.raises(TypeError, match="must be a module or a callable"):
        opsmith.profile(3)
    with pytest.raises(TypeError, match="example_inputs must be"):
        opsmith.profile(nn.Linear(2, 2), "text")
    with pytest.raises(ValueError, match="decode needs a model"):
        opsmith.profile(nn.Linear(2, 2), torch.ones(1, 2), phase="decode")


def test_calls_are_found_again() -> None:
    assert align(["a", "b", "x", "c"], ["a", "b", "c"]) == [0, 1, None, 2]
    assert align(["a", "c"], ["a", "b", "c"]) == [0, 2]
    assert align([], ["a"]) == []


def test_a_plans_signature_is_a_call_again() -> None:
    x, weight = torch.empty(2, 3, 8), torch.empty(8, 5).t()
    call = {"x": x, "weight": weight, "activation": "gelu", "eps": 1e-5, "causal": True, "bias": None}
    again = call_of(signature(opsmith.operator.registry()["linear"], call).partition(" ")[2])
    assert again["x"].shape == x.shape
    assert again["weight"].stride() == weight.stride()
    assert again["weight"].is_meta
    assert (again["activation"], again["eps"], again["causal"]) == ("gelu", 1e-5, True)
    assert "bias" not in again


def test_alike_layers_of_a_deep_model_are_one_row() -> None:
    """Those with the same classes, with the mean of each; all layers are in the sum."""
    rows = [
        Row(kind, "op", "1", layer=f"layers.{i}", seconds=i * 1e-3)
        for i in range(1, 128)
        for kind in ((MATMUL, NORM) if i % 4 else (MATMUL, ATTENTION))
    ]
    printed = io.StringIO()
    Console(file=printed, width=150).print(_layers_table(Phase("forward", 1.0, rows=rows)))
    lines = [line.split() for line in printed.getvalue().splitlines() if "layers." in line]
    assert lines == [
        ["96", "like", "layers.1,", "each", "64.000", "64.000"],
        ["31", "like", "layers.4,", "each", "64.000", "64.000"],
    ]
    printed = io.StringIO()
    Console(file=printed, width=150).print(_layers_table(Phase("forward", 1.0, rows=rows[:16])))
    assert len([line for line in printed.getvalue().splitlines() if "layers." in line]) == 8


def test_the_schema_of_the_page_is_that_of_the_json() -> None:
    written = Path(__file__).parents[2] / "docs/assets/profile.schema.json"
    schema = opsmith.Profile.json_schema()
    assert json.loads(written.read_text()) == schema, (
        f"json.dumps(opsmith.Profile.json_schema(), indent=1) > {written}"
    )
    profile = json.loads(opsmith.Profile("nothing").to_json())
    assert profile.keys() == schema["properties"].keys()


class Keeper(nn.Module):
    """A module whose calls leave something: a cache that is handed in, a buffer, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = Stack(False), 0
        self.register_buffer("seen", torch.zeros(1))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, cache: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen + 1
        if cache is not None:
            x = cache["x"] = torch.cat([cache["x"], x], 1)
        result: torch.Tensor = self.norm(self.layers(x).transpose(1, 2))
        return result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_block_runs_nothing_of_the_callers_twice(mode: Any) -> None:
    model, cache = Keeper(), {"x": torch.randn(2, 16, WIDTH)}
    with mode(), opsmith.profile() as recording:
        model(torch.randn(2, 16, WIDTH), cache)
    assert cache["x"].shape[1] == 32
    assert (model.calls, model.seen.item(), model.norm.num_batches_tracked.item()) == (1, 1.0, 1)
    phase = recording.profile.phases[0]
    assert phase.notes == []
    rows = [r for r in phase.rows if r.operator == "attention"]
    assert all("k 2×4×32×16" in r.shape for r in rows)  # what was run, not what a second call would see
    assert phase.total == pytest.approx(phase.wall, rel=0.02)


def test_a_call_that_cannot_be_copied_is_not_run_again() -> None:
    model = Keeper()
    model.generator = (x for x in ())  # deepcopy refuses it
    with opsmith.profile() as recording:
        model(torch.randn(2, 16, WIDTH))
    assert model.calls == 1
    assert "were not recognized: TypeError: cannot pickle 'generator'" in recording.profile.phases[0].notes[0]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("phase", ["train", "backward", "forward"])
def test_gradients_modes_and_buffers_are_as_they_were(phase: str, fails: bool) -> None:
    class Failing(Keeper):
        def forward(self, *args: Any) -> torch.Tensor:
            result = super().forward(*args)
            if fails and self.calls > 4:
                raise RuntimeError("no luck")
            return result

    model = Failing()
    model.norm.eval()  # one part frozen
    gradients = [torch.ones_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    before = {name: (b, b.clone()) for name, b in model.named_buffers()}
    profile = profiled(model, torch.randn(2, 8, WIDTH), phase=phase)
    assert ("no luck" in profile.partial) is fails
    assert all(p.grad is g and g.eq(1).all() for p, g in zip(model.parameters(), gradients, strict=True))
    for name, buffer in model.named_buffers():
        assert buffer is before[name][0]
        assert torch.equal(buffer, before[name][1])
    assert model.training
    assert not model.norm.training


def test_a_training_step_of_ones_own() -> None:
    model, x = seeded(lambda: Stack(False)).train(), torch.randn(2, 32, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    phase = profiled(step).phases[0]
    rows = {b.name: b for b in bill(phase.rows, "operator")}
    assert {n: rows[n].calls for n in ("rms_norm", "rms_norm backward", "attention")} == {
        "rms_norm": 2,
        "rms_norm backward": 2,
        "attention": 2,
    }
    assert not any("not recognized" in note for note in phase.notes)


def test_a_model_that_looks_at_values_is_read_whole() -> None:
    class Masked(Stack):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(x if mask.all() else x * mask)  # as models of transformers ask of padding

    model, x, mask = seeded(lambda: Masked(False)), torch.randn(2, 32, WIDTH), torch.ones(2, 32, 1)
    phase = profiled(model, x, mask).phases[0]
    assert {b.name: b.calls for b in bill(phase.rows, "operator")}["rms_norm"] == 2
    assert not any("not recognized" in note for note in phase.notes)


def test_one_profile_at_a_time() -> None:
    model, x = Stack(True), torch.randn(2, 8, WIDTH)
    with opsmith.profile() as outer:
        with pytest.raises(RuntimeError, match="another profile is being recorded"), opsmith.profile():
            model(x)
        with pytest.raises(RuntimeError, match="another profile is being recorded"):
            profiled(model, x)
        model(x)
    assert sum(r.calls for r in outer.profile.phases[0].rows if r.operator == "attention") >= 2
    with opsmith.profile():
        model(x)


def test_a_model_without_tokens() -> None:
    """An image has none, and what few operators do says nothing of the whole."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )
    profile = profiled(model.eval(), torch.randn(4, 3, 64, 64))
    assert "token" not in profile.table()
    phase = Phase("forward", 1.0, tokens=8)
    phase.rows = [
        Row(MATMUL, "a", "1", seconds=0.1, least=0.1),
        Row(MATMUL, "b", "1", seconds=0.9, known=False),
    ]
    said = per_token(profile, phase)
    assert "8 tokens/s now" in said
    assert "MFU" not in said
    assert "at the roof" not in said


def test_an_encoder_that_keeps_no_cache_has_no_decode() -> None:
    class Encoding(Keeper):
        def forward(self, input_ids: Any = None, past_key_values: Any = None, use_cache: bool = False) -> Any:
            return SimpleNamespace(past_key_values=None)

    with pytest.raises(ValueError, match="decode needs a model that takes input_ids and past_key_values"):
        opsmith.profile(Encoding(), {"input_ids": torch.zeros(1, 4, dtype=torch.long)}, phase="decode")


def test_decode_needs_a_position_behind_the_example() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with pytest.raises(ValueError, match="the 8 tokens leave decode no position"):
        opsmith.profile(model, {"input_ids": torch.zeros(1, 8, dtype=torch.long)}, phase="decode")


@pytest.mark.parametrize(("threads", "said"), [(1, "1 thread of 1 core,"), (2, "2 threads of 2 cores,")])
def test_one_thread_is_not_called_several(threads: int, said: str) -> None:
    assert said in trust(Profile("model", [], {"threads": threads, "cores": threads}))[0]
