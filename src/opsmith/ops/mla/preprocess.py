"""MLA pre-processing: thirteen operators between a token's hidden state and its attention, as one."""

from __future__ import annotations

from typing import Any

import torch

from opsmith.call.common import check_float, check_number, compiling, native, needs_grad, short
from opsmith.kernels import calls
from opsmith.kernels.triton import DEVICE
from opsmith.ops.mla.cache import MLACache, check_slots
from opsmith.ops.mla.check import check_cache_type, check_inference, check_scales, check_table
from opsmith.ops.mla.epilogues import join, new_queries
from opsmith.ops.mla.parts import Parts, rows_of
from opsmith.ops.mla.reference import define
from opsmith.ops.mla.weights import MLAWeights

_FORMS = {
    None: 0,
    "per_tensor": 1,
    "per_token": 2,
    "weight_int8": 3,
    "weight_int4": 4,
}  # as kernels count them
_MOST_TOKENS = 64  # whose activations stay in cache beside a weight that is read once

Result = tuple[torch.Tensor, torch.Tensor | None] | tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]


def mla_preprocess(
    x: torch.Tensor,
    w: MLAWeights,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    *,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: torch.Tensor | float | None = None,
    q_nope_scale: torch.Tensor | None = None,
) -> Result:
    """From hidden states to queries in the latent space of the cache, which gets its rows on the way.

    `y = rms_norm(x, gamma0)`; `ckv, k_pe, ql = split(y @ wdqkv.T)`; `q = rms_norm(ql, gamma1) @ wuq.T`;
    `q_out = q_nope @ wuk`, `q_rope = rope(q_pe)`; `cache[slot[t]] = (rms_norm(ckv, gamma2), rope(k_pe))`.

    >>> w = MLAWeights(
    ...     torch.randn(32 + 8 + 24, 64), torch.randn(4 * (16 + 8), 24), torch.randn(4, 16, 32),
    ...     gamma0=torch.ones(64), gamma1=torch.ones(24), gamma2=torch.ones(32),
    ...     heads=4, nope=16, rope=8, kv_lora=32, q_lora=24,
    ... )
    >>> cache = MLACache.allocate("split", 2, 16, kv_lora=32, rope=8, dtype=torch.float32)
    >>> cos, sin = torch.randn(3, 8), torch.randn(3, 8)
    >>> q_out, q_rope = mla_preprocess(torch.randn(3, 64), w, cos, sin, torch.tensor([0, 1, 17]), cache)
    >>> q_out.shape, q_rope.shape
    (torch.Size([3, 4, 32]), torch.Size([3, 4, 8]))

    Args:
        x: [T, D], float32, bfloat16 or float16, in the dtype of `w.wuk` (float64 through PyTorch).
        w: the layer's weights, in floating point or quantized.
        cos, sin: [T, rope], each token's row of the table, in x's dtype or float32; both None: no rotation.
        slot_mapping: [T] int32 or int64: block * block_size + offset; -1: this token is not written. No two tokens may
            share a slot.
        cache: written in place. Autograd sees it: train with a fresh cache for every step.
        eps: added to the mean square, under the root, of all three norms.
        return_latent_q: return the normalized latent queries [T, q_lora] too, as sparse attention's indexer wants them.
        ctkv_scale: one number that the normalized latent is divided by; for mode "int8_tiled" alone.
        q_nope_scale: [H], what q_out is multiplied by; the same.

    Returns:
        (q_out, q_rope): [T, H, kv_lora] (int8 in "int8_tiled") and [T, H, rope]; in mode "joint"
        [T, H, kv_lora + rope] and None. With `return_latent_q` a third.

    Raises:
        TypeError, ValueError: for a wrong dtype, layout, rank, device or slot, naming the tensor and both shapes,
            before anything is written; for quantized weights or an int8 cache while gradients are recorded.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024.
    """
    op = "mla_preprocess"
    if ctkv_scale is None and q_nope_scale is None and type(w) is MLAWeights and type(cache) is MLACache:
        done = _at_once(x, w, cos, sin, slot_mapping, cache, eps, return_latent_q)
        if done is not None:
            return done
    if not isinstance(w, MLAWeights):
        raise TypeError(
            f"{op}: w must be MLAWeights, got {type(w).__name__}; build it, or MLAWeights.from_deepseek"
        )
    check_cache_type(op, cache)
    parts = w.parts()
    given = ctkv_scale, q_nope_scale, return_latent_q
    scales = check(op, x, parts, cos, sin, slot_mapping, cache, *given, values=False)
    check_number(op, "eps", eps)
    return compute(x, parts, cos, sin, slot_mapping, cache, eps, return_latent_q, *scales)


def _at_once(
    x: Any, w: MLAWeights, cos: Any, sin: Any, slot_mapping: Any, cache: MLACache, eps: float, latent: bool
) -> Result | None:
    """The kernel, for a call on a CPU in the usual form, of which it refuses itself, before anything is written, what
    does not fit; None for any other call, and for a refused one.

    While weights stream from memory nothing else stays in cache, and every check from Python waits for its objects.
    """
    mode = cache.mode
    ready = None if compiling() or mode == "int8_tiled" else w.prepared()
    if ready is None:
        return None
    rows, quant, interleaved, q_out, q_rope, q_lora = ready
    if latent and q_lora is None:
        return None
    try:
        sizes = calls.sizes(x)
        if len(sizes) != 2 or sizes[0] > _MOST_TOKENS:
            return None
        joint = mode == "joint"
        widths = ((q_out[0], q_out[1] + q_rope[1]), None) if joint else (q_out, q_rope)
        made: Any = calls.new_mla_preprocess(
            x,
            *rows,
            cos,
            sin,
            slot_mapping,
            _FORMS[quant],
            interleaved,
            mode == "tiled",
            eps,
            None,
            None,
            *widths,
            cache.latent,
            cache.rope,
            q_lora if latent else None,
        )
    except (RuntimeError, TypeError, AttributeError):
        return None
    if made is None or not joint:
        return made  # type: ignore[no-any-return]
    cache.kv_lora = q_out[1]
    return (made[0], None, made[1]) if latent else (made, None)


def compute(
    x: torch.Tensor,
    w: Parts,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    *args: Any,
) -> Result:
    """By the kernel, where it takes this call and no gradients are recorded."""
    # A graph is captured for any number of tokens, and the kernel's blocks of tokens would be one for each number.
    captured = torch.compiler.is_compiling()
    if captured or supports(x, w) is not True or needs_grad(x, cos, sin, *w.tensors):
        check_slots("mla_preprocess", slot_mapping, x.shape[0], cache)
        return run(x, w, cos, sin, slot_mapping, cache, *args)
    # The kernel looks at all slots of a region before it writes, so that a look from here would only cost time.
    looked = x.shape[0] > _MOST_TOKENS or DEVICE == "cpu" or not x.is_cpu
    check_slots("mla_preprocess", slot_mapping, x.shape[0], cache, values=looked)
    try:
        return kernel(x, w, cos, sin, slot_mapping, cache, *args)
    except RuntimeError:
        if not looked:
            check_slots("mla_preprocess", slot_mapping, x.shape[0], cache)  # names what is wrong
        raise


def supports(x: torch.Tensor, w: Parts) -> bool | str:
    """Whether the kernel takes these weights and as many tokens, or why not."""
    if w.quant is None and x.shape[0] > _MOST_TOKENS:
        return f"{x.shape[0]} tokens are more than {_MOST_TOKENS}: the matmuls of PyTorch are faster"
    return native(x, "mla_preprocess")


def kernel(
    x: torch.Tensor,
    w: Parts,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: torch.Tensor | None = None,
    q_nope_scale: torch.Tensor | None = None,
) -> Result:
    """On a CPU, one parallel region for every `_MOST_TOKENS` tokens."""
    tokens, (heads, _, kv_lora), rope = x.shape[0], w.wuk.shape, w.rope
    x, cos, sin = rows_of(x), rows_of(cos), rows_of(sin)
    q_out, q_rope = new_queries(x, rope, kv_lora, cache.mode == "joint", q_nope_scale is not None, heads)
    latent_q = x.new_empty((tokens, w.down.weight.shape[0] - kv_lora - rope)) if return_latent_q else None
    held = w.as_rows()
    most = _MOST_TOKENS if x.is_cpu and DEVICE != "cpu" else max(tokens, 1)
    for first in range(0, tokens, most):
        some = slice(first, first + most) if tokens > most else slice(None)
        torch.ops.opsmith.mla_preprocess.default(
            x[some],
            *held,
            None if cos is None else cos[some],
            None if sin is None else sin[some],
            slot_mapping[some],
            _FORMS[w.quant],
            w.interleaved,
            "tiled" in cache.mode,
            eps,
            None if ctkv_scale is None else ctkv_scale.float(),
            None if q_nope_scale is None else q_nope_scale.float().contiguous(),
            q_out=q_out[some],
            q_rope=None if q_rope is None else q_rope[some],
            latent=cache.latent,
            rope=cache.rope,
            latent_q=None if latent_q is None else latent_q[some],
        )
    cache.kv_lora = kv_lora
    if ctkv_scale is not None:
        cache.ctkv_scale, cache.q_nope_scale = ctkv_scale, q_nope_scale
    return (q_out, q_rope) if latent_q is None else (q_out, q_rope, latent_q)


def run(
    x: torch.Tensor,
    w: Parts,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    cache: MLACache,
    eps: float = 1e-6,
    return_latent_q: bool = False,
    ctkv_scale: torch.Tensor | None = None,
    q_nope_scale: torch.Tensor | None = None,
) -> Result:
    """The definition, in plain PyTorch, and the write into the cache."""
    d = define(x, w, cos, sin, eps=eps, ctkv_scale=ctkv_scale, q_nope_scale=q_nope_scale)
    cache.write(slot_mapping, d.k_nope, d.k_rope)
    if ctkv_scale is not None:
        cache.ctkv_scale, cache.q_nope_scale = ctkv_scale, q_nope_scale
    pair = join(d.q_out, d.q_rope, cache.mode == "joint")
    if not return_latent_q:
        return pair
    assert d.latent_q is not None
    return *pair, d.latent_q


def check(
    op: str,
    x: Any,
    w: Parts,
    cos: Any,
    sin: Any,
    slot_mapping: Any,
    cache: MLACache,
    ctkv_scale: Any = None,
    q_nope_scale: Any = None,
    return_latent_q: bool = False,
    *,
    values: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Refuse wrong arguments before anything is written; the scales of an int8 cache as tensors.

    Without `values` not the numbers of the slots, which `compute` looks at.
    """
    check_float(op, x, "x", least_dim=2)
    size = w.down.weight.shape[1]
    if w.quant == "weight_int4":
        assert w.down.descale is not None
        size = 2 * size  # K, padded to whole groups
        fits = x.dim() == 2 and size - size // max(1, w.down.descale.shape[1]) < x.shape[1] <= size
    else:
        fits = x.dim() == 2 and x.shape[1] == size
    if not fits:
        raise ValueError(
            f"{op}: x must have shape [T, {size}], D being the columns of wdqkv {tuple(w.down.weight.shape)}, got "
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
    if x.device != w.wuk.device:
        raise ValueError(f"{op}: x is on {x.device}, the weights on {w.wuk.device}; move one of them")
    check_table(op, cos, sin, x, w.rope)
    cache.check(op, w.kv_lora, w.rope, x.dtype, x.device)
    if return_latent_q and w.gamma1 is None:
        raise ValueError(f"{op}: return_latent_q asks for latent queries, and these weights have no q_lora")
    scales = check_scales(op, cache, ctkv_scale, (q_nope_scale, w.heads))
    check_slots(op, slot_mapping, x.shape[0], cache, values=values)
    if w.quant is not None or cache.mode == "int8_tiled":
        check_inference(op, x, cos, sin, *w.tensors)
    return scales
