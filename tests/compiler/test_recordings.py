"""Recorded calls give what the calls themselves give, whatever moves between them; a stand-in takes the GPU's place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

import opsmith
from opsmith.compiler.modules.paged import Paged
from opsmith.compiler.program import graph as graphs
from opsmith.compiler.program.recordings import Recordings, current, gpu_of
from opsmith.decoding.cache import paged
from opsmith.kernels import triton
from tests.compiler.models import TINY, UNTIMED, ids, seeded

Run = Callable[[Any], Any]


class Rerun:
    """A GPU as far as a recording can tell: a replay computes again, from where that read to where that wrote."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def capturing(self) -> bool:
        return False

    def turn(self) -> Any:
        return nullcontext()

    def record(self, body: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        found = body()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            with torch.no_grad(), triton.asked_later():
                results, reports = body()
                for own, new in zip([*found[0], found[1]], [*results, reports], strict=True):
                    if isinstance(own, torch.Tensor):
                        own.copy_(new)

        return replay, found


@pytest.fixture
def gpu() -> Rerun:
    return Rerun()


def recordings(gpu: Rerun, *looked: int) -> Recordings:
    return Recordings(looked, gpu)  # type: ignore[arg-type]


def double(args: Any) -> Any:
    return (args[0] * 2 + args[1],)


def test_the_second_call_is_recorded_and_the_third_replayed(gpu: Rerun) -> None:
    calls, weight = recordings(gpu, 0, 1), torch.ones(3)
    for n in range(5):
        (found,) = calls((3,), double, [torch.full((3,), float(n)), weight])
        assert found.tolist() == [2.0 * n + 1] * 3
    assert (gpu.recorded, gpu.replayed) == (1, 4)


def test_results_of_one_replay_outlive_the_next(gpu: Rerun) -> None:
    calls, weight = recordings(gpu, 0, 1), torch.zeros(2)
    kept = [calls((), double, [torch.full((2,), float(n)), weight])[0] for n in range(4)]
    assert [k[0].item() for k in kept] == [0.0, 2.0, 4.0, 6.0]


def test_what_stays_is_read_where_it_lies_and_recorded_anew_where_it_moves(gpu: Rerun) -> None:
    calls, x, weight = recordings(gpu, 0, 1), torch.ones(2), torch.zeros(2)
    for _ in range(3):
        calls((), double, [x, weight])
    weight.fill_(5.0)
    assert calls((), double, [x, weight])[0].tolist() == [7.0, 7.0]
    assert calls((), double, [x, torch.full((2,), 9.0)])[0].tolist() == [11.0, 11.0]
    assert calls((), double, [x, torch.full((2,), 8.0)])[0].tolist() == [10.0, 10.0]
    assert gpu.recorded == 2


def test_an_expanded_input_is_copied_once_and_another_layout_recorded_anew(gpu: Rerun) -> None:
    calls, weight = recordings(gpu, 0, 1), torch.zeros(2, 3)
    for n in range(4):
        x = torch.full((1, 3), float(n)).expand(2, 3)
        assert calls((), double, [x, weight])[0].tolist() == [[2.0 * n] * 3] * 2
    x = torch.arange(6.0).view(2, 3)
    assert calls((), double, [x, weight])[0].tolist() == (2 * x).tolist()
    assert gpu.recorded == 2


def test_sizes_have_recordings_of_their_own(gpu: Rerun) -> None:
    calls = recordings(gpu, 0, 1)
    for n in (2, 3, 2, 3, 2, 3):
        assert calls((n,), double, [torch.ones(n), torch.zeros(n)])[0].tolist() == [2.0] * n
    assert (gpu.recorded, gpu.replayed) == (2, 4)


def test_the_oldest_give_way_to_the_results_of_others(gpu: Rerun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opsmith.compiler.program.recordings.MAX_BYTES", 3 * 8 * 4)
    calls = recordings(gpu, 0, 1)
    for n in (1, 2, 3, 4):
        for _ in range(2):
            calls((n,), double, [torch.ones(8), torch.zeros(8)])
    assert gpu.recorded == 4
    for n, anew in ((4, 0), (2, 0), (1, 0), (1, 1)):
        before = gpu.recorded
        calls((n,), double, [torch.ones(8), torch.zeros(8)])
        assert gpu.recorded - before == anew


def test_forgotten_ones_are_recorded_anew(gpu: Rerun) -> None:
    calls, args = recordings(gpu, 0, 1), [torch.ones(2), torch.zeros(2)]
    for _ in range(3):
        calls((), double, args)
    calls.clear()
    assert calls((), lambda args: (args[0] * 3,), args)[0].tolist() == [3.0, 3.0]


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda args: (args[0],), "share memory"),
        (lambda args: (args[1] + 1,) * 2, "share memory"),
        (lambda args: args[0] * 2, "no tuple"),
    ],
)
def test_what_cannot_be_replayed_runs_as_it_is(gpu: Rerun, run: Run, why: str) -> None:
    calls, args = recordings(gpu, 0, 1), [torch.ones(2), torch.zeros(2)]
    for _ in range(3):
        found, wanted = calls((), run, args), run(args)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert why in calls.why
    assert gpu.replayed == 0


def test_an_error_of_the_call_is_the_calls_own(gpu: Rerun) -> None:
    calls, args, broken = recordings(gpu, 0), [torch.ones(2)], [False]

    def run(args: Any) -> Any:
        if broken[0]:
            raise ValueError("no")
        return (args[0] + 1,)

    calls((), run, args)
    broken[0] = True
    with pytest.raises(ValueError, match="no"):
        calls((), run, args)


def test_what_kernels_report_is_looked_at_behind_a_replay(gpu: Rerun) -> None:
    def run(args: Any) -> Any:
        bad = torch.where(args[0] < 3, 1, 0)

        def look(at: int) -> None:
            if not at:
                raise RuntimeError("out of range")

        if triton.later.asked is not None:
            triton.later.asked.append((bad, look))
        return (args[0] + 1,)

    calls = recordings(gpu, 0)
    for n in (0, 1, 2):
        assert calls((), run, [torch.tensor([n])])[0].item() == n + 1
    with pytest.raises(RuntimeError, match="out of range"):
        calls((), run, [torch.tensor([3])])
    assert calls((), run, [torch.tensor([2])])[0].item() == 3


def test_a_graph_is_recorded_where_all_of_it_lies_on_one_gpu() -> None:
    def on(*names: str) -> Any:
        return [SimpleNamespace(device=torch.device(name)) for name in names]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("opsmith.compiler.program.recordings.Tensor", SimpleNamespace)
        assert gpu_of([3, *on("cuda:1", "cuda:1")]) == torch.device("cuda:1")
        assert gpu_of(on("cuda:0", "cuda:1")) is None
        assert gpu_of(on("cuda:0", "cpu")) is None
        assert gpu_of(on("cpu")) is None
        assert gpu_of([3]) is None
    with current(None):  # changes nothing
        assert gpu_of([torch.ones(2)]) is None


LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
}


@contextmanager
def instead(gpu: Rerun, patch: pytest.MonkeyPatch) -> Iterator[None]:
    with patch.context() as m:
        m.setattr(graphs, "gpu_of", lambda examples: torch.device("cpu"))
        m.setattr(graphs, "current", lambda gpu: nullcontext())
        m.setattr(graphs, "Recordings", lambda looked: recordings(gpu, *looked))
        yield


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_tokens_of_a_recorded_model_are_its_own(
    name: str, gpu: Rerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = TINY | {"eos_token_id": None} | (LATENT if name == "deepseek_v3" else {"num_hidden_layers": 2})
    eager = seeded(lambda: AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes)))
    with torch.no_grad():
        for weight in eager.parameters():
            if weight.dim() > 1:
                weight.mul_(3)
    with instead(gpu, monkeypatch):
        ours = opsmith.optimize(copy.deepcopy(eager), config=UNTIMED)
        # Behind other caches, another prompt, and more tokens than the first piece of a table has room for.
        for batch, length, new in ((1, 5, 12), (1, 9, 6), (2, 4, 150)):
            prompt = ids(batch, length)
            options = {"max_new_tokens": new, "do_sample": False, "use_cache": True}
            assert torch.equal(ours.generate(prompt, **options), eager.generate(prompt, **options))
    assert gpu.replayed > 100


def test_a_cache_that_is_gone_leaves_its_memory_to_the_next() -> None:
    kept = Paged(opsmith.Config())

    def cache() -> Any:
        layers = paged([DynamicLayer(), DynamicSlidingWindowLayer(sliding_window=4), DynamicLayer()], 16)
        kept._reuse(layers)
        for layer in layers:
            if layer.pool is None:
                layer.lazy_initialization(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
        return layers, [layer.pool for layer in layers]

    layers, pools = cache()
    others, elsewhere = cache()  # while the first is there
    assert not set(map(id, pools)) & set(map(id, elsewhere))
    del layers
    again, found = cache()
    assert list(map(id, found)) == list(map(id, pools))
    del others, again
    assert list(map(id, cache()[1])) == list(map(id, pools))
