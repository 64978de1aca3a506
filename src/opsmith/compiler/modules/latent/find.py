"""Multi-head latent attention in a model, found by the shapes of what a module multiplies with.

No name is read, of a class, a layer or a size. Four or five projections and one or two norms have the shapes of latent
attention or they do not: the widths of the heads follow from them. Where several readings of one module fit (two ranks
may be equal), and how a head's rows are ordered, the proof decides: only one reading computes what the module does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from opsmith.compiler.modules.linear_layers import layer_of
from opsmith.ops import MLACache, MLAWeights, PackedLinear

Linear = nn.Linear | PackedLinear


@dataclass(frozen=True, eq=False)
class Absorbed:
    """What is made of a module whose other projections are called as they are, by the names of `MLAWeights`."""

    wuk: Tensor  # [heads, nope, kv_lora]
    wuv: Tensor  # [heads, value, kv_lora]
    interleaved: bool


Weights = MLAWeights | Absorbed


@dataclass(frozen=True)
class Reading:
    """Which child of a module does what, and the sizes that follow."""

    kv_a: Linear  # [kv_lora + rope, D]
    kv_norm: Any
    kv_b: Linear  # [heads * (nope + value), kv_lora]
    q: Linear  # [heads * (nope + rope), q_lora or D]
    out: Linear  # [D, heads * value]
    q_a: Linear | None
    q_norm: Any
    heads: int
    nope: int
    rope: int
    value: int
    kv_lora: int
    eps: float

    @property
    def absorbed(self) -> tuple[nn.Module, ...]:
        """The children that the rewritten call no longer calls; the output projection stays."""
        called = () if self.packed else (self.kv_a, self.q, self.q_a)
        return tuple(m for m in (*called, self.kv_norm, self.kv_b, self.q_norm) if m)

    @property
    def packed(self) -> str:
        """The formats of projections in few bits, which stay as they are: unpacked, a token would read more."""
        formats = {m.format for m in (self.kv_a, self.q, self.q_a) if isinstance(m, PackedLinear)}
        return " and ".join(sorted(formats))

    @property
    def dtype(self) -> torch.dtype:
        """That of the hidden states: packed weights do not say it."""
        layers = self.kv_a, self.q, self.kv_b, self.out
        plain = (m.weight.dtype for m in layers if isinstance(m, nn.Linear))
        return next(plain, self.kv_norm.weight.dtype)

    def cache(self, mode: str, blocks: int, block_size: int, device: Any = None) -> MLACache:
        """An empty pool for rows of these sizes."""
        make = partial(MLACache.allocate, kv_lora=self.kv_lora, rope=self.rope)
        device = device or self.kv_norm.weight.device
        return make(mode, blocks, block_size, dtype=self.dtype, device=device)

    def weights(self, interleaved: bool) -> Weights:
        """The weights of `mla_preprocess`; `interleaved`: the rope rows are pairs of neighbors.

        Of packed projections only what is absorbed is made: the values that a packed weight stands for, rounded once.
        """
        kv_b = self.kv_b
        if isinstance(kv_b, PackedLinear):
            kv_b = layer_of(kv_b.dequantize().to(self.dtype))
        if self.packed:
            heads = kv_b.weight.detach().view(self.heads, -1, self.kv_lora)
            wuk, wuv = heads.split((self.nope, self.value), dim=1)
            return Absorbed(wuk.contiguous(), wuv.contiguous(), interleaved)
        named: Any = SimpleNamespace(
            kv_a_proj_with_mqa=self.kv_a,
            kv_a_layernorm=self.kv_norm,
            kv_b_proj=kv_b,
            q_proj=self.q if self.q_a is None else None,
            q_a_proj=self.q_a,
            q_a_layernorm=self.q_norm,
            q_b_proj=None if self.q_a is None else self.q,
            qk_nope_head_dim=self.nope,
            qk_rope_head_dim=self.rope,
            v_head_dim=self.value,
            config=SimpleNamespace(rope_interleave=interleaved),
        )
        return MLAWeights.from_deepseek(named)


def candidates(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[Reading]]]:
    """Modules that may be latent attention, with the readings that their shapes allow."""
    for name, module in model.named_modules():
        found = readings(module) if "forward" not in vars(module) else []
        if found:
            yield name, module, found


def readings(module: nn.Module) -> list[Reading]:
    """Every way to read a module's children as latent attention."""
    linears: list[Any] = [m for m in module.children() if type(m) in (nn.Linear, PackedLinear)]
    norms = [m for m in module.children() if _is_norm(m)]
    others = [m for m in module.children() if m not in linears and m not in norms]
    if any(True for m in others for _ in m.parameters()):
        return []
    if (len(linears), len(norms)) not in ((4, 1), (5, 2)):
        return []
    no_rank = (None,) * (2 - len(norms))  # of the queries
    orders = product(permutations(linears), permutations(norms))
    found = (_read(*some, *no_rank, *those, *no_rank) for some, those in orders)
    return [reading for reading in found if reading is not None]


def _read(
    kv_a: Linear,
    kv_b: Linear,
    q: Linear,
    out: Linear,
    q_a: Linear | None,
    kv_norm: nn.Module,
    q_norm: nn.Module | None,
) -> Reading | None:
    hidden, kv_lora = kv_a.in_features, _width(kv_norm)
    rope = kv_a.out_features - kv_lora
    from_hidden = q if q_a is None else q_a
    if (kv_b.in_features, from_hidden.in_features, out.out_features) != (kv_lora, hidden, hidden):
        return None
    if q_a is not None and q_norm is not None and not q_a.out_features == _width(q_norm) == q.in_features:
        return None
    # heads * (nope + value), heads * value and heads * (nope + rope) are known, and so is rope.
    of_nope = kv_b.out_features - out.in_features
    of_rope = q.out_features - of_nope
    if min(rope, of_nope, of_rope) <= 0 or rope % 2 or of_rope % rope or kv_b.bias is not None:
        return None
    heads = of_rope // rope
    if of_nope % heads or out.in_features % heads:
        return None
    eps = {_eps(norm) for norm in (kv_norm, q_norm) if norm is not None}
    if len(eps) != 1 or None in eps:
        return None
    sizes = (heads, of_nope // heads, rope, out.in_features // heads, kv_lora)
    return Reading(kv_a, kv_norm, kv_b, q, out, q_a, q_norm, *sizes, eps=float(eps.pop() or 0.0))


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters())
    return len(own) == 1 and own[0].dim() == 1 and not list(module.children())


def _width(norm: nn.Module) -> int:
    return next(iter(norm.parameters())).shape[0]


def _eps(norm: nn.Module) -> float | None:
    """The one small number that a norm keeps, whatever it is called."""
    small = [v for v in vars(norm).values() if isinstance(v, float) and 0.0 < v < 1e-2]
    return small[0] if len(small) == 1 else None
