"""One call of MLA's operators: what it is made of, checked once at the public door and handed down as it is.

Beside a name of ours stands that of the published kernels, which the public functions take: docs/operators/mla.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from opsmith.call.arguments import check_float, check_number, short
from opsmith.call.dispatch import needs_grad
from opsmith.ops.mla.cache import MLACache, check_slots
from opsmith.ops.mla.weights import Parts

Maybe = torch.Tensor | None
Pair = tuple[torch.Tensor, Maybe]  # queries and their rope part, which is within them for a "joint" cache
Result = Pair | tuple[torch.Tensor, Maybe, torch.Tensor]


class Rotation(NamedTuple):
    """How a call's tokens are rotated: [T, rope], or half as wide, a row of the table for each; None: not at all."""

    cos: Maybe
    sin: Maybe
    interleaved: bool = False

    def check(self, op: str, x: torch.Tensor, rope: int) -> None:
        """Refuse cosines and sines that are not one row of `rope` (or half of it) for each token of x."""
        cos, sin, _ = self
        if cos is None and sin is None:
            return
        tokens = x.shape[0]
        for name, t in (("cos", cos), ("sin", sin)):
            if not isinstance(t, torch.Tensor):
                raise TypeError(
                    f"{op}: {name} must be a tensor [T, rope], got {type(t).__name__}; both may be None"
                )
            if rope % 2 or tuple(t.shape) not in ((tokens, rope), (tokens, rope // 2)):
                raise ValueError(
                    f"{op}: {name} must have shape ({tokens}, {rope}), a row for each token (rope must be even), got "
                    f"{tuple(t.shape)}"
                )
            check_float(op, t, name)
            check_dtype(op, name, t, x.dtype)
            if t.device != x.device:
                raise ValueError(f"{op}: {name} is on {t.device}, the input on {x.device}; move one of them")
        if cos is not None and sin is not None and cos.shape != sin.shape:
            raise ValueError(
                f"{op}: cos and sin must be alike, got {tuple(cos.shape)} and {tuple(sin.shape)}"
            )

    def rows(self, some: slice = slice(None)) -> tuple[Maybe, Maybe]:
        """The table of some tokens as kernels take it."""
        cos, sin = rows_of(self.cos), rows_of(self.sin)
        return None if cos is None else cos[some], None if sin is None else sin[some]


@dataclass(frozen=True)
class Call:
    """One call of `mla_preprocess`."""

    x: torch.Tensor  # [T, D]
    w: Parts
    rotation: Rotation
    slots: torch.Tensor  # [T], slot_mapping
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

    def remember_scales(self) -> None:
        """In the cache: `mla_attention` reads its int8 rows by them."""
        if self.latent_scale is not None:
            self.cache.ctkv_scale, self.cache.q_nope_scale = self.latent_scale, self.query_scale

    def finish(
        self,
        q_out: torch.Tensor,
        q_rope: torch.Tensor,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        latent_q: Maybe,
    ) -> Result:
        """Write the keys into the cache; the queries as the call returns them."""
        self.cache.write(self.slots, k_nope, k_rope)
        self.remember_scales()
        pair = join(q_out, q_rope, self.joint)
        return (*pair, latent_q) if self.return_latent_q and latent_q is not None else pair

    def checked(self, op: str, *, values: bool = True) -> Call:
        """The same, its scales tensors; refused where an argument is wrong, before anything is written.

        Without `values` not the numbers of the slots, which whoever runs the call looks at.
        """
        x, w, down = self.x, self.w, self.w.down
        check_float(op, x, "x", least_dim=2)
        size = down.weight.shape[1]
        if w.quant == "weight_int4":
            assert down.descale is not None
            size = 2 * size  # K, padded to whole groups
            fits = x.dim() == 2 and size - size // max(1, down.descale.shape[1]) < x.shape[1] <= size
        else:
            fits = x.dim() == 2 and x.shape[1] == size
        if not fits:
            raise ValueError(
                f"{op}: x must have shape [T, {size}], D being the columns of wdqkv {tuple(down.weight.shape)}, got "
                f"{tuple(x.shape)}"
            )
        if w.input_norm is not None and w.input_norm.shape[0] != x.shape[1]:
            raise ValueError(
                f"{op}: x must have shape [T, {w.input_norm.shape[0]}] like gamma0, got {tuple(x.shape)}"
            )
        if x.dtype != w.k_up.dtype:
            raise TypeError(
                f"{op}: x must be {short(w.k_up.dtype)} like the weights, got {short(x.dtype)}; cast one of them"
            )
        if x.device != w.k_up.device:
            raise ValueError(f"{op}: x is on {x.device}, the weights on {w.k_up.device}; move one of them")
        self.rotation.check(op, x, w.rope)
        self.cache.check(op, w.kv_lora, w.rope, x.dtype, x.device)
        if self.return_latent_q and w.q_norm is None:
            raise ValueError(
                f"{op}: return_latent_q asks for latent queries, and these weights have no q_lora"
            )
        scales = self.cache.check_scales(op, self.latent_scale, (self.query_scale, w.heads))
        check_slots(op, self.slots, x.shape[0], self.cache, values=values)
        if w.quant is not None or self.cache.mode == "int8_tiled":
            check_inference(op, *self.tensors)
        check_number(op, "eps", self.eps)
        return replace(self, latent_scale=scales[0], query_scale=scales[1])


def rows_of(t: Any) -> Any:
    """With a contiguous last dimension; itself, where it has one."""
    return t if t is None or t.shape[-1] < 2 or t.stride(-1) == 1 else t.contiguous()


def in_float32(scale: Maybe) -> Maybe:
    """An int8 cache's scale as kernels read it."""
    return None if scale is None else scale.float().contiguous()


def new_queries(like: torch.Tensor, rope: int, kv_lora: int, joint: bool, int8: bool, heads: int = 0) -> Pair:
    """Memory for the queries of `like`, [T, H, ...] or [T, ...]: two parts, or both as one and None."""
    shape = (like.shape[0], heads or like.shape[1])
    if joint:
        return like.new_empty((*shape, kv_lora + rope)), None
    # The same way twice: the second time its code is in cache.
    q_out = like.new_empty((*shape, kv_lora), dtype=torch.int8) if int8 else like.new_empty((*shape, kv_lora))
    return q_out, like.new_empty((*shape, rope))


def join(q_out: torch.Tensor, q_rope: torch.Tensor, joint: bool) -> Pair:
    """One tensor for a joint cache, two for the others."""
    return (torch.cat((q_out, q_rope), -1), None) if joint else (q_out, q_rope)


def check_dtype(op: str, name: str, t: torch.Tensor, dtype: torch.dtype) -> None:
    if t.dtype not in (dtype, torch.float32):
        either = " or ".join(dict.fromkeys((short(dtype), "float32")))
        raise TypeError(f"{op}: {name} must be {either}, got {short(t.dtype)}; cast it")


def check_inference(op: str, *tensors: Maybe) -> None:
    """Quantized forms have no gradient, and say so."""
    if needs_grad(*tensors):
        raise ValueError(
            f"{op}: the quantized form is inference only, and an argument requires gradients; call it under "
            "torch.no_grad(), or train the unquantized form"
        )
