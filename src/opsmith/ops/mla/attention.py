"""Attention in the latent space of an MLACache: every cached row serves all heads, as key and as value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import Maybe, check_fit, check_float, check_number
from opsmith.call.dispatch import native, needs_grad, uncast
from opsmith.call.layouts import dense_rows, nbytes
from opsmith.kernels import libraries
from opsmith.kernels.triton import DEVICE
from opsmith.operator import Cost, Make, Sample
from opsmith.ops.mla.cache import MLACache, check_cache_type, shapes
from opsmith.ops.mla.call import in_float32
from opsmith.ops.mla.cards import card
from opsmith.ops.mla.check import check_inference
from opsmith.ops.mla.names import either_name
from opsmith.ops.paged_attention.samples import rows_of_tables
from opsmith.ops.pages import check_pages, has_values
from opsmith.ops.rms_norm.quant import wide


@either_name
def mla_attention(
    q_out: Tensor,
    q_rope: Tensor | None,
    cache: MLACache,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    wuv: Tensor | None = None,
    ctkv_scale: Tensor | float | None = None,
    q_nope_scale: Tensor | None = None,
) -> Tensor:
    """Attend to cached latent rows, then up-project what comes out: no key or value of any head is ever made.

    `p = softmax(scale * (q_out @ k_nope.T + q_rope @ k_rope.T))`; `latent = p @ k_nope`; `y = latent @ wuv.T` for each
    head. The T tokens are the last T/S of each of S sequences, in order, and see what came before them and themselves.

    >>> cache = MLACache.allocate("split", 2, 16, kv_lora=32, rope=8, dtype=torch.float32)
    >>> q_out, q_rope = torch.randn(1, 4, 32), torch.randn(1, 4, 8)
    >>> tables, lens = torch.tensor([[1, 0]]), torch.tensor([20])     # 16 tokens in block 1, 4 in block 0
    >>> mla_attention(q_out, q_rope, cache, tables, lens, scale=24**-0.5, wuv=torch.randn(4, 16, 32)).shape
    torch.Size([1, 4, 16])

    Args:
        q_out, q_rope: as `mla_preprocess` returns them for this cache; q_rope is None in mode "joint".
        cache: whose slots hold the rows of all tokens up to the lengths.
        block_tables: [S, n] int32 or int64: each sequence's blocks in order; what lies past its length is not read.
        seq_lens: [S] int32 or int64, how many rows each sequence has, with the new tokens'. 0: the result is zeros.
        scale: of the scores: (nope + rope)^-0.5, times what YaRN adds.
        wuv: [H, v, kv_lora], the up-projection of values; None: the latent result.
        ctkv_scale, q_nope_scale: of an int8 cache; by default those of the last `mla_preprocess` into it.

    Returns:
        [T, H, v], or [T, H, kv_lora] without wuv.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape, device, a block or a length outside the cache.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024.
    """
    op = "mla_attention"
    check_cache_type(op, cache)
    nope, rotated = _queries(op, q_out, q_rope, cache, wuv)
    if cache.mode == "int8_tiled":
        ctkv_scale = cache.ctkv_scale if ctkv_scale is None else ctkv_scale
        q_nope_scale = cache.q_nope_scale if q_nope_scale is None else q_nope_scale
        check_inference(op, rotated, wuv)
    scales = cache.check_scales(op, ctkv_scale, q_out.shape[1], q_nope_scale)
    check_number(op, "scale", scale)
    call = nope, rotated, cache, block_tables, seq_lens, scale, wuv, *scales
    by_kernel = native(rotated, op) is True and not needs_grad(nope, rotated, cache.latent, cache.rope, wuv)
    # The kernel looks at every length and block before it reads, so that a look from here would only cost time.
    looks = by_kernel and nope.is_cpu and DEVICE != "cpu"
    _check_tables(op, block_tables, seq_lens, q_out.shape[0], cache)
    pages = block_tables, seq_lens, cache.blocks, cache.block_size
    if not looks:
        check_pages(op, *pages)
    if not by_kernel:
        with uncast(rotated):
            return define(*call)
    try:
        return _kernel(*call)
    except RuntimeError:
        check_pages(op, *pages)  # names what is wrong
        raise


def _kernel(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: MLACache,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    wuv: Maybe,
    *scales: Maybe,
) -> Tensor:
    tokens, heads, kv_lora = q_nope.shape
    result = q_rope.new_empty(q_nope.shape)
    out = None if wuv is None else q_rope.new_empty((tokens, heads, wuv.shape[1]))
    torch.ops.opsmith.mla_attention.default(
        dense_rows(q_nope),
        dense_rows(q_rope),
        *cache.rows(kv_lora),
        block_tables,
        seq_lens,
        scale,
        *map(in_float32, scales),
        None if wuv is None else wuv.contiguous(),
        latent_out=result,
        out=out,
    )
    return result if out is None else out


def define(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: MLACache,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    wuv: Maybe = None,
    ctkv_scale: Maybe = None,
    q_nope_scale: Maybe = None,
) -> Tensor:
    """The definition, in plain PyTorch, on all rows of the longest table at once."""
    (tokens, heads, kv_lora), device = q_nope.shape, q_nope.device
    sequences, pages = block_tables.shape
    each = tokens // sequences if sequences else 0
    if not q_nope.numel() or not cache.blocks or not pages:
        latent = q_rope.new_zeros((tokens, heads, kv_lora))
    else:
        size = cache.block_size
        length, lens = pages * size, seq_lens.view(-1, 1)
        position = torch.arange(length, device=device)
        last = lens - each + torch.arange(each, device=device)
        hidden = (position > last.unsqueeze(-1)).unsqueeze(2)  # [S, each, 1, length]
        held = (position < lens).unsqueeze(-1)
        blocks = torch.where(position[::size] < lens, block_tables, 0).long()
        nope, rope = (
            torch.where(held, wide(view[blocks]).reshape(sequences, length, -1), 0.0)
            for view in cache.rows(kv_lora)
        )
        q = wide(q_nope)
        if ctkv_scale is not None and q_nope_scale is not None:
            nope, q = nope * ctkv_scale, q / q_nope_scale.view(-1, 1)
        by_sequence = (sequences, each, heads, -1)
        scores = torch.einsum("sehk,slk->sehl", q.reshape(by_sequence), nope)
        scores = scores + torch.einsum("sehr,slr->sehl", wide(q_rope).reshape(by_sequence), rope)
        weights = torch.softmax((scores * scale).masked_fill(hidden, -math.inf), -1)
        weights = weights.masked_fill(hidden, 0.0)  # a token that sees nothing gets zeros
        latent = torch.einsum("sehl,slk->sehk", weights, nope).reshape(tokens, heads, kv_lora)
        latent = latent.to(q_rope.dtype)
    if wuv is None:
        return latent
    return torch.einsum("thk,hvk->thv", latent, wuv).clone(memory_format=torch.contiguous_format)


def _queries(op: str, q_out: Any, q_rope: Any, cache: MLACache, wuv: Any) -> tuple[Tensor, Tensor]:
    """Refuse queries that do not fit the cache; their two parts."""
    if not isinstance(q_out, Tensor) or q_out.dim() != 3:
        got = tuple(q_out.shape) if isinstance(q_out, Tensor) else type(q_out).__name__
        raise ValueError(f"{op}: q_out must be a tensor [T, H, kv_lora], got {got}")
    if cache.mode == "joint":
        if q_rope is not None:
            raise ValueError(
                f'{op}: in mode "joint" q_rope lies within q_out [T, H, kv_lora + rope]; pass None'
            )
        check_float(op, q_out, "q_out")
        kv_lora = cache.kv_lora
        if kv_lora is None and isinstance(wuv, Tensor) and wuv.dim() == 3:
            kv_lora = wuv.shape[2]
        if kv_lora is None:
            raise ValueError(
                f'{op}: nothing tells kv_lora from rope in this "joint" cache; pass wuv, or set cache.kv_lora'
            )
        if q_out.shape[2] < kv_lora:
            raise ValueError(f"{op}: q_out must be [T, H, {kv_lora} + rope], got {tuple(q_out.shape)}")
        nope, rotated = q_out[..., :kv_lora], q_out[..., kv_lora:]
    else:
        nope, rotated = q_out, q_rope
    held = torch.int8 if cache.mode == "int8_tiled" else None
    values = () if wuv is None else (("wuv", wuv, "H v kv_lora"),)
    check_fit(op, ("q_rope", rotated, "T H rope"), ("q_out", nope, "T H kv_lora", held), *values)
    width = cache.rope_width(op, nope.shape[2])
    if rotated.shape[2] != width:
        raise ValueError(f"{op}: q_rope must be [T, H, {width}] for this cache, got {tuple(rotated.shape)}")
    cache.check(op, nope.shape[2], width, rotated)
    return nope, rotated


def _check_tables(op: str, block_tables: Any, seq_lens: Any, tokens: int, cache: MLACache) -> None:
    """Refuse tables and lengths that are not for this cache and as many tokens, whatever their numbers."""
    pages = ("block_tables", block_tables, "S n"), ("seq_lens", seq_lens, "S")
    cached = "the cache", cache.latent if cache.rope is None else cache.rope, "blocks a b c"
    check_fit(op, cached, *((*page, torch.int64, torch.int32) for page in pages))
    sequences = seq_lens.shape[0]
    if tokens % sequences if sequences else tokens:
        raise ValueError(f"{op}: {tokens} tokens cannot be shared out evenly among {sequences} sequences")


def attention_form(
    q_out: Tensor,
    q_rope: Maybe,
    latent: Tensor,
    rope: Maybe,
    block_tables: Tensor,
    seq_lens: Tensor,
    wuv: Maybe = None,
    *,
    mode: str,
    scale: float,
    defined: bool = False,
) -> Tensor:
    """`mla_attention` over a cache that is given as its tensors; `defined`: in plain PyTorch."""
    try:
        cache = MLACache(mode, latent, rope)
    except (TypeError, ValueError) as refusal:
        raise ValueError(f"mla_attention: {refusal}") from None
    if not defined:
        return mla_attention(q_out, q_rope, cache, block_tables, seq_lens, scale=scale, wuv=wuv)
    if q_rope is None:
        assert wuv is not None
        q_out, q_rope = q_out[..., : wuv.shape[2]], q_out[..., wuv.shape[2] :]
    return define(q_out, q_rope, cache, block_tables, seq_lens, scale, wuv)


def _cost(
    q_nope: Tensor,
    q_rope: Maybe,
    latent: Tensor,
    rope: Maybe,
    block_tables: Tensor,
    seq_lens: Tensor,
    wuv: Maybe = None,
    **rest: Any,
) -> Cost:
    """Latent rows once for all heads, as the tables say where lengths have no values; then the up-projection."""
    tokens, heads, width = q_nope.shape
    like = q_nope if q_rope is None else q_rope  # one is in the other in mode "joint"
    kv_lora = width if wuv is None else wuv.shape[2]
    turned = width - kv_lora if q_rope is None else q_rope.shape[2]
    rows = int(seq_lens.sum()) if has_values(seq_lens) else rows_of_tables(block_tables, latent.shape[1])
    row = kv_lora * latent.element_size() + turned * like.element_size()
    written = tokens * heads * (kv_lora if wuv is None else wuv.shape[1]) * like.element_size()
    products = heads * (tokens // max(1, len(seq_lens))) * rows * (2 * kv_lora + turned)
    products += 0 if wuv is None else tokens * wuv.numel()
    return Cost(2.0 * products, rows * row + nbytes(q_nope, q_rope, block_tables, seq_lens, wuv) + written)


def _samples(make: Make) -> Iterator[Sample]:
    def sample(
        name: str,
        lens: list[int],
        each: int = 1,
        heads: int = 3,
        kv_lora: int = 32,
        rope: int = 16,
        size: int = 16,
        mode: str = "split",
        values: int | None = 10,
        strided: bool = False,
    ) -> Sample:
        pages = max(1, -(-max(lens, default=0) // size))
        blocks = pages * max(1, len(lens)) + 1
        held = [
            None if s is None else make(2 * s[0], *s[1:])[::2] if strided else make(*s)
            for s in shapes(mode, blocks, size, kv_lora, rope)
        ]
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(5))[: pages * len(lens)]
        tables = order.view(len(lens), pages).to(make.device)
        tokens = each * len(lens)
        parts = [make(tokens, heads, kv_lora), make(tokens, heads, rope)]
        queries = [torch.cat(parts, -1), None] if mode == "joint" else parts
        wuv = None if values is None else make(heads, values, kv_lora, scale=kv_lora**-0.5)
        args = (*queries, *held, tables, torch.tensor(lens, dtype=torch.int64, device=make.device), wuv)
        return Sample(name, args, {"mode": mode, "scale": 0.125})

    yield sample("one sequence", [33])
    yield sample("two sequences", [5, 33])
    yield sample("four sequences", [16, 40, 1, 90])
    yield sample("joint", [5, 33], mode="joint")
    for lens in ([5, 70], [9, 30, 31], [40, 2, 3, 20]):
        yield sample(f"tiled, {len(lens)} sequences", lens, mode="tiled", rope=32)
    yield sample("latent result", [9, 21], values=None, kv_lora=19, rope=6)
    yield sample("several tokens", [9, 30], each=4)
    yield sample("prefill", [37], each=37)
    yield sample("blocks of one", [7, 3], size=1)
    yield sample("many heads", [50], heads=17)
    yield sample("strided pool", [5, 33], strided=True)
    yield sample("nothing to see", [0, 3])
    yield sample("empty", [])


def _workloads(make: Make) -> Iterator[Sample]:
    for tokens in (4096, 512):
        pages = tokens // 128
        cache = make(pages, 128, 1, 512), make(pages, 128, 1, 64)
        tables = torch.arange(pages, device=make.device).view(1, -1)
        q = make(1, 128, 512), make(1, 128, 64)
        lens = torch.tensor([tokens], device=make.device)
        wuv = make(128, 128, 512, scale=512**-0.5)
        yield Sample(
            f"V3, {tokens} keys", (*q, *cache, tables, lens, wuv), {"mode": "split", "scale": 192**-0.5}
        )


CARD = card(
    "mla_attention",
    attention_form,
    cost=_cost,
    samples=_samples,
    workloads=_workloads,
    entries={"mla_attention": _cost},
    schemas=(
        "mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor rope, Tensor block_tables, "
        "Tensor seq_lens, float scale, Tensor? ctkv_scale, Tensor? q_nope_scale, Tensor? wuv, *, "
        "Tensor(a!) latent_out, Tensor(b!)? out=None) -> ()",
    ),
)

libraries.offer("mla", "mla_attention")
