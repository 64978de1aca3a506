"""The attention back end, step by step, beside vLLM's own on the same numbers, and float64."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

from opsmith import ops
from opsmith.operator import Tolerance
from opsmith_vllm.attention import OpsmithAttentionImpl, OpsmithMetadataBuilder

SIZE, BLOCKS, HEADS, KV_HEADS, DIM = 32, 24, 4, 2, 64
# (tokens before, new ones) of each sequence: prompts; two that decode, one that goes on with its prompt, and a new one.
STEPS = [
    [(0, 7), (0, 33), (0, 40)],
    [(7, 1), (33, 1), (40, 25), (0, 12)],
    [(8, 1), (34, 1), (65, 1), (12, 1)],
]


@dataclass
class Way:
    """One of two ways to do the same."""

    builder: Any
    impl: Any
    cache: torch.Tensor

    def step(self, layer: Any, q: Any, k: Any, v: Any, step: CommonAttentionMetadata) -> torch.Tensor:
        self.impl.do_kv_cache_update(layer, k, v, self.cache, step.slot_mapping)
        out = torch.full_like(q, torch.nan)
        return self.impl.forward(layer, q, k, v, self.cache, self.builder.build(0, step), out)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def config(request: pytest.FixtureRequest, llama: Path, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    monkeypatch.setenv("OPSMITH_VLLM", "attention")
    args = EngineArgs(model=str(llama), dtype=request.param, block_size=SIZE, skip_tokenizer_init=True)
    return args.create_engine_config()


LIMITS = [(window, softcap) for window, softcap in product((None, 16), (None, 5.0))]


@pytest.mark.parametrize(("window", "softcap"), LIMITS)
@pytest.mark.parametrize("more", ["nothing", "sinks", "alibi"])
def test_steps(config: VllmConfig, window: int | None, softcap: float | None, more: str) -> None:
    torch.manual_seed(0)
    dtype, scale = config.model_config.dtype, 0.1
    sinks = torch.randn(HEADS).to(dtype) if more == "sinks" else None
    slopes = [0.5**i for i in range(HEADS)] if more == "alibi" else None
    name = "layers.0.attn"
    with set_current_vllm_config(config):
        extra = {"sinks": sinks} if sinks is not None else {}
        layer: Any = Attention(
            HEADS,
            DIM,
            scale,
            KV_HEADS,
            alibi_slopes=slopes,
            logits_soft_cap=softcap,
            per_layer_sliding_window=window,
            cache_config=config.cache_config,
            prefix=name,
            **extra,
        )
        assert type(layer.impl) is OpsmithAttentionImpl
        spec = layer.get_kv_cache_spec(config)
        shape = BLOCKS, KV_HEADS, SIZE, 2 * DIM
        given = HEADS, DIM, scale, KV_HEADS, slopes, window, "auto", softcap
        cpu = torch.device("cpu")
        ours, own = (
            Way(builder(spec, [name], config, cpu), impl, torch.zeros(shape, dtype=dtype))
            for builder, impl in (
                (OpsmithMetadataBuilder, layer.impl),
                (CPUAttentionMetadataBuilder, CPUAttentionBackendImpl(*given, **extra)),
            )
        )
    past = [torch.zeros(2, 0, KV_HEADS, DIM, dtype=dtype) for _ in STEPS[-1]]
    table = torch.randperm(BLOCKS).int().view(4, -1)
    how = {
        "scale": scale,
        "window": window,
        "softcap": softcap,
        "sinks": None if sinks is None else sinks.double(),
        "alibi": None if slopes is None else torch.tensor(slopes, dtype=torch.float64),
    }
    for sequences in STEPS:
        step = described(sequences, table)
        tokens = step.num_actual_tokens
        q = torch.randn(tokens, HEADS, DIM).to(dtype)
        kv = torch.randn(2, tokens, KV_HEADS, DIM).to(dtype)
        exact = []
        for i, ((_, new), start) in enumerate(zip(sequences, step.query_start_loc.tolist(), strict=False)):
            past[i] = torch.cat([past[i], kv[:, start : start + new]], 1)
            starts = torch.tensor([0, new]), torch.tensor([0, past[i].shape[1]])
            k, v = past[i].double()
            exact.append(
                ops.attention_varlen(q[start : start + new].double(), k, v, *starts, causal=True, **how)
            )
        got, eager = (way.step(layer, q, *kv, step) for way in (ours, own))
        verdict = Tolerance().check(got, eager, torch.cat(exact))
        assert verdict.ok, (sequences, verdict)
        # Both mean the same: what vLLM's own is allowed beyond ours is rounding.
        assert Tolerance(factor=8, ulps=8).check(eager, got, torch.cat(exact)).ok


def described(sequences: list[tuple[int, int]], table: torch.Tensor) -> CommonAttentionMetadata:
    """A step as vLLM describes it."""
    new = torch.tensor([count for _, count in sequences])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), new.cumsum(0)]).int()
    lengths = torch.tensor([sum(both) for both in sequences], dtype=torch.int32)
    places = [(i, before + j) for i, (before, count) in enumerate(sequences) for j in range(count)]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(sequences),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(new.max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=table[: len(sequences)],
        slot_mapping=torch.tensor([int(table[i, at // SIZE]) * SIZE + at % SIZE for i, at in places]),
    )


def test_a_step_that_is_not_causal_is_refused(config: VllmConfig) -> None:
    with set_current_vllm_config(config):
        layer: Any = Attention(
            HEADS, DIM, 0.1, KV_HEADS, cache_config=config.cache_config, prefix="layers.1.attn"
        )
        spec = layer.get_kv_cache_spec(config)
        builder = OpsmithMetadataBuilder(spec, ["layers.1.attn"], config, torch.device("cpu"))
    step = described([(0, 3)], torch.zeros(1, 1, dtype=torch.int32))
    step.causal = False
    with pytest.raises(NotImplementedError, match="causal, got a step that is not"):
        builder.build(0, step)
