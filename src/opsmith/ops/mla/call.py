"""One call of MLA's operators: what it is made of, checked once at the public door and handed down as it is.

Beside a name of ours stands that of the published kernels, which the public functions take: docs/operators/mla.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from opsmith.call.arguments import EPS, Maybe, check_device, check_fit, check_float, check_number, short
from opsmith.call.layouts import dense_rows, fresh
from opsmith.ops.mla.cache import MLACache, check_mapping
from opsmith.ops.mla.check import check_inference
from opsmith.ops.mla.weights import Parts
from opsmith.ops.rms_norm.quant import wide
from opsmith.ops.rope import definition as rotated

# What a call that a kernel is given before its checks raises, where something is wrong with it.
REFUSALS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
Pair = tuple[Tensor, Maybe]  # queries and their rope part, which is within them for a "joint" cache
Result = Pair | tuple[Tensor, Maybe, Tensor]


class Rotation(NamedTuple):
    """How a call's tokens are rotated: [T, rope], or half as wide, a row of the table for each; None: not at all."""

    cos: Maybe
    sin: Maybe
    interleaved: bool = False

    def check(self, op: str, name: str, x: Tensor, rope: int) -> None:
        """Refuse cosines and sines that are not one row of `rope` (or half of it) for each token of x."""
        cos, sin, _ = self
        if cos is None and sin is None:
            return
        words, either = "T H D" if x.dim() == 3 else "T D", (None, torch.float32)
        check_fit(op, (name, x, words), ("cos", cos, "T R", *either), ("sin", sin, "T R", *either))
        if cos is not None and (rope % 2 or cos.shape[1] not in (rope, rope // 2)):
            raise ValueError(
                f"{op}: cos and sin must have shape [T, {rope}], a row for each token (rope must be even), got "
                f"{tuple(cos.shape)}"
            )

    def rows(self) -> tuple[Maybe, Maybe]:
        """The table as kernels take it."""
        cos, sin, _ = self
        return None if cos is None else dense_rows(cos), None if sin is None else dense_rows(sin)

    def rotate(self, x: Tensor, *, wider: bool = False) -> Tensor:
        """[T, rope] or [T, H, rope] by PyTorch's operators, in x's dtype or in float32, rounded to x's own."""
        cos, sin, interleaved = self
        if cos is None or sin is None or not x.shape[-1]:
            return x
        heads = x if x.dim() == 3 else x.unsqueeze(1)
        if wider:
            heads, cos, sin = wide(heads), wide(cos), wide(sin)
        y = rotated(heads, cos, sin, None, x.shape[-1], interleaved).to(x.dtype)
        return y if x.dim() == 3 else y.squeeze(1)


class Call(NamedTuple):
    """One call of `mla_preprocess`."""

    x: Tensor  # [T, D]
    w: Parts
    rotation: Rotation
    slots: Tensor  # [T], slot_mapping
    cache: MLACache
    eps: float = 1e-6
    return_latent_q: bool = False
    latent_scale: Maybe = None  # ctkv_scale, one number: what int8 rows of the cache were divided by
    query_scale: Maybe = None  # q_nope_scale, [H]: what int8 queries are multiplied with

    @property
    def joint(self) -> bool:
        return self.cache.mode == "joint"

    @property
    def tensors(self) -> tuple[Maybe, ...]:
        """Those through which gradients may flow."""
        return self.x, self.rotation.cos, self.rotation.sin, *self.w.tensors

    def remember(self) -> None:
        """In the cache, how its rows divide, and the scales by which `mla_attention` reads int8 ones."""
        self.cache.kv_lora = self.w.kv_lora
        if self.latent_scale is not None:
            self.cache.ctkv_scale, self.cache.q_nope_scale = self.latent_scale, self.query_scale

    def finish(
        self, q_out: Tensor, q_rope: Tensor, k_nope: Tensor, k_rope: Tensor, latent_q: Maybe
    ) -> Result:
        """Write the keys into the cache; the queries as the call returns them."""
        self.cache.write(self.slots, k_nope, k_rope)
        self.remember()
        pair = join(q_out, q_rope, self.joint)
        return (*pair, latent_q) if self.return_latent_q and latent_q is not None else pair

    def checked(self, op: str) -> Call:
        """The same, its scales tensors; refused where an argument is wrong, before anything is written.

        But for the numbers of the slots, which whoever runs the call looks at.
        """
        x, w = self.x, self.w
        check_float(op, x, "x", least_dim=2)
        size, spare = w.wdqkv.shape[1], 0
        if w.quant == "weight_int4":
            assert w.descale0 is not None
            size = 2 * size  # K, padded to whole groups
            spare = size // max(1, w.descale0.shape[1]) - 1
        if x.dim() != 2 or not size - spare <= x.shape[1] <= size:
            raise ValueError(
                f"{op}: x must have shape [T, {size}], D being the columns of wdqkv {tuple(w.wdqkv.shape)}, got "
                f"{tuple(x.shape)}"
            )
        if w.gamma0 is not None and w.gamma0.shape[0] != x.shape[1]:
            raise ValueError(
                f"{op}: x must have shape [T, {w.gamma0.shape[0]}] like gamma0, got {tuple(x.shape)}"
            )
        if x.dtype != w.wuk.dtype:
            raise TypeError(
                f"{op}: x must be {short(w.wuk.dtype)} like the weights, got {short(x.dtype)}; cast one of them"
            )
        check_device(op, x, w.wuk, "x", "the weights")
        self.rotation.check(op, "x", x, w.rope)
        self.cache.check(op, w.kv_lora, w.rope, x)
        if self.return_latent_q and w.gamma1 is None:
            raise ValueError(
                f"{op}: return_latent_q asks for latent queries, and these weights have no q_lora"
            )
        scales = self.cache.check_scales(op, self.latent_scale, w.heads, self.query_scale)
        check_mapping(op, self.slots, x.shape[0], self.cache)
        if w.quant is not None or self.cache.mode == "int8_tiled":
            check_inference(op, *self.tensors)
        check_number(op, "eps", self.eps, EPS)
        return self._replace(latent_scale=scales[0], query_scale=scales[1])


def in_float32(scale: Maybe) -> Maybe:
    """An int8 cache's scale as kernels read it."""
    return None if scale is None else scale.float().contiguous()


def new_queries(like: Tensor, wuk: Tensor, rope: int, joint: bool, int8: bool = False) -> Pair:
    """Memory for the queries of `like`, [T, ...]: two parts, or both as one and None."""
    heads, _, kv_lora = wuk.shape
    shape = like.shape[0], heads
    if joint:
        return fresh(like, (*shape, kv_lora + rope)), None
    q_out = like.new_empty((*shape, kv_lora), dtype=torch.int8) if int8 else fresh(like, (*shape, kv_lora))
    return q_out, fresh(like, (*shape, rope))


def join(q_out: Tensor, q_rope: Tensor, joint: bool) -> Pair:
    """One tensor for a joint cache, two for the others."""
    return (torch.cat((q_out, q_rope), -1), None) if joint else (q_out, q_rope)
