"""Attention on vLLM's KV cache in blocks: decode by `paged_attention`, prefill by `attention_varlen`.

It takes the place of vLLM's own back end for CPUs (`register_backend`), whose classes it derives from: a layer that
opsmith's operators do not serve is left to these, with a line in the log that says why. Both read the same memory,
[blocks, Hkv, block_size, 2 D] of each layer, but not in the same order: vLLM's kernels keep keys in an order of their
own, ours are rows, all keys of a head before its values. So a layer is one's or the other's for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionLayer, AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import AttentionSpec

from opsmith import ops
from opsmith_vllm import choice

logger = init_logger(f"vllm.{__name__}")


class OpsmithAttentionBackend(CPUAttentionBackend):
    """What vLLM asks for attention on a CPU."""

    @staticmethod
    def get_impl_cls() -> type[OpsmithAttentionImpl]:
        return OpsmithAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[OpsmithMetadataBuilder]:
        return OpsmithMetadataBuilder


@dataclass
class Prefill:
    """The sequences of a step that have more than one new token."""

    starts: Tensor  # [sequences + 1], of queries
    key_starts: Tensor  # [sequences + 1]
    # Where the keys that they see lie in the cache, [keys] each; None where all keys are new.
    places: tuple[Tensor, Tensor] | None


@dataclass
class OpsmithMetadata(CPUAttentionMetadata):
    """The sequences of a step: `num_decodes` with one new token each, and those after them."""

    num_decodes: int = 0
    prefill: Prefill | None = None


class OpsmithMetadataBuilder(CPUAttentionMetadataBuilder):
    """Describes a step to the layers of one group."""

    reorder_batch_threshold: int | None = 1  # sequences with one new token come first

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = [*get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()]
        impls = [layer.impl for layer in layers]
        # A layer that reads another one's cache has no keys of its own.
        self.shared = any(impl.kv_sharing_target_layer_name is not None for impl in impls)
        self._choose(layers)
        self.ours = any(impl.refusal is None for impl in impls)
        self.theirs = any(impl.refusal is not None for impl in impls)

    def _choose(self, layers: list[Attention]) -> None:
        """Leave the layers of this group to vLLM where its kernels are faster; nothing is in their cache yet."""
        layer = next((layer for layer in layers if layer.impl.refusal is None), None)
        if layer is None:
            return
        impl, dtype = layer.impl, str(self.dtype).removeprefix("torch.")
        what = f"attention of {impl.num_heads} heads on {impl.num_kv_heads} of {impl.head_size} in {dtype}"
        if impl.sliding_window > 0:
            what += f", window {impl.sliding_window}"
        if not choice.ours(what, lambda: self._cases(layer)):
            for layer in layers:
                layer.impl.refusal = layer.impl.refusal or "it was measured to be faster"

    def _cases(self, layer: Attention) -> Iterator[tuple[choice.Call, choice.Call]]:
        """A step of four sequences that decode, and one of a prompt: vLLM's way and ours."""
        impl, length = layer.impl, min(512, self.vllm_config.model_config.max_model_len)
        for sequences, new in ((4, 1), (1, length)):
            table = torch.arange(sequences * -(-length // self.block_size), dtype=torch.int32)
            starts = torch.arange(sequences + 1, dtype=torch.int32) * new
            cache = torch.zeros(
                len(table), self.num_kv_heads, self.block_size, 2 * self.head_dim, dtype=self.dtype
            )
            step = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.full((sequences,), length, dtype=torch.int32),
                num_reqs=sequences,
                num_actual_tokens=sequences * new,
                max_query_len=new,
                max_seq_len=length,
                block_table_tensor=table.view(sequences, -1),
                slot_mapping=torch.arange(sequences * new),
            )
            q, out = torch.randn(2, sequences * new, impl.num_heads, impl.head_size, dtype=self.dtype)
            k, v = torch.randn(2, sequences * new, impl.num_kv_heads, impl.head_size, dtype=self.dtype)
            given = layer, q, k, v, cache
            own = partial(CPUAttentionBackendImpl.forward, impl, *given, super().build(0, step), out)
            yield own, partial(impl.forward, *given, self._described(step, theirs=False), out)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if not self.ours:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return self._described(common_attn_metadata, self.theirs)

    def _described(self, step: CommonAttentionMetadata, theirs: bool) -> OpsmithMetadata:
        """A step for our layers, and for vLLM's own where there are some in the group."""
        if isinstance(step.causal, Tensor) or not step.causal:
            raise NotImplementedError(
                "opsmith: attention in vLLM is causal, got a step that is not; name parts without it in OPSMITH_VLLM"
            )
        if theirs:
            plain = super().build(0, step)
        else:  # without the plan that vLLM's kernels want
            plain = CPUAttentionMetadata(
                num_actual_tokens=step.num_actual_tokens,
                max_query_len=step.max_query_len,
                query_start_loc=step.query_start_loc,
                max_seq_len=step.max_seq_len,
                seq_lens=step.seq_lens,
                block_table=step.block_table_tensor,
                slot_mapping=step.slot_mapping,
                scheduler_metadata=None,
            )
        decodes, prefills, tokens, _ = split_decodes_and_prefills(step)
        metadata = OpsmithMetadata(**vars(plain), num_decodes=decodes)
        metadata.num_decode_tokens = tokens
        if prefills:
            metadata.prefill = self._prefill(step, decodes)
        return metadata

    def _prefill(self, step: CommonAttentionMetadata, first: int) -> Prefill:
        queries = step.query_start_loc[first : step.num_reqs + 1]
        starts = queries - queries[0]
        lengths = step.seq_lens[first : step.num_reqs]
        if not self.shared and torch.equal(lengths, starts.diff()):
            return Prefill(starts, starts, None)
        old = (lengths - starts.diff()).clamp(min=0)
        # What left all windows may have no block any more.
        unseen = (old - self.window_size + 1).clamp(min=0) if self.window_size > 0 else torch.zeros_like(old)
        counts = lengths - unseen
        key_starts = torch.zeros_like(starts)
        torch.cumsum(counts, 0, out=key_starts[1:])
        sequence = torch.repeat_interleave(torch.arange(len(counts)), counts)  # [keys]
        at = torch.arange(len(sequence)) - key_starts[sequence] + unseen[sequence]
        table = step.block_table_tensor[first : step.num_reqs]
        blocks = table[sequence, at // self.block_size].long()
        return Prefill(starts, key_starts, (blocks, at % self.block_size))


class OpsmithAttentionImpl(CPUAttentionBackendImpl):
    """The attention of one layer."""

    sinks: Tensor | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refusal = self._refusal()
        if self.refusal is not None:
            logger.info_once("opsmith: attention is left to vLLM's own: %s", self.refusal)

    def _refusal(self) -> str | None:
        """Why a layer is left to vLLM, where it is."""
        config = get_current_vllm_config()
        if self.attn_type != AttentionType.DECODER:
            return f"its kind is {self.attn_type}, ours is of decoders"
        if self.is_fp8_kv_cache:
            return f"the KV cache is {self.kv_cache_dtype}, ours has the model's dtype"
        if config.kv_transfer_config is not None:
            return "the KV cache is sent to other processes, which expect it in vLLM's order"
        if config.speculative_config is not None or config.attention_config.use_non_causal:
            return "drafts may be attended to in both directions"
        return None

    def _caches(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as [blocks, block_size, Hkv, D]."""
        blocks, heads, size, _ = kv_cache.shape
        keys, values = kv_cache.view(blocks, heads, 2 * size, self.head_size).transpose(1, 2).chunk(2, 1)
        return keys, values

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if self.refusal is not None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        tokens = slot_mapping.shape[0]
        ops.reshape_and_cache(key[:tokens], value[:tokens], *self._caches(kv_cache), slot_mapping)

    def forward(
        self,
        layer: AttentionLayer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if self.refusal is not None or attn_metadata is None:
            return super().forward(  # type: ignore[no-any-return]
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert isinstance(attn_metadata, OpsmithMetadata)
        step = attn_metadata
        if self.sinks is not None and self.sinks.dtype not in (query.dtype, torch.float32):
            self.sinks = self.sinks.float()
        how: dict[str, Any] = {
            "scale": self.scale,
            "window": self.sliding_window if self.sliding_window > 0 else None,
            "softcap": self.logits_soft_cap or None,
            "sinks": self.sinks,
            "alibi": self.alibi_slopes,
        }
        keys, values = self._caches(kv_cache)
        first, last = step.num_decode_tokens, step.num_actual_tokens
        if count := step.num_decodes:
            table, lengths = step.block_table[:count], step.seq_lens[:count]
            ops.paged_attention(query[:first], keys, values, table, lengths, **how, out=output[:first])
        if step.prefill is not None:
            if step.prefill.places is None:
                keys, values = key[first:last], value[first:last]
            else:
                keys, values = keys[step.prefill.places], values[step.prefill.places]  # [keys, Hkv, D]
            starts = step.prefill.starts, step.prefill.key_starts
            ops.attention_varlen(
                query[first:last], keys, values, *starts, causal=True, **how, out=output[first:last]
            )
        return output


def attention() -> None:
    """Let vLLM find our back end where it looks for that of CPUs."""
    path = f"{OpsmithAttentionBackend.__module__}.{OpsmithAttentionBackend.__qualname__}"
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
