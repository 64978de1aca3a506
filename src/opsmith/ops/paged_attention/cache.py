"""Writing new keys and values to their slots of a cache in blocks, rounded to int8 where the cache is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from opsmith.call.arguments import check_fit
from opsmith.call.dispatch import compiling, kernels, native
from opsmith.call.fast import direct
from opsmith.call.layouts import dense_rows, nbytes
from opsmith.call.overlap import share
from opsmith.kernels import libraries
from opsmith.operator import Cost, Implementation, Kind, Make, Operator, Sample, register
from opsmith.ops.attention import INTEGERS
from opsmith.ops.pages import caches, check_slots, has_values, some_slots, write_rows

_OP = "reshape_and_cache"
LEAST = 1e-30  # a row whose numbers are all below this is rounded to zeros, as its inverse may be no float32
Results = tuple[Tensor, ...]


def reshape_and_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens to their slots of the caches; slot -1 is skipped.

    `k_cache[slot // block_size, slot % block_size] = k[t]`, and the same for v. Into int8 caches every row of a head
    goes as `round(127 x / m)` with `m = max|x|`, and its scale m / 127 to the same place of k_scale or v_scale.

    >>> k_cache, v_cache = torch.zeros(2, 10, 16, 2, 64)
    >>> reshape_and_cache(*torch.randn(2, 3, 2, 64), k_cache, v_cache, torch.tensor([48, -1, 49]))
    >>> k_cache[3, :2].count_nonzero().item()
    256

    Args:
        k: [T, Hkv, D], float32, bfloat16 or float16 (float64 through PyTorch).
        v: [T, Hkv, Dv] in k's dtype.
        k_cache: [blocks, block_size, Hkv, D] in k's dtype, or int8. May be a slice of a pool.
        v_cache: [blocks, block_size, Hkv, Dv], as k_cache.
        slot_mapping: [T], int32 or int64: block * block_size + place in the block, no two alike; or -1.
        k_scale, v_scale: [blocks, block_size, Hkv] float32, of int8 caches, written too.

    Raises:
        TypeError, ValueError: for a wrong dtype, shape or device, and for a slot that is not there, before anything is
            written. No gradient passes through a cache.

    Source: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023.
    """
    if not compiling():
        given = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
        try:
            if direct.new_reshape_and_cache(k, v, slot_mapping, **given):
                return
        except RuntimeError:  # the checks say why
            pass
    _check(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    # Not torch.no_grad(): a compiled graph that raises within it leaves gradients off.
    dense = all(t.stride(-1) == 1 or t.shape[-1] < 2 or not t.numel() for t in (k_cache, v_cache))
    write = _native if dense and _supports(k, v, slot_mapping, k_scale=k_scale) is True else _reference
    write(k.detach(), v.detach(), k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _check(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, k_scale: Any, v_scale: Any) -> None:
    check_fit(
        _OP,
        *(("k", k, "T Hkv D"), ("v", v, "T Hkv Dv")),
        *caches(_OP, k_cache, v_cache, k_scale, v_scale),
        ("slot_mapping", slots, "T", *INTEGERS),
    )
    if has_values(k_cache, v_cache) and k_cache.data_ptr() and share(k_cache, v_cache):
        raise ValueError(f"{_OP}: k_cache and v_cache share memory; pass each of them some of its own")
    if not slots.is_cuda:
        check_slots(_OP, slots, *k_cache.shape[:2])


def _reference(k: Tensor, v: Tensor, *rest: Any) -> None:
    """The definition, in plain PyTorch."""
    k_cache, v_cache, slots, k_scale, v_scale = rest
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        if scale is None:
            pairs = [(cache, x)]
        else:
            # In float32 whatever the dtype, so that there is one answer to what x is rounded to.
            numbers = x.float()
            most = numbers.abs().amax(-1) if x.shape[-1] else numbers.new_zeros(x.shape[:-1])
            inverse = torch.where(most > LEAST, torch.full_like(most, 127) / most, 0)
            digits = (numbers * inverse.unsqueeze(-1)).round().to(torch.int8)
            pairs = [(cache, digits), (scale, (most / 127).to(scale.dtype))]
        for held, new in pairs:
            write_rows(held, slots, new)


def _supports(k: Tensor, v: Tensor, slots: Tensor, **options: Any) -> bool | str:
    scale = options.get("k_scale")
    if scale is not None and scale.dtype == torch.float64:
        return "the kernels write scales in float32"
    return native(k, _OP)


def _native(k: Tensor, v: Tensor, *rest: Any) -> None:
    """The kernel."""
    k_cache, v_cache, slots, k_scale, v_scale = rest
    caches = {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}
    torch.ops.opsmith.reshape_and_cache.default(dense_rows(k), dense_rows(v), slots, **caches)


def cache_form(
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    *,
    blocks: int,
    block_size: int,
    int8: bool = False,
    by: Callable[..., None] | None = None,
) -> Results:
    """`reshape_and_cache` into fresh caches, as a function of tensors alone: the caches, then the scales of int8 ones.

    A card's results are all that a call changes, so that what holds operators to their cards can hold this one too.
    """
    shape = (blocks, block_size, k.shape[1])
    k_cache, v_cache = (
        torch.zeros((*shape, t.shape[2]), dtype=torch.int8 if int8 else t.dtype, device=t.device)
        for t in (k, v)
    )
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    scales = [torch.zeros(shape, dtype=wide, device=k.device) for _ in range(2 * int8)]
    k_scale, v_scale = scales or (None, None)
    if by is None:
        reshape_and_cache(k, v, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)
    else:
        by(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return (k_cache, v_cache, *scales)


def _cost(
    k: Tensor, v: Tensor, slot_mapping: Tensor, *, blocks: int, block_size: int, int8: bool = False
) -> Cost:
    heads, row = k.shape[1], k.shape[2] + v.shape[2]
    slots = blocks * block_size * heads  # this form makes its caches
    held = row * (1 if int8 else k.element_size()) + 8 * int8
    read = k.shape[0] * heads * row * k.element_size() + slot_mapping.numel() * slot_mapping.element_size()
    return Cost(3.0 * k.shape[0] * heads * row if int8 else 0.0, read + slots * held)


def _entry_cost(k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, **rest: Any) -> Cost:
    """Of a call of the dispatcher's entry: rows read and written; of the caches only the slots of these tokens."""
    elements, held = k.numel() + v.numel(), k_cache.element_size()
    scales = 0 if rest["k_scale"] is None else 8 * k.numel() // max(k.shape[-1], 1)
    return Cost(3.0 * elements if scales else 0.0, nbytes(k, v, slot_mapping) + elements * held + scales)


def _samples(make: Make) -> Iterator[Sample]:
    for int8 in (False, True):
        name = "int8 " if int8 else ""
        for tokens, heads, d in ((5, 2, 33), (9, 3, 40), (33, 2, 65), (1, 1, 8)):
            args = make(tokens, heads, d), make(tokens, heads, d), some_slots(make, tokens, 48)
            yield Sample(f"{name}{tokens}x{heads}x{d}", args, {"blocks": 3, "block_size": 16, "int8": int8})
        options = {"blocks": 40, "block_size": 1, "int8": int8}
        slots = some_slots(make, 7, 40).to(torch.int32)
        yield Sample(f"{name}wider values", (make(7, 2, 24), make(7, 2, 56), slots), options)
        yield Sample(f"{name}rows of zeros", (make(7, 2, 24, scale=0.0), make(7, 2, 24), slots), options)
        packed = make(7, 3, 2, 16)
        yield Sample(f"{name}packed qkv", (packed[:, 1], packed[:, 2], slots), options)
        yield Sample(f"{name}strided", (make(7, 16, 2).mT, make(7, 16, 2).mT, slots), options)
        yield Sample(f"{name}no tokens", (make(0, 2, 16), make(0, 2, 16), slots[:0]), options)


def _workloads(make: Make) -> Iterator[Sample]:
    for int8 in (False, True):
        args = make(4096, 8, 128), make(4096, 8, 128), some_slots(make, 4096, 4096, skip=False)
        yield Sample(
            f"4096 tokens, 8x128{', int8' * int8}", args, {"blocks": 256, "block_size": 16, "int8": int8}
        )


def _promised(k: Tensor, v: Tensor, slots: Tensor, **options: Any) -> bool:
    """Finite calls in which no two tokens share a slot."""
    kept = slots[slots >= 0]
    return bool(k.isfinite().all()) and bool(v.isfinite().all()) and kept.unique().numel() == kept.numel()


CARD = register(
    Operator(
        name=_OP,
        kind=Kind.CACHE,
        function=cache_form,
        reference=partial(cache_form, by=_reference),
        cost=_cost,
        samples=_samples,
        workloads=_workloads,
        domain=_promised,
        implementations=[
            *kernels(partial(cache_form, by=_native), _supports, takes_out=False),
            Implementation("eager", partial(cache_form, by=_reference)),
        ],
        patterns=(),
        entries={"reshape_and_cache": _entry_cost},
        schemas=(
            "reshape_and_cache(Tensor k, Tensor v, Tensor slot_mapping, *, Tensor(a!) k_cache, Tensor(b!) v_cache, "
            "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> ()",
        ),
        differentiable=False,
        source="Kwon et al., 2023",
    )
)

libraries.offer("paged_attention", "reshape_and_cache")
