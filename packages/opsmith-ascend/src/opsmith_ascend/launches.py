"""What a call of each operator becomes on an NPU: a launch of `kernels/STEM.cpp` with the tensors that it gets.

A function here has its operator's parameters and the kernel's name, and leaves the operator's checks to its callers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from opsmith_ascend import SOURCES
from opsmith_ascend.emulation import CORES, Emulation, emulate

__all__ = [
    "Launch",
    "layer_norm",
    "mla_kv_epilogue",
    "mla_q_epilogue",
    "quantized_embedding",
    "rms_norm",
    "rms_norm_quant",
    "rope",
    "silu_mul",
    "softmax",
]


@dataclass(frozen=True)
class Launch:
    """A call of the kernel `STEM.cpp`, on contiguous tensors; a function of this file makes it."""

    stem: str
    inputs: Mapping[str, Tensor | None]
    outputs: Mapping[str, Tensor | None]
    sizes: tuple[int | float, ...]
    result: Any  # what the operator returns: outputs, or views of them
    types: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        """The kernel file."""
        return SOURCES / f"{self.stem}.cpp"

    @property
    def empty(self) -> bool:
        """True where there is nothing to compute: then no kernel is launched."""
        return not any(t.numel() for t in self.outputs.values() if t is not None)

    def emulated(self, cores: int = CORES) -> Emulation | None:
        """Fill the outputs in emulation; None where there was nothing to do.

        Raises:
            EmulationError, BuildError: see `emulate`.
        """
        if self.empty:
            return None
        return emulate(self.source, self.inputs, self.outputs, self.sizes, cores=cores, types=self.types)


def dense(t: Tensor | None) -> Tensor | None:
    """The tensor without gaps."""
    return None if t is None else t.contiguous()


def like(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The vectors without gaps and in one type: float32 where they differ."""
    types = {t.dtype for t in vectors if t is not None}
    return tuple(dense(t if t is None or len(types) == 1 else t.float()) for t in vectors)


def number(value: Tensor | float, device: torch.device) -> Tensor:
    """A number as a tensor of one element, in float32."""
    return torch.as_tensor(value, dtype=torch.float32, device=device).reshape(1)


def span(t: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last, gaps included, as one vector."""
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((1 + last if t.numel() else 0,), (1,))


def silu_mul(gate: Tensor, up: Tensor | None = None) -> Launch:
    """The call that `opsmith.ops.silu_mul` makes."""
    columns = gate.shape[-1]
    gate = gate.contiguous()
    if up is None:
        columns //= 2
        y = gate.new_empty(*gate.shape[:-1], columns)
        sizes = (y.numel() // max(columns, 1), columns, 1)
    else:
        up, y = up.contiguous(), torch.empty_like(gate)
        sizes = (1, y.numel(), 0)
    return Launch("silu_mul", {"gate": gate, "up": up}, {"y": y}, (*sizes, gate.element_size()), y)


def _norm(
    stem: str,
    x: Tensor,
    residual: Tensor | None,
    vectors: dict[str, Tensor | None],
    *options: float,
    types: Mapping[str, str] | None = None,
) -> Launch:
    x, residual = x.contiguous(), dense(residual)
    y = torch.empty_like(x)
    summed = None if residual is None else torch.empty_like(x)
    columns, given = x.shape[-1], [t is not None for t in (residual, *vectors.values())]
    width = max({t.element_size() for t in vectors.values() if t is not None} or {x.element_size()})
    return Launch(
        stem,
        {"x": x, "residual": residual, **vectors},
        {"y": y, "summed": summed},
        (x.numel() // max(columns, 1), columns, x.element_size(), width, *given, *options),
        y if summed is None else (y, summed),
        types or {},
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    residual: Tensor | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
) -> Launch:
    """The call that `opsmith.ops.rms_norm` makes."""
    return _norm("rms_norm", x, residual, {"weight": dense(weight)}, eps, weight_offset, round_before_weight)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.layer_norm` makes."""
    weight, bias = like(weight, bias)
    types = {} if weight is not None or bias is None else {"weight": "DTYPE_BIAS"}
    return _norm("layer_norm", x, residual, {"weight": weight, "bias": bias}, eps, types=types)


def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: Tensor | float | None = None,
    offset: Tensor | float | None = None,
) -> Launch:
    """The call that `opsmith.ops.rms_norm_quant` makes."""
    x = x.contiguous()
    columns, fixed = x.shape[-1], scale is not None
    rows = x.numel() // max(columns, 1)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    s = torch.empty(0 if fixed else x.shape[:-1], dtype=torch.float32, device=x.device)
    step, shift = (number(0.0 if v is None else v, x.device) if fixed else None for v in (scale, offset))
    weight, bias = dense(weight), dense(bias)
    sizes = (rows, columns, columns, x.element_size(), weight is not None, bias is not None, fixed, eps)
    return Launch(
        "rms_norm_quant",
        {"x": x, "weight": weight, "bias": bias, "scale": step, "offset": shift},
        {"q": q, "s": s},
        sizes,
        q if fixed else (q, s),
    )


def softmax(
    x: Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    method: str = "auto",
) -> Launch:
    """The call that `opsmith.ops.softmax` makes, along the last dimension.

    A boolean mask is made additive first; an additive one must be of x's type.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill_(~mask, -math.inf)
        if x.dim() > 4:  # more leading dimensions than the kernel finds its way in
            mask = mask.expand(x.shape)
    # [outer, middle, inner, columns]
    shape = (1, 1, 1, *x.shape)[-4:] if x.dim() <= 4 else (x.shape[:-2].numel(), 1, *x.shape[-2:])
    columns = x.shape[-1]
    strides = (0, 0, 0)
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], columns).contiguous()  # each of its rows is whole
        spread = mask.expand(x.shape).view(shape)
        steps = [s if n > 1 else 0 for s, n in zip(spread.stride(), spread.shape, strict=True)]
        strides = (steps[0], steps[1], steps[2])
    return Launch(
        "softmax",
        {"x": x, "mask": mask},
        {"y": y},
        (
            *(x.numel() // max(columns, 1), *shape[1:], x.element_size()),
            *(mask is not None, *strides, causal, method == "fast", scale),
        ),
        y,
    )


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    positions: Tensor | None = None,
    rotary_dim: int | None = None,
    out: Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.rope` makes; with `out=x`, x without gaps, in place.

    Raises:
        ValueError: a position has no row in the tables; the kernel does not look.
    """
    x = x.contiguous()
    y = torch.empty_like(x) if out is None else out
    dims = x.shape[-1] if rotary_dim is None else rotary_dim
    if positions is not None and cos.dim() == 3:
        cos, sin = cos[0], sin[0]  # each token names its row
    cos, sin = cos.contiguous(), sin.contiguous()
    if x.dim() == 3:
        batches, (tokens, heads, width) = 1, x.shape
        strides = (x.numel(), width, heads * width)
    else:
        batches, heads, tokens, width = x.shape
        strides = (heads * tokens * width, tokens * width, width)
    if positions is not None:
        positions = positions.contiguous()
        if positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < cos.shape[-2]:
            raise ValueError(f"rope: positions must lie in [0, {cos.shape[-2]}), the rows of cos and sin")
    table_stride = cos.shape[-2] * cos.shape[-1] if cos.dim() == 3 and cos.shape[0] > 1 else 0
    position_stride = tokens if positions is not None and positions.numel() > tokens else 0
    if batches > 1 and not table_stride and not position_stride:
        # Every batch uses the same rows of the tables: its heads are but more heads.
        batches, heads = 1, batches * heads
    return Launch(
        "rope",
        {"x": x, "cos": cos, "sin": sin, "positions": positions},
        {"y": y},
        (
            *(batches, heads, tokens, width, dims, cos.shape[-1]),
            *strides,
            *(table_stride, position_stride, interleaved, positions is not None),
            *(x.element_size(), cos.element_size()),
        ),
        y,
        {} if positions is not None else {"positions": "int32_t"},
    )


def quantized_embedding(
    ids: Tensor,
    table: Tensor,
    scale: Tensor,
    *,
    dtype: torch.dtype = torch.float32,
    prefetch: int = 0,
    next_ids: Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.quantized_embedding` makes, which has looked at the ids; nothing is prefetched here.

    Raises:
        ValueError: an id is outside the table.
    """
    rows, columns = table.shape
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        raise ValueError(f"quantized_embedding: ids must lie in [0, {rows})")
    ids = ids.contiguous()
    if columns > 1 and table.stride(1) != 1:
        table = table.contiguous()
    y = torch.empty((*ids.shape, columns), dtype=dtype, device=table.device)
    steps = (table.stride(0), scale.stride(0))
    inputs = {"ids": ids, "table": span(table), "scale": span(scale)}
    sizes = (ids.numel(), columns, *steps, y.element_size())
    return Launch("quantized_embedding", inputs, {"y": y}, sizes, y)


_TILES = {"int8_tiled": 32, "tiled": 16}
_ROPE_TILE = 16


def whole_table(t: Tensor | None, rope: int) -> Tensor | None:
    """A column for every element of a row, where the table has one for every pair."""
    if t is None:
        return None
    return (torch.cat((t, t), -1) if t.shape[-1] * 2 == rope else t).contiguous()


def mla_kv_epilogue(
    a: Tensor,
    gamma2: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    slot_mapping: Tensor,
    cache: Any,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    ctkv_scale: Tensor | float | None = None,
) -> Launch:
    """The call that `opsmith.ops.mla_kv_epilogue` makes, which has looked at the slots; it writes into the cache.

    `cache` is an `opsmith.ops.MLACache`: its mode, latent and rope are read.
    """
    kv_lora, tile = gamma2.shape[0], _TILES.get(cache.mode, 0)
    joint = cache.rope is None
    rope = cache.latent.shape[3] - kv_lora
    if not joint:
        rope = cache.rope.shape[3] * (cache.rope.shape[1] if tile else 1)
    a = a if a.stride(-1) == 1 else a.contiguous()
    latent = span(cache.latent)
    behind = None if joint else span(cache.rope)
    scale = None if ctkv_scale is None else number(ctkv_scale, a.device)
    inputs = {
        "a": span(a),
        "gamma2": gamma2.contiguous(),
        "cos": whole_table(cos, rope),
        "sin": whole_table(sin, rope),
        "slots": slot_mapping.contiguous(),
        "ctkv": scale,
        "latent": latent,
        "rope": behind,
    }
    outputs = {"latent_out": latent, "rope_out": a.new_empty(0) if behind is None else behind}
    sizes = (
        a.shape[0],
        max(a.stride(0), kv_lora + rope),
        kv_lora,
        rope,
        cache.latent.shape[2 if tile else 1],
        cache.latent.stride(0),
        cache.latent.stride(0) if joint else cache.rope.stride(0),
        tile,
        _ROPE_TILE if tile else 0,
        joint,
        a.element_size(),
        cos is not None,
        interleaved,
        scale is not None,
        eps,
    )
    result = (cache.latent,) if joint else (cache.latent, cache.rope)
    return Launch("mla_kv_epilogue", inputs, outputs if a.shape[0] else {}, sizes, result)


def mla_q_epilogue(
    q: Tensor,
    wuk: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    *,
    interleaved: bool = False,
    joint: bool = False,
    q_nope_scale: Tensor | None = None,
) -> Launch:
    """The call that `opsmith.ops.mla_q_epilogue` makes."""
    (tokens, heads, width), (_, nope, kv_lora) = q.shape, wuk.shape
    rope, quantize = width - nope, q_nope_scale is not None
    q, wuk = q.contiguous(), wuk.contiguous()
    held = torch.int8 if quantize else q.dtype
    q_out = torch.empty((tokens, heads, kv_lora + (rope if joint else 0)), dtype=held, device=q.device)
    q_rope = q.new_empty(0 if joint else (tokens, heads, rope))
    inputs = {
        "q": q,
        "wuk": wuk,
        "cos": whole_table(cos, rope),
        "sin": whole_table(sin, rope),
        "scale": None if q_nope_scale is None else q_nope_scale.float().contiguous(),
    }
    sizes = (
        tokens,
        heads,
        nope,
        rope,
        kv_lora,
        joint,
        q.element_size(),
        cos is not None,
        interleaved,
        quantize,
    )
    result = (q_out,) if joint else (q_out, q_rope)
    return Launch("mla_q_epilogue", inputs, {"q_out": q_out, "q_rope": q_rope}, sizes, result)
